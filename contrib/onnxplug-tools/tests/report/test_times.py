"""The times of one report among others."""

from __future__ import annotations

import pytest
from onnxplug_tools.profiling.observer import recording
from onnxplug_tools.profiling.recorder import Recorder
from onnxplug_tools.report.times import Times

from onnxplug.observers import Events, span


def test_spans_outside_of_the_report_are_left_out() -> None:
    with recording() as recorder, span("all"):
        with span("before"):
            pass
        times = Times(recorder)
        times.begin()
        with span("mine"), span("part"):
            pass
        times.end()
        with span("after"):
            pass
        times.begin()
        with span("later"):
            pass
        times.end()
    assert [stage.name for stage in times.stages()] == ["mine", "later"]
    assert [part.name for part in times.stages()[0].parts] == ["part"]
    assert 0 < times.seconds < recorder.spans[0].seconds


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        (("export", "capture", "attempt"), "capture"),
        (("torch.onnx.export", "export", "conversion", "interpretation"), "conversion"),
        (("verification",), "verification"),
        (("export",), None),
        ((), None),
    ],
)
def test_the_stage_that_failed(names: tuple[str, ...], stage: str | None) -> None:
    recorder = Recorder()
    times = Times(recorder)
    times.begin()
    events = Events([recorder])
    for entry in [events.begin(name) for name in names]:
        events.end(entry, ValueError())
    assert times.failed_stage() == stage


def test_an_attempt_that_failed_is_no_stage_that_did() -> None:
    recorder = Recorder()
    times = Times(recorder)
    times.begin()
    events = Events([recorder])
    with events.span("export"):
        with events.span("capture"), pytest.raises(ValueError, match="no"), events.span("attempt"):
            raise ValueError("no")
        with pytest.raises(ValueError, match="no"), events.span("conversion"):
            raise ValueError("no")
    recorder.spans[0].about["error"] = "ValueError"
    assert times.failed_stage() == "conversion"
