"""``onnxplug.reference``: the evaluators of the package ``onnxplug-reference``."""

from __future__ import annotations

from typing import Any

from onnxplug.packages import load


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load("reference"), name)
