"""The facts of a report about errors."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from onnxplug_tools.report.failure import failure_of

import onnxplug
from onnxplug import CaptureError, MissingRuleError, OnnxplugError
from tests.support.reports import X

HERE = "tests/report/test_failure.py"


def test_places_and_reasons_of_missing_rules() -> None:
    file = str(Path(__file__))
    error = MissingRuleError(
        "two",
        missing={
            "a::b.default": [f"{file}:3", f"{file}:3 (its decomposition needs c::d)", f"{file}:4 (why (not))"],
            "e::f": ["nowhere"],
        },
    )
    first, second = failure_of(error, "conversion").missing
    assert first.places == (f"{HERE}:3", f"{HERE}:4")
    assert first.reasons == ("its decomposition needs c::d", "why (not)")
    assert (second.op, second.places, second.reasons) == ("e::f", (), ("nowhere",))


def test_a_capture_error() -> None:
    error = CaptureError("can't", hint="do")
    error.place, error.submodule, error.tries = f"{__file__}:7", "encoder", ["strict: no"]
    failure = failure_of(error, "capture")
    assert (failure.place, failure.submodule, failure.tries) == (f"{HERE}:7", "encoder", ("strict: no",))
    assert (failure.message, failure.hint, failure.traceback) == ("can't", "do", "")


def test_an_error_of_a_class_that_calls_no_constructor() -> None:
    class Odd(OnnxplugError):
        def __init__(self) -> None:
            pass

    assert failure_of(Odd(), "plugins").message == "Odd"


def test_a_long_traceback_is_shortened() -> None:
    def deep(level: int) -> None:
        if level:
            deep(level - 1)
        raise ValueError("at the bottom")

    def others(level: int) -> None:
        try:
            others(level - 1) if level else deep(0)
        except ValueError as error:
            raise ValueError(f"level {level}") from error

    with pytest.raises(ValueError, match="level 9") as caught:
        others(9)
    lines = failure_of(caught.value, "capture").traceback.splitlines()
    assert len(lines) <= 41
    assert lines[-1] == "ValueError: level 9"
    assert any(line.startswith("… ") for line in lines)
    assert f'File "{HERE}"' in "\n".join(lines)


def test_an_error_with_its_report_goes_to_another_process() -> None:
    with pytest.raises(OnnxplugError) as caught:
        onnxplug.to_onnx(lambda x: x, (X,), opset_version=3, report=True)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.report.failure == caught.value.report.failure
    assert again.report.markdown() == caught.value.report.markdown()
