"""Observers: the events of an export and their order, the sources of observers, and no cost without an observer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnxplug_tools.profiling.recorder import Recorder

import onnxplug
from onnxplug.observers import Events, Span, events, observed, span
from onnxplug.plugins.builtin import onnxplug_rules
from onnxplug.plugins.manager import PluginManager, PluginWarning
from onnxplug.plugins.records import BUILTIN, Selection
from onnxplug.registry.registry import OnnxRegistry

X = torch.randn(2, 4)


class Stages(onnxplug.Observer):
    """Keeps the stages with their results."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.made: dict[str, Any] = {}
        self.finished: list[BaseException | None] = []

    def begin(self, span: Span) -> None:
        assert span.kind == "stage"
        self.begun.append(span.name)

    def end(self, span: Span) -> None:
        self.made[span.name] = span.result if span.error is None else span.error

    def finish(self, error: BaseException | None) -> None:
        self.finished.append(error)


class Details(Stages):
    """Keeps the events within the stages too."""

    details = True

    def __init__(self) -> None:
        super().__init__()
        self.within: list[tuple[str, str]] = []
        self.totals: dict[tuple[str, str], int] = {}
        self.rewrites: list[tuple[str, str]] = []

    def begin(self, span: Span) -> None:
        if span.kind == "stage":
            super().begin(span)

    def end(self, span: Span) -> None:
        if span.kind != "stage":
            self.within.append((span.kind, span.name))
        self.totals |= {key: total.calls for key, total in span.totals.items()}

    def fired(self, rewrite: str, node: str) -> None:
        self.rewrites.append((rewrite, node.partition(" ")[0]))


def test_stages_and_their_results(tmp_path: Path) -> None:
    stages = Stages()
    program = onnxplug.to_onnx(torch.nn.ReLU(), (X,), tmp_path / "m.onnx", verify=True, observers=[stages])
    own = [
        name
        for name in stages.begun
        if name in ("export", "plugins", "capture", "conversion", "verification", "saving")
    ]
    assert own == ["export", "plugins", "capture", "conversion", "verification", "saving"]
    assert stages.made["capture"].program is program.exported_program
    assert stages.made["conversion"] is stages.made["export"] is program
    assert stages.made["verification"].cases
    assert stages.made["saving"] == tmp_path / "m.onnx"
    assert stages.finished == [None]


def test_an_error_ends_open_stages() -> None:
    stages = Stages()

    def fails(g: Any, node: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(onnxplug.ConversionError) as caught:
        onnxplug.to_onnx(torch.nn.ReLU(), (X,), rules=[onnxplug.Rule("aten::relu", fails)], observers=[stages])
    assert stages.made["interpretation"] is stages.made["conversion"] is stages.made["export"] is caught.value
    assert stages.finished == [caught.value]


def test_observers_hear_of_later_work_with_a_program(tmp_path: Path) -> None:
    stages = Stages()
    program = onnxplug.to_onnx(torch.nn.ReLU(), (X,), observers=[stages])
    del stages.begun[:]
    program.verify()
    program.save(tmp_path / "m.onnx")
    assert stages.begun == ["verification", "saving"]
    assert stages.finished == [None]  # of the export alone


def test_details_of_rules_decompositions_and_rewrites() -> None:
    details = Details()
    relu = torch.nn.ReLU()
    model: Callable[..., Any] = lambda x: torch.nn.functional.mse_loss(torch.where(~(x > 0), x, -x), relu(x))  # noqa: E731
    onnxplug.to_onnx(model, (X,), observers=[details])
    assert ("rule", "aten::where.self") in details.within
    assert ("decomposition", "aten::mse_loss.default") in details.within
    assert ("node", "where") in details.within
    assert ("where_of_not", "Where") in details.rewrites
    assert details.totals["part", "shape inference"] > 0
    assert details.totals["rewrite", "where_of_not"] > 0


def test_calls_are_counted_on_request_alone() -> None:
    assert events().details is None
    stages = Stages()
    with observed(stages):
        assert events().details is None
        with span("relu", "rule"):
            pass
    assert stages.begun == []
    with observed(Details()):
        assert events().details is not None


def plugin_of(*observers: Any) -> SimpleNamespace:
    return SimpleNamespace(onnxplug_observers=onnxplug.hookimpl(lambda: observers, specname="onnxplug_observers"))


def with_plugin(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[OnnxRegistry, PluginManager]:
    monkeypatch.setitem(globals(), "PLUGIN", plugin)
    builtin = EntryPoint(BUILTIN, "onnxplug.plugins.builtin", "onnxplug")
    manager = PluginManager(Selection(), [builtin, EntryPoint("watching", f"{__name__}:PLUGIN", "onnxplug")])
    manager.load()
    return OnnxRegistry(list(onnxplug_rules()), ()), manager


def test_observers_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Stages(), Stages()
    requests: list[Any] = []

    def verified_alone(options: Any) -> Stages | None:
        requests.append(options)
        return second if options.verify else None

    selected = with_plugin(plugin_of(first, verified_alone), monkeypatch)
    onnxplug.to_onnx(torch.nn.ReLU(), (X,), registry=selected)
    assert first.begun[:2] == ["export", "capture"]
    assert first.finished == [None]
    assert second.begun == []
    onnxplug.to_onnx(torch.nn.ReLU(), (X,), registry=selected, verify=True)
    assert "verification" in second.begun
    assert [options.verify for options in requests] == [False, True]


def test_a_plugins_function_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    selected = with_plugin(plugin_of(lambda options: 1 / 0), monkeypatch)
    with pytest.raises(onnxplug.PluginError, match=r"watching.*raised ZeroDivisionError"):
        onnxplug.to_onnx(torch.nn.ReLU(), (X,), registry=selected)
    selected = with_plugin(plugin_of(lambda options: "no"), monkeypatch)
    with pytest.raises(onnxplug.PluginError, match="'no', which is no Observer"):
        onnxplug.to_onnx(torch.nn.ReLU(), (X,), registry=selected)
    with pytest.warns(PluginWarning, match="neither an Observer nor a function"):
        with_plugin(plugin_of(Stages), monkeypatch)


def test_an_object_that_is_no_observer_is_refused() -> None:
    with pytest.raises(
        onnxplug.UsageError, match=r"observers= takes objects of onnxplug.Observer, got <built-in function print>"
    ):
        onnxplug.to_onnx(torch.nn.ReLU(), (X,), observers=[print])  # type: ignore[list-item]
    with pytest.raises(onnxplug.UsageError, match="observers= takes a list"):
        onnxplug.to_onnx(torch.nn.ReLU(), (X,), observers=Stages())  # type: ignore[arg-type]


def test_spans_lie_within_each_other() -> None:
    recorder = Recorder()
    with observed(recorder), span("export", opset=21) as outer:
        with span("capture") as first, span("Linear", "module") as module:
            pass
        with span("conversion") as second:
            pass
    assert recorder.spans == [outer, first, module, second]
    assert [entry.parent for entry in recorder.spans] == [None, outer, first, outer]
    assert outer.about == {"opset": 21}
    assert (
        outer.start <= first.start <= module.start <= module.end <= first.end <= second.start <= second.end <= outer.end
    )
    assert outer.within == (first.end - first.start) + (second.end - second.start)
    assert first.own_seconds == pytest.approx(first.seconds - module.seconds)
    assert module.is_within(outer)
    assert not module.is_within(second)


def test_an_error_is_noted_and_ends_spans_that_are_left_open() -> None:
    recorder = Recorder()
    events = Events([recorder])

    def fails() -> None:
        events.begin("capture")
        raise KeyError("x")

    with pytest.raises(KeyError), events.span("export"):
        fails()
    outer, inner = recorder.spans
    assert outer.about == {"error": "KeyError"}
    assert inner.end <= outer.end
    with events.span("saving") as later:
        pass
    assert later.parent is None
    events.end(outer)  # it has ended already, and nothing else is open
    assert events.begin("verification").parent is None


def test_totals_are_of_the_innermost_stage() -> None:
    events = Events([Recorder()])
    events.count("part", "no stage is open")
    with events.span("interpretation") as stage, events.span("aten::add", "rule"):
        events.count("part", "shape inference")
        events.count("part", "shape inference", 0, hit=True)
    total = stage.totals["part", "shape inference"]
    assert (total.calls, total.hits) == (2, 1)
    assert total.nanoseconds > 0
    assert list(stage.totals) == [("part", "shape inference")]


def test_each_thread_has_its_own() -> None:
    seen: list[Any] = []
    with observed(Details()):
        thread = threading.Thread(target=lambda: seen.append(events().details))
        thread.start()
        thread.join()
    assert seen == [None]
