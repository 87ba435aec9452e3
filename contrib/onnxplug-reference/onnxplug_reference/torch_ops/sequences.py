"""Sequences and optionals of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import Kernel


def sequence_construct(*inputs: Any) -> tuple[list[Any]]:
    """A sequence of tensors."""
    return (list(inputs),)


def sequence_at(sequence: list[Any], position: Tensor) -> Any:
    """An element."""
    return (sequence[int(position)],)


def sequence_insert(sequence: list[Any], tensor: Any, position: Tensor | None = None) -> tuple[list[Any]]:
    """With one more element, at the end by default."""
    result = list(sequence)
    place = len(result) if position is None else int(position)
    result.insert(place + len(result) if place < 0 else place, tensor)
    return (result,)


def sequence_erase(sequence: list[Any], position: Tensor | None = None) -> tuple[list[Any]]:
    """Without an element, the last one by default."""
    result = list(sequence)
    del result[-1 if position is None else int(position)]
    return (result,)


def sequence_empty(*, dtype: int = 1) -> tuple[list[Any]]:
    """A sequence of nothing."""
    return ([],)


def concat_from_sequence(sequence: list[Tensor], *, axis: int, new_axis: int = 0) -> Tensor:
    """The elements one after the other."""
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)


def optional(value: Any = None, *, type: Any = None) -> Any:
    """An optional that holds a value, or the empty one of a type."""
    return (value,)


def optional_get_element(value: Any = None) -> Any:
    """What an optional holds."""
    if value is None:
        raise EvaluationError("the optional is empty")
    return (value,)


KERNELS = [
    Kernel("ConcatFromSequence", concat_from_sequence, since=11),
    Kernel("Optional", optional, since=15),
    Kernel("OptionalGetElement", optional_get_element, since=15),
    Kernel("SequenceAt", sequence_at, since=11),
    Kernel("SequenceConstruct", sequence_construct, since=11),
    Kernel("SequenceEmpty", sequence_empty, since=11),
    Kernel("SequenceErase", sequence_erase, since=11),
    Kernel("SequenceInsert", sequence_insert, since=11),
]
