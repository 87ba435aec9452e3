"""Optional values: an empty one is ``None``, any other is the value itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import Kernel


def optional(value: Any = None, *, type: Any = None) -> Any:
    """An optional that holds a value, or the empty one of a type."""
    return (value,)


def optional_get_element(value: Any = None) -> Any:
    """What an optional holds."""
    if value is None:
        raise EvaluationError("the optional is empty")
    return (value,)


def optional_has_element(value: Any = None) -> np.ndarray:
    """Whether an optional holds something."""
    return np.array(value is not None)


KERNELS = [
    Kernel("Optional", optional, since=15, widen=False),
    Kernel("OptionalGetElement", optional_get_element, since=15, widen=False),
    Kernel("OptionalHasElement", optional_has_element, since=15, widen=False),
]
