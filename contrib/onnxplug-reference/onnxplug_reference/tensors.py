"""Conversion of torch tensors in inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def has_torch(values: Iterable[Any]) -> Any:
    """The device of the first torch tensor among values, tensors in lists included; ``None`` if there is none."""
    for value in values:
        if isinstance(value, list | tuple):
            device = has_torch(value)
            if device is not None:
                return device
        elif type(value).__module__.startswith("torch") and hasattr(value, "device"):
            return value.device
        elif hasattr(value, "detach"):  # a Parameter, or another class of tensors
            return value.device
    return None


def from_torch(value: Any) -> Any:
    """Torch tensors as arrays (ml_dtypes for bfloat16 and float8); other values unchanged."""
    if isinstance(value, list | tuple):
        return [from_torch(v) for v in value]
    if hasattr(value, "detach"):
        from onnxplug.build.dtypes import as_array

        return as_array(value)
    return value
