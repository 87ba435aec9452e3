"""Tensors of strings, which torch lacks: each string is a number of a dtype that torch moves but never computes with."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from onnxplug.errors import UsageError

#: The dtype of string tensors: torch's 16 bits without a meaning.
STRING = torch.bits16
_MOST = 1 << 16
_lock = threading.Lock()
_strings: list[str] = [""]
_numbers: dict[str, int] = {"": 0}


def string_tensor(strings: Any) -> torch.Tensor:
    """A tensor of strings: an input of a model with text, or a result of an operator that makes text.

    torch slices, reshapes and expands it; operators that compute raise an error. In ONNX its element type is STRING.

    Args:
        strings: A string, a nested list of strings or a NumPy array of them.

    Raises:
        UsageError: They are not all strings, or the process has 65,536 different strings.
    """
    array = np.array(strings, dtype=object)
    with _lock:
        numbers = [_number(string) for string in array.flat]
    return torch.tensor(numbers, dtype=torch.uint16).view(STRING).reshape(array.shape)


def _number(string: Any) -> int:
    if not isinstance(string, str):
        raise UsageError(f"{string!r} is no string")
    number = _numbers.get(string)
    if number is None:
        if len(_strings) == _MOST:
            raise UsageError(
                f"this process has {_MOST:,} different strings, and torch's tensors of strings tell no more apart",
                hint="Run the ONNX model in ONNX Runtime: it takes any number of strings.",
            )
        number = _numbers[str(string)] = len(_strings)
        _strings.append(str(string))
    return number


def string_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The strings of a tensor of :func:`string_tensor`, as a NumPy array of objects."""
    numbers = tensor.detach().cpu().contiguous().view(torch.uint16).numpy()
    array = np.empty(numbers.size, dtype=object)
    array[:] = [_strings[number] for number in numbers.flat]
    return array.reshape(numbers.shape)
