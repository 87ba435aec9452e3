"""Spans: how they nest, what an error leaves, and that nothing is recorded unless asked."""

from __future__ import annotations

import threading

import pytest

from onnxplug.profiling.recorder import Recorder, active, recording, span


def test_nothing_is_recorded_unless_asked() -> None:
    assert active() is None
    with span("capture") as found:
        assert found is None


def test_spans_lie_within_each_other() -> None:
    with recording() as recorder, span("export", opset=21) as outer:
        assert active() is recorder
        with span("capture", "stage") as first, span("Linear", "module") as module:
            pass
        with span("conversion") as second:
            pass
    assert active() is None
    assert recorder.spans == [outer, first, module, second]
    assert [found.parent for found in recorder.spans if found is not None] == [None, outer, first, outer]
    assert outer is not None
    assert first is not None
    assert module is not None
    assert second is not None
    assert outer.about == {"opset": 21}
    assert (
        outer.start <= first.start <= module.start <= module.end <= first.end <= second.start <= second.end <= outer.end
    )
    assert outer.within == (first.end - first.start) + (second.end - second.start)
    assert first.own_seconds == pytest.approx(first.seconds - module.seconds)
    assert module.is_within(outer)
    assert not module.is_within(second)


def test_an_error_is_noted_and_ends_what_is_open() -> None:
    recorder = Recorder()

    def fails() -> None:
        recorder.begin("capture")
        raise KeyError("x")

    with pytest.raises(KeyError), recorder.span("export"):
        fails()
    outer, inner = recorder.spans
    assert outer.about == {"error": "KeyError"}
    assert inner.end <= outer.end
    with recorder.span("saving") as later:
        pass
    assert later.parent is None
    recorder.finish(outer)  # it has ended already, and nothing else is open
    assert recorder.begin("verification").parent is None


def test_totals_are_of_the_innermost_stage() -> None:
    recorder = Recorder()
    recorder.total("part", "no stage is open").calls += 1
    with recorder.span("interpretation") as stage, recorder.span("aten::add", "rule"):
        recorder.total("part", "shape inference").calls += 1
        recorder.total("part", "shape inference").nanoseconds += 5
    assert {key: (total.calls, total.nanoseconds) for key, total in stage.totals.items()} == {
        ("part", "shape inference"): (1, 5)
    }


def test_each_thread_has_its_own() -> None:
    seen: list[Recorder | None] = []
    with recording():
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
    assert seen == [None]
