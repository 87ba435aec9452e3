"""``x[index]`` and ``x[index] = value`` where part of the index is a number that is unknown while a model is captured.

That number is a dynamic size, or what a tensor without axes holds: PyTorch reads it. An integer selects, a mask adds an axis of one
element or of none. torch.export replaces reading by integers and slices alone, and takes ``True`` and a number of uint8, which are
masks to PyTorch, for integers. Elsewhere the size becomes a constant, and what a tensor holds is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.patching import patched
from onnxplug.torch_private import NonStrictFunctions

_MASKS = (torch.bool, torch.uint8)
#: What a tensor is indexed by in one step, as views; and in the next, by tensors that have axes.
_Steps = tuple[list[Any], list[Any]]


def _is_single(item: Any) -> bool:
    return isinstance(item, Tensor) and not item.dim() and not item.is_floating_point() and not item.is_complex()


def _is_unknown(item: Any) -> bool:
    return isinstance(item, torch.SymInt) or (_is_single(item) and getattr(item, "constant", None) is None)


def _needs_numbers(item: Any) -> bool:
    """Whether PyTorch takes the elements of a list for plain numbers, and one is none."""
    if isinstance(item, (list, tuple)):
        return any(map(_needs_numbers, item))
    return isinstance(item, (Tensor, torch.SymInt))


def _joined(item: Any) -> Tensor | None:
    """A list as the int64 tensor that PyTorch makes of it, for integers and tensors of one integer."""
    if isinstance(item, (list, tuple)):
        parts = [part for part in map(_joined, item) if part is not None]
        equal = len(parts) == len(item) and len({part.shape for part in parts}) == 1
        return torch.stack(parts) if equal else None
    if isinstance(item, Tensor):
        return item.to(torch.int64) if _is_single(item) and item.dtype not in _MASKS else None
    integer = isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool)
    return torch.scalar_tensor(item, dtype=torch.int64) if integer else None


def _is_left(items: Sequence[Any], writes: bool) -> bool:
    """Whether PyTorch or torch.export's replacement does what PyTorch does when it runs the model."""
    lists = [item for item in items if isinstance(item, (list, tuple))]
    masks = [item for item in items if _is_single(item) and item.dtype in _MASKS]
    if any(map(_needs_numbers, lists)) or any(_is_unknown(item) or item.dtype is torch.uint8 for item in masks):
        return False
    ends = [end for item in items if isinstance(item, slice) for end in (item.start, item.stop, item.step)]
    singles = any(_is_single(item) for item in (*items, *ends))
    if not singles and not any(map(_is_unknown, (*items, *ends))):
        return True
    if any(isinstance(item, bool) for item in items):
        return False
    others = lists or masks or any(isinstance(item, Tensor) and item.dim() for item in items)
    return not (writes or others) or not any(map(_is_unknown, (*items, *ends)))


def _steps(items: Sequence[Any]) -> _Steps | None:
    """The steps of an index; None for an item of a kind that is not known here."""
    views: list[Any] = []
    tensors: list[Any] = []
    for item in items:
        if isinstance(item, (list, tuple)):
            joined = _joined(item) if _needs_numbers(item) else torch.tensor(item)
            if joined is None:
                return None
            item = joined
        if isinstance(item, bool) or (_is_single(item) and item.dtype in _MASKS):
            views.append(None)
            tensors.append(_of_mask(item))
        elif item is None or item is Ellipsis or isinstance(item, slice):
            views.append(item)
            tensors.append(item if item is Ellipsis else slice(None))
        elif isinstance(item, (int, torch.SymInt)) or _is_single(item):
            views.append(item)
        elif isinstance(item, Tensor) and item.dim() and not item.is_floating_point() and not item.is_complex():
            views += [slice(None)] * (item.dim() if item.dtype in _MASKS else 1)
            tensors.append(item)
        else:
            return None
    return views, tensors


def _of_mask(item: bool | Tensor) -> Tensor:
    """A mask without axes as the index of the axis that is added for it."""
    if isinstance(item, Tensor) and not _is_unknown(item):
        item = bool(item.constant)  # type: ignore[attr-defined]
    return item.to(torch.bool).reshape(1) if isinstance(item, Tensor) else torch.zeros(int(item), dtype=torch.int64)


@contextlib.contextmanager
def indices_without_numbers() -> Iterator[None]:
    """While it holds, a tensor may be indexed by tensors without axes in the non-strict mode."""
    original = getattr(NonStrictFunctions, "_override", None)

    def override(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], Tensor):
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            # A list that is all of the index is a tuple to this release of PyTorch, where it holds a tensor.
            steps = None if isinstance(args[1], list) or _is_left(items, len(args) > 2) else _steps(items)
            if steps is not None:
                return (lambda: _in_steps(mode, func, args, *steps)), (), {}
        return original(mode, func, args, kwargs)  # type: ignore[misc]

    def _in_steps(mode: Any, func: Any, args: Any, views: list[Any], tensors: list[Any]) -> Any:
        called, given, more = original(mode, Tensor.__getitem__, (args[0], tuple(views)), {})  # type: ignore[misc]
        view = called(*given, **more)
        if len(args) == 2 and not any(isinstance(item, Tensor) for item in tensors):
            return view
        return func(view, tuple(tensors) or Ellipsis, *args[2:])

    with contextlib.ExitStack() as stack:
        if original is not None:
            stack.enter_context(patched(NonStrictFunctions, "_override", override))
        yield
