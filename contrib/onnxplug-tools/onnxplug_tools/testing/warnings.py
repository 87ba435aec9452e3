"""ONNX Runtime's warnings that a shape in the model is wrong: in a test they are failures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_WRONG_SHAPE = ("does not match actual shape of", "Error merging shape info for output")
_ONNX_RUNTIME_WARNINGS = 2


@contextmanager
def shape_warnings() -> Iterator[None]:
    """ONNX Runtime's warnings go to stderr, where :func:`fail_on_shape_warnings` finds them."""
    from onnxplug.run import session

    severity, session.LOG_SEVERITY = session.LOG_SEVERITY, _ONNX_RUNTIME_WARNINGS
    try:
        yield
    finally:
        session.LOG_SEVERITY = severity


def fail_on_shape_warnings(report: Any) -> None:
    """Makes a test that passed fail where ONNX Runtime found another shape than the model states.

    Args:
        report: The ``pytest.TestReport`` of the call. Output that pytest does not capture (``-s``) is not looked at.
    """
    if report.when != "call" or not report.passed:
        return
    lines = [line for line in report.capstderr.splitlines() if any(text in line for text in _WRONG_SHAPE)]
    if lines:
        report.outcome = "failed"
        report.longrepr = "ONNX Runtime found another shape than the model states:\n" + "\n".join(dict.fromkeys(lines))
