"""Graphs that write to inputs: AOTAutograd's assumptions about the memory of inputs, checked in every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug_compile.binding import RunError

#: Inputs that share memory, each with the first input of that memory and, unless it is symbolic, its storage offset.
Sharing = tuple[tuple[int, int, int | None], ...]


class SameMemory:
    """Calls a compiled graph where its inputs share memory as they did when it was compiled, and eager PyTorch elsewhere.

    Where a graph writes to an input, AOTAutograd builds into it which inputs lie in one memory, and at which place.
    Dynamo's guards check little of it again (torch 2.13: whether inputs of symbolic sizes overlap), and a call whose
    inputs share memory otherwise would give wrong results. Both compare offsets in elements, so that a call is wrong too
    where these hide that inputs of different types overlap.

    Args:
        warn: Is called with a message when eager PyTorch runs the graph for the first time; ``None`` raises instead.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        module: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        warn: Callable[[str], None] | None,
    ) -> None:
        self._compiled = compiled
        self._module = module
        self._is_static = [_is_static(value) for value in example_inputs]
        self._sharing = self._sharing_of(example_inputs, _groups(example_inputs))
        self._warn = warn
        self._has_warned = False

    def __call__(self, *args: Any) -> Any:
        """Runs the graph."""
        groups = _groups(args)
        if self._sharing_of(args, groups) == self._sharing and not any(_hides_overlaps(args, g) for g in groups):
            return self._compiled(*args)
        what = "inputs that are written to share memory in another way than their graph was compiled for"
        if self._warn is None:
            raise RunError(what, hint="Clone one of them before the call.")
        if not self._has_warned:
            self._has_warned = True
            self._warn(f"a call is run by eager PyTorch: {what}")
        return self._module(*args)

    def _sharing_of(self, args: Sequence[Any], groups: Sequence[Sequence[int]]) -> Sharing:
        aliases: list[tuple[int, int, int | None]] = []
        for group in groups:
            overlapping = _overlapping([args[i] for i in group]) if all(self._is_static[i] for i in group) else None
            for place, i in enumerate(group):
                if overlapping is None or overlapping[place]:
                    aliases.append((i, group[0], args[i].storage_offset() if self._is_static[i] else None))
        return tuple(aliases)


def _groups(args: Sequence[Any]) -> list[list[int]]:
    """The inputs of each memory that several inputs have."""
    by_storage: dict[int, list[int]] = {}
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            by_storage.setdefault(value.untyped_storage()._cdata, []).append(i)
    return [group for group in by_storage.values() if len(group) > 1]


def _overlapping(tensors: Sequence[torch.Tensor], *, in_bytes: bool = False) -> list[bool]:
    """Whether each tensor of one memory may overlap another, by offsets in elements, as torch compares, or in bytes."""
    ends = []
    for t in tensors:
        size = t.element_size() if in_bytes else 1
        last = t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
        ends.append((t.storage_offset() * size, (last + 1) * size - 1))
    return [
        any(first <= other[1] and other[0] <= last for j, other in enumerate(ends) if j != i)
        for i, (first, last) in enumerate(ends)
    ]


def _hides_overlaps(args: Sequence[Any], group: Sequence[int]) -> bool:
    """Whether inputs of one memory overlap in bytes otherwise than their offsets in elements say."""
    tensors = [args[i] for i in group]
    has_sizes = len({t.element_size() for t in tensors}) > 1
    return has_sizes and _overlapping(tensors, in_bytes=True) != _overlapping(tensors)


def writes_inputs(metadata: Any) -> bool:
    """Whether a graph writes to an input, a parameter or a buffer, by AOTAutograd's metadata."""
    return any(info.mutates_data or info.mutates_metadata for info in getattr(metadata, "input_info", ()))


def _is_static(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(isinstance(size, int) for size in (*value.shape, *value.stride(), value.storage_offset()))
