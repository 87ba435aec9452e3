"""The origins of the errors of outcomes."""

from __future__ import annotations

import re

from tests.models.measure import Outcome

#: Patterns of errors' texts, and the origins of the errors: the first pattern that matches counts.
_TEXTS = (
    (
        r"Failed to export the model with torch\.export|step 1/3|GuardOnDataDependent|ConstraintViolation",
        "torch.export",
    ),
    (r"torch\._dynamo|torch\.export|UserError|Unsupported|Fixed\w+Error|CaptureError", "torch.export"),
    (r"NOT_IMPLEMENTED", "ONNX Runtime"),
)


def fault(outcome: Outcome, exporter: str) -> str:
    """Which of torch.export, the exporter and ONNX Runtime an error comes from; empty where its text was not kept.

    A file that ONNX Runtime refuses or that gives other results is the exporter's fault, but for an operator without a kernel.

    Args:
        exporter: The name of the exporter.
    """
    if outcome.status == "unfit":
        return "the configuration"
    if outcome.status in ("crash", "timeout"):
        return exporter
    if not outcome.detail:
        return ""
    return next((words for text, words in _TEXTS if re.search(text, outcome.detail)), exporter)
