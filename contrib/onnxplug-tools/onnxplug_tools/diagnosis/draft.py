"""Findings of ``torch.export.draft_export``: it captures with real numbers, goes on after a fault, and lists faults."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from onnxplug.capture.eager import copied
from onnxplug.capture.locations import is_torch_file
from onnxplug.capture.quiet import quiet
from onnxplug.patches.unchanged import unchanged
from onnxplug.torch_private import interned_files

_KINDS = {
    "MISSING_FAKE_KERNEL": "an operator that cannot be traced",
    "MISMATCHED_FAKE_KERNEL": "an operator whose shapes are stated wrongly",
    "DATA_DEPENDENT_ERROR": "Python code that depends on data",
    "GUARD_ADDED": "a condition on sizes",
}


@dataclass(frozen=True)
class DraftFinding:
    """A fault that ``torch.export.draft_export`` found.

    Attributes:
        kind: torch's name for the kind of fault (``"DATA_DEPENDENT_ERROR"``).
        text: The fault in words.
        place: The user's ``file:line``; ``None`` where torch gives none.
    """

    kind: str
    text: str
    place: str | None = None

    def __str__(self) -> str:
        return f"{self.text}{f' at {self.place}' if self.place else ''}"


def draft_findings(
    model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], dynamic_shapes: Any = None
) -> tuple[list[DraftFinding], str | None]:
    """Runs ``torch.export.draft_export``.

    Args:
        args, kwargs: The model's example inputs; they are not changed.

    Returns:
        The findings, each once, and the error of ``draft_export`` itself (``None`` where it does not fail).
    """
    positional, named = copied((tuple(args), dict(kwargs)))
    try:
        with unchanged(model), quiet(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            program = contextvars.copy_context().run(
                torch.export.draft_export, model, positional, named or None, dynamic_shapes=dynamic_shapes
            )
    except Exception as error:
        lines = str(error).strip().splitlines()
        return [], f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    report = getattr(program, "_report", None)
    # The report itself names only the files that torch met for the first time in the process.
    files = {number: file for file, number in interned_files.items()} | getattr(report, "str_to_filename", {})
    findings = [_finding(failure, files) for failure in getattr(report, "failures", ())]
    return list(dict.fromkeys(findings)), None


def _finding(failure: Any, files: Mapping[int, str]) -> DraftFinding:
    kind, data = failure.failure_type.name, failure.data
    text = _KINDS.get(kind, kind.lower().replace("_", " "))
    about = data.get("op") or data.get("expr")
    if about is not None:
        text += f": {about}"
    sources = data.get("symbol_to_sources") or {}
    if sources:
        text += f", where {', '.join(f'{symbol} is {source}' for symbol, source in sources.items())}"
    if data.get("reason"):
        text += f" ({data['reason']})"
    if "result" in data:
        text += f"; in the example it is {data['result']}"
    return DraftFinding(kind, text, _place(data.get("user_stack") or (), files))


def _place(stack: Any, files: Mapping[int, str]) -> str | None:
    """The ``file:line`` of the innermost frame outside of torch; ``None`` where there is none."""
    for frame in reversed(list(stack)):
        file = files.get(frame["filename"], frame["filename"])
        if isinstance(file, str) and not is_torch_file(file):
            return f"{file}:{frame['line']}"
    return None
