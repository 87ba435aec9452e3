"""The measurement of libraries, on a library made for the test: the exporters, the counts and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries import page, report
from tests.libraries.rows import LIBRARIES, Library
from tests.libraries.ways import WAYS

_TESTS = """
import os
import onnx, torch, acme
from torch.onnx import export


def exported(tmp_path, model):
    export(model, (torch.ones(2, 3),), str(tmp_path / "m.onnx"), dynamo=False)
    return onnx.load(str(tmp_path / "m.onnx"))


def test_onnx_producer(tmp_path):
    assert exported(tmp_path, torch.nn.ReLU()).producer_name == "onnxplug"


def test_onnx_version(tmp_path):
    assert exported(tmp_path, torch.nn.ReLU()).opset_import[0].version == acme.OPSET


def test_onnx_nothing(tmp_path):
    pass


def test_onnx_crash(tmp_path):
    exported(tmp_path, torch.nn.ReLU())
    os._exit(3)


def test_onnx_never_reached(tmp_path):
    exported(tmp_path, torch.nn.ReLU())


def test_another(tmp_path):
    exported(tmp_path, torch.nn.ReLU())
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, report.Outcome]]:
    folder = tmp_path_factory.mktemp("libraries")
    source = folder / "acme/source-1.0"
    (source / "tests").mkdir(parents=True)
    (source / "acme.py").write_text("OPSET = 21\n")
    (source / "tests/test_exports.py").write_text(_TESTS)
    library = Library("acme", "1.0", tests=("tests/test_exports.py",), chosen="onnx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "OUT", folder)
        for way in WAYS:
            report.measure(library, way)
        return report.outcomes_of(library)


@pytest.mark.long
def test_each_exporter_is_in_place(outcomes: dict[str, dict[str, report.Outcome]]) -> None:
    rows = report.exporting(outcomes)
    producer = {way: outcome.outcome for way, outcome in rows["tests/test_exports.py::test_onnx_producer"].items()}
    assert producer == {"dynamo=False": "failed", "dynamo=True": "failed", "onnxplug": "passed"}
    failed = rows["tests/test_exports.py::test_onnx_producer"]["dynamo=True"]
    assert failed.exports == 1
    assert "onnxplug" in failed.reason
    version = {way: outcome.outcome for way, outcome in rows["tests/test_exports.py::test_onnx_version"].items()}
    assert version == {"dynamo=False": "failed", "dynamo=True": "failed", "onnxplug": "passed"}


@pytest.mark.long
def test_a_test_without_an_export_is_not_counted(outcomes: dict[str, dict[str, report.Outcome]]) -> None:
    names = [name.rpartition("::")[2] for name in report.exporting(outcomes)]
    assert names == ["test_onnx_producer", "test_onnx_version", "test_onnx_crash"]


@pytest.mark.long
def test_a_crash_is_an_outcome(outcomes: dict[str, dict[str, report.Outcome]]) -> None:
    crashed = outcomes["onnxplug"]["tests/test_exports.py::test_onnx_crash"]
    assert crashed.outcome == "ended"
    assert crashed.exports == 1


@pytest.mark.long
def test_the_page(outcomes: dict[str, dict[str, report.Outcome]]) -> None:
    text = page.render({Library("acme", "1.0", tests=("tests",)): outcomes, Library("other", "2"): {}})
    assert "| acme | 1.0 | its own | 3 | 0 | 0 | 2 |" in text
    assert "| other | 2 | not run | | | | |" in text
    assert "## What onnxplug fails and dynamo=False passes\n\nNothing." in text


def test_rows() -> None:
    names = [library.name for library in LIBRARIES]
    assert len(set(names)) == len(names)
    calls = {library.calls.name for library in LIBRARIES}
    assert {path.name for path in (Path(report.ROOT) / "tests/libraries/calls").glob("exports_of_*.py")} <= calls
    assert all(library.tests or library.calls.exists() for library in LIBRARIES)
