"""Lists of tensors of one shape whose length is a dynamic size, held as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onnxplug.errors import CaptureError
from onnxplug_torchscript.graphs import Step
from onnxplug_torchscript.values import ScalarTensor, Stacked


class Growing:
    """A list of the outside within the body of a loop of the graph, which can only be added to."""

    def __init__(self) -> None:
        self.items: list[torch.Tensor] = []

    def extend(self, items: Sequence[Any]) -> Growing:
        """Adds the items of an iteration."""
        tensors = _tensors(items)
        if not all(isinstance(item, torch.Tensor) for item in tensors):
            raise TypeError("it appends something that is not a tensor")
        self.items += tensors
        return self


def _tensors(items: Sequence[Any]) -> list[Any]:
    """The items of a list, those of a known number as tensors too."""
    return [item.tensor() if isinstance(item, ScalarTensor) else item for item in items]


def _check_one_kind(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses tensors that ``stack`` or ``cat`` would convert to one dtype: the items of a list keep theirs."""
    if len({(tensor.dtype, tensor.dim()) for tensor in tensors}) > 1:
        raise RuntimeError("the list would hold tensors of several dtypes or ranks")


def stacked(before: Sequence[torch.Tensor] | Stacked, added: Sequence[torch.Tensor]) -> Stacked:
    """A list that a loop has added to.

    Args:
        added: The tensors that an iteration adds, each with the iterations along its first axis.
    """
    _check_one_kind(added)
    new = torch.stack(list(added), 1).flatten(0, 1) if len(added) > 1 else added[0]
    return _joined(before, Stacked(new))


def unbound(value: torch.Tensor, axis: int = 0) -> Any:
    """``unbind``: a list of known length, or a :class:`Stacked` of dynamic length."""
    if isinstance(value.shape[axis], torch.SymInt):
        return Stacked(value.movedim(axis, 0))
    return list(torch.unbind(value, axis))


def on_sequence(step: Step, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of lists that takes lists of a dynamic length too."""
    function = _FUNCTIONS.get(step.kind)

    def apply(*args: Any) -> Any:
        if any(isinstance(arg, Growing) for arg in args):
            if step.kind not in GROWTH:
                raise TypeError(f"it reads by {step.kind} a list that it adds to")
            return GROWTH[step.kind](*args)
        if any(isinstance(arg, Stacked) for arg in args):
            if function is None:
                raise CaptureError(
                    f"the script gives a list whose length is a dynamic size to {step.kind} at {step.place}",
                    hint=f"What can be done with such a list: {', '.join(sorted(_FUNCTIONS))}.",
                )
            return function(*args)
        return plain(*args)

    return apply


def _joined(first: Sequence[torch.Tensor] | Stacked, second: Sequence[torch.Tensor] | Stacked) -> Stacked:
    parts = []
    for part in (first, second):
        if isinstance(part, Stacked):
            parts.append(part.tensor)
        elif part:
            _check_one_kind(tensors := _tensors(part))
            parts.append(torch.stack(tensors))
    _check_one_kind(parts)
    return Stacked(torch.cat(parts) if len(parts) > 1 else parts[0])


def _item(items: Stacked, index: Any) -> torch.Tensor:
    return items.tensor.select(0, index)


def _slice(items: Stacked, start: Any = None, end: Any = None, step: int = 1) -> Stacked:
    if step > 0:
        return Stacked(items.tensor[start:end:step])
    if start is not None or end is not None:
        raise CaptureError(
            "the script takes a slice with limits and a negative step of a list whose length is a dynamic size",
            hint="Take the slice with a positive step first, then reverse it: items[a:b][::-1].",
        )
    return Stacked(items.tensor.flip(0)[::-step])


def _concatenated(items: Stacked, axis: int = 0) -> torch.Tensor:
    parts = items.tensor
    axis = axis % (parts.dim() - 1)
    return parts.movedim(0, axis).flatten(axis, axis + 1)


def _extended(items: Any, more: Any) -> Stacked:
    if not isinstance(items, Stacked):  # another variable may hold the list
        raise TypeError("it extends a list of known length by one of dynamic length")
    items.tensor = _joined(items, more).tensor
    return items


def _append(items: Stacked, item: torch.Tensor) -> Stacked:
    return _extended(items, [item])


def _reverse(items: Stacked) -> None:
    items.tensor = items.tensor.flip(0)


#: The functions of a list of dynamic length.
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "aten::len": lambda items: items.tensor.shape[0],
    "aten::__getitem__": _item,
    "aten::select": _item,
    "aten::slice": _slice,
    "aten::stack": lambda items, axis=0: items.tensor.movedim(0, axis),
    "aten::cat": _concatenated,
    "aten::add": _joined,
    "aten::add_": _extended,
    "aten::extend": _extended,
    "aten::append": _append,
    "aten::reverse": _reverse,
    "aten::copy": lambda items: Stacked(items.tensor),
    "aten::list": lambda items: Stacked(items.tensor),
    "prim::unchecked_cast": lambda items: items,
}
#: The operators that a loop may apply to a list of the outside that it adds to.
GROWTH: Mapping[str, Callable[..., Any]] = {
    "aten::append": lambda items, item: items.extend([item]),
    "aten::add_": Growing.extend,
    "aten::extend": Growing.extend,
}
