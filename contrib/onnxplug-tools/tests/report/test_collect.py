"""The facts in reports of exports that succeed, and of exports that fail in each stage."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_tools.report.observer import ReportWarning
from onnxplug_tools.report.report import ExportReport

import onnxplug
from onnxplug import (
    CaptureError,
    ConversionError,
    MissingRuleError,
    OnnxplugError,
    OutputMismatchError,
    Rule,
    SaveError,
    Unsupported,
    UsageError,
    VerificationError,
)
from tests.support import reports
from tests.support.distributions import run_python
from tests.support.reports import X

FILES = ["report.html", "report.json", "report.md", "report.sarif"]


def test_status_and_facts_of_an_export() -> None:
    report = reports.report()
    assert report.status == "exported"
    assert report.failure is None
    assert report.model == "tests.support.reports.Net"
    assert report.arguments == {
        "args": "(float32[2, 8],)",
        "dynamic_shapes": "({0: 'batch'},)",
        "plugins": "[]",
        "verify": "True",
    }
    assert report.versions["torch"] == str(torch.__version__)
    assert report.versions["onnxplug"] == onnxplug.__version__
    assert [plugin.name for plugin in report.plugins if plugin.status == "loaded"] == ["builtin"]
    assert report.opsets == {"ai.onnx": 21}
    assert report.inputs == [("x", "float[batch, 8]")]
    assert [kind for _, kind in report.outputs] == ["float[batch, 4]"]
    assert report.sizes == {"batch": 2}
    assert report.warnings == []
    assert report.files == []


def test_capture() -> None:
    capture = reports.report().capture
    assert capture is not None
    assert capture.strategy == "non-strict"
    assert capture.repeated == 10  # 5 of each of the later two blocks
    assert list(capture.dimensions) == ["batch"]
    assert capture.dimensions["batch"].endswith(" to any")
    (attempt,) = capture.attempts
    assert (attempt.mode, attempt.error) == ("non-strict", None)
    assert 0 < attempt.seconds <= reports.report().seconds


def test_nodes_have_their_rules_at_each_level_of_metadata() -> None:
    view = reports.report().view
    assert view is not None
    (linear,) = [node for node in view.nodes if node.module == "blocks.1.up" and node.op_type in ("Gemm", "MatMul")]
    assert linear.rule == "onnxplug.converters.linear:linear"
    assert linear.package == "onnxplug"
    assert linear.source is not None
    assert linear.source.startswith("tests/support/reports.py:")
    assert [child.path for child in view.root.children] == ["blocks", "head"]
    kept = {key for node in reports.program().model.graph for key in node.metadata_props}
    assert {"namespace", "pkg.onnxplug.source"} <= kept <= {"namespace", "pkg.onnxplug.source", "pkg.onnxplug.rewrite"}


@pytest.mark.parametrize("level", ["none", "short", "full"])
@pytest.mark.parametrize("functions", [False, True])
def test_the_model_is_the_same_without_a_report(level: str, functions: bool) -> None:
    options: dict[str, Any] = {"metadata": level, "functions": functions}
    plain = reports.exported(report=False, **options)
    with_report = reports.exported(**options)
    assert plain.report is None
    assert with_report.report is not None
    assert with_report.report.view is not None
    assert len(with_report.report.view.nodes) >= with_report.model.graph.num_nodes()
    assert any(node.rule for node in with_report.report.view.nodes)
    assert plain.model_proto.SerializeToString(deterministic=True) == with_report.model_proto.SerializeToString(
        deterministic=True
    )


def test_decompositions_folded_constants_and_rewrites() -> None:
    report = reports.report()
    assert [(d.op, d.times) for d in report.decomposed] == [("reports_test::halved.default", 1)]
    assert report.decomposed[0].places[0].startswith("tests/support/reports.py:")
    assert set(report.packages) == {"onnxplug"}
    rewrites = reports.exported(functions=True).report
    assert rewrites is not None
    assert sum(rewrites.functions.values()) >= 2


def test_folded_constants_and_rewrites() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (x * (torch.ones(3) + torch.arange(3)).sum()).transpose(0, 1).transpose(0, 1) + 1

    program = onnxplug.to_onnx(model, (torch.randn(2, 3),), report=True)
    assert program.report is not None
    assert sum(program.report.folded.values()) > 0
    attention = onnxplug.to_onnx(
        torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), (torch.randn(1, 3, 8),), report=True
    ).report
    assert attention is not None
    assert attention.rewrites
    for rewrite in attention.rewrites:
        assert rewrite.times > 0
        assert rewrite.package == "onnxplug"


def test_verification_and_its_histogram() -> None:
    verification = reports.report().verification
    assert verification is not None
    assert verification.error is None
    assert [case.seed for case in verification.cases] == [None, 0, 1, 2]
    elements = sum(4 * case.sizes["batch"] for case in verification.cases)
    assert verification.histogram.total == elements
    assert sum(verification.histogram.counts[9:]) == 0


def test_times_are_those_of_the_export_alone() -> None:
    from onnxplug_tools.profiling.observer import recording

    from onnxplug.observers import span

    with recording(), span("something else"):
        onnxplug.to_onnx(lambda x: x + 1, (X,))
        program = reports.exported()
        onnxplug.to_onnx(lambda x: x + 1, (X,))
    assert program.report is not None
    assert program.report.times is not None
    (stage,) = program.report.times.stages()
    assert stage.name == "export"
    assert [part.name for part in stage.parts] == ["plugins", "capture", "conversion"]
    assert [rule.calls for rule in program.report.times.rules() if rule.op == "aten::linear.default"] == [7]


def test_later_stages_are_added(tmp_path: Path) -> None:
    program = reports.exported()
    report = program.report
    assert report is not None
    assert report.verification is None
    program.verify(seeds=())
    assert report.verification is not None
    assert len(report.verification.cases) == 1
    program.save(tmp_path / "model.onnx", external_data=True)
    (file,) = report.files
    assert file.path == str(tmp_path / "model.onnx")
    assert file.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    program.save(os.fsencode(tmp_path / "other.onnx"))  # type: ignore[arg-type]
    assert [file.path for file in report.files[1:]] == [str(tmp_path / "other.onnx")]


def test_conditions_on_sizes() -> None:
    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if x.shape[0] % 2 == 0 else x - 1

    with pytest.warns(UserWarning, match="right"):
        program = onnxplug.to_onnx(
            Branching(), (torch.randn(4, 3),), dynamic_shapes=({0: torch.export.Dim.AUTO},), report=True
        )
    assert program.report is not None
    capture = program.report.capture
    assert capture is not None
    if capture.conditions:
        assert any(c.place is not None and "test_collect.py" in c.place for c in capture.conditions)
    assert program.report.warnings[0].text


def test_warnings_are_shown_and_taken_down() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    rule = Rule("aten::relu", lambda g, node: node.args[0])
    with pytest.warns(UserWarning, match="relu"):
        program = onnxplug.to_onnx(model, (X,), rules=[rule], report=True)
    assert program.report is not None
    (warned,) = program.report.warnings
    assert warned.category == "UnusedRuleWarning"
    assert warned.place.rpartition(":")[2].isdigit()
    before = warnings.showwarning
    onnxplug.to_onnx(model, (X,), report=True)
    assert warnings.showwarning is before


def test_attempts_that_failed_on_the_way_to_a_success() -> None:
    class Strict(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_dynamo_compiling() and torch.compiler.is_compiling():
                raise RuntimeError("only the strict mode")
            return x + 1

    program = onnxplug.to_onnx(Strict(), (X,), report=True)
    assert program.report is not None
    assert program.report.capture is not None
    attempts = program.report.capture.attempts
    assert [(a.mode, a.error) for a in attempts] == [
        ("non-strict", "RuntimeError: only the strict mode"),
        ("strict", None),
    ]


# -- exports that fail -------------------------------------------------------------------------------------------------


def _refused(g: Any, node: Any) -> Any:
    raise Unsupported("this test refuses it")


def _broken(g: Any, node: Any) -> Any:
    raise KeyError("a defect")


class Captureless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return x.flip(0)


FAILURES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "arguments": (torch.nn.ReLU(), {"opset_version": 3}, OnnxplugError, "arguments"),
    "capture": (Captureless(), {}, CaptureError, "capture"),
    "missing rule": (lambda x: torch.ops.reports_test.nothing(x), {}, MissingRuleError, "conversion"),
    "unsupported": (lambda x: x.relu(), {"rules": [Rule("aten::relu", _refused)]}, ConversionError, "conversion"),
    "defect": (lambda x: x.relu(), {"rules": [Rule("aten::relu", _broken)]}, ConversionError, "conversion"),
    "output mismatch": (
        lambda x: x.relu(),
        {"rules": [Rule("aten::relu", lambda g, node: g.cast(node.args[0], torch.int64))]},
        OutputMismatchError,
        "conversion",
    ),
    "verification": (
        lambda x: x.relu(),
        {"rules": [Rule("aten::relu", lambda g, node: g.op.Abs(node.args[0]))], "verify": True},
        VerificationError,
        "verification",
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failed_export_has_its_report(case: str, tmp_path: Path) -> None:
    model, options, error_class, stage = FAILURES[case]
    with pytest.raises(error_class) as caught:
        onnxplug.to_onnx(model, (X,), report=tmp_path / "reports", **options)
    error: Any = caught.value
    assert sorted(os.listdir(tmp_path / "reports")) == FILES
    assert str(tmp_path / "reports") in str(error.__notes__)
    report: ExportReport = error.report
    assert report.status == "failed"
    assert report.failure is not None
    assert (report.failure.stage, report.failure.error) == (stage, type(error).__name__)
    assert report.failure.message == error.message
    assert report.failure.traceback == ""
    if case not in ("arguments", "missing rule", "verification"):
        assert report.failure.place is not None
        assert report.failure.place.startswith("tests/report/test_collect.py:")
    if case == "capture":
        assert report.failure.tries
        assert report.capture is not None
        assert report.capture.attempts[0].error
        assert report.view is None
    if case == "missing rule":
        (missing,) = report.failure.missing
        assert missing.op == "reports_test::nothing.default"
        assert missing.places[0].startswith("tests/report/test_collect.py:")
    if case == "verification":
        assert report.view is not None
        assert report.verification is not None
        assert report.verification.error is not None
        (output,) = report.verification.cases[-1].outputs
        assert output.problem
        assert output.beyond > 0
    data = json.loads((tmp_path / "reports" / "report.json").read_text(encoding="utf-8"))
    assert data["status"] == "failed"
    assert data["failure"]["stage"] == stage
    for name in ("report.html", "report.md"):
        assert type(error).__name__ in (tmp_path / "reports" / name).read_text(encoding="utf-8")


def test_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise SaveError("no room")

    monkeypatch.setattr("onnxplug.program.save_model", full)
    with pytest.raises(SaveError, match="no room") as caught:
        onnxplug.to_onnx(lambda x: x + 1, (X,), tmp_path / "m.onnx", report=tmp_path / "r")
    assert caught.value.report.failure.stage == "saving"
    assert caught.value.report.files == []
    assert sorted(os.listdir(tmp_path / "r")) == FILES


def test_an_error_that_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("nobody expected it")

    monkeypatch.setattr("onnxplug.pipeline.prepare", wrong)
    with pytest.raises(ZeroDivisionError) as caught:
        onnxplug.to_onnx(lambda x: x + 1, (X,), report=True)
    report: Any = getattr(caught.value, "report")  # noqa: B009 - no error of ours has it
    assert report.failure.stage == "conversion"
    assert "test_collect.py" in report.failure.traceback


@pytest.mark.parametrize("way", ["write", "render"])
def test_the_original_error_is_not_lost(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError("no room") if way == "write" else ZeroDivisionError("a defect of the report")

    where = "onnxplug_tools.report.files.flush" if way == "write" else "onnxplug_tools.report.html._tree"
    monkeypatch.setattr(where, fails)
    with pytest.warns(ReportWarning, match="can't be written"), pytest.raises(VerificationError) as caught:
        onnxplug.to_onnx(
            lambda x: x.relu(),
            (X,),
            rules=[Rule("aten::relu", lambda g, node: g.op.Abs(node.args[0]))],
            verify=True,
            report=tmp_path,
        )
    assert "the report of the failed export can't be written" in str(caught.value.__notes__)
    assert caught.value.report.failure.stage == "verification"
    # The files that could be written are there, each complete.
    assert sorted(os.listdir(tmp_path)) == ([] if way == "write" else ["report.json", "report.md", "report.sarif"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(VerificationError):
            onnxplug.to_onnx(
                lambda x: x.relu(),
                (X,),
                rules=[Rule("aten::relu", lambda g, node: g.op.Abs(node.args[0]))],
                verify=True,
                report=tmp_path,
            )


def test_a_report_of_a_success_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no room")

    monkeypatch.setattr("onnxplug_tools.report.files.flush", full)
    with pytest.raises(SaveError, match="no room"):
        onnxplug.to_onnx(lambda x: x + 1, (X,), report=tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [3, "", None, b""])
def test_malformed_values_of_report(value: Any) -> None:
    with pytest.raises(UsageError, match="report= takes"):
        onnxplug.to_onnx(lambda x: x + 1, (X,), report=value)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="no folder that can be made"):
        onnxplug.to_onnx(lambda x: 1 / 0, (X,), report=tmp_path / "file" / "reports")


def test_each_piece_has_its_report(tmp_path: Path) -> None:
    chain = onnxplug.to_onnx(reports.net(), (X,), pieces=["blocks.0", "head"], report=tmp_path)
    results = [program.report for program in chain.programs.values()]
    assert [report.model.rpartition(".")[2] for report in results if report is not None] == ["Block", "Linear"]
    second = [name.replace("report", "report-2") for name in FILES]
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, *second])
    modules = [json.loads((tmp_path / f"{name}.json").read_text())["model"] for name in ("report", "report-2")]
    assert modules == [report.model for report in results if report is not None]


def test_without_a_report_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    code = """
import sys, torch, onnxplug
program = onnxplug.to_onnx(torch.nn.ReLU(), (torch.zeros(2),), verify=True)
assert program.report is None
print("loaded", [name for name in sys.modules if name.startswith(("onnxplug_tools.report", "onnxplug_tools.inspection"))])
"""
    assert "loaded []\n" in run_python(tmp_path, "-c", code)


def test_reports_of_a_function_that_is_called_with_them() -> None:
    from onnxplug_tools.report.observer import observer

    from onnxplug.observers import observed

    taken: list[tuple[int, BaseException | None]] = []
    write: Callable[[Any, BaseException | None], None] = lambda made, error: taken.append((len(made), error))  # noqa: E731
    with observed(observer(write)):
        onnxplug.to_onnx(lambda x: x + 1, (X,))
        onnxplug.to_onnx(lambda x: x + 2, (X,), report=True)
    assert taken == [(2, None)]
