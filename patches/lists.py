"""``[x] * n``, ``range(n)`` and ``list(range(n))`` of a dynamic size, as an argument of a torch function or an index, in a trace.

Python requires a plain number for the length of a list, which makes the size a constant. Here the elements are made only when code
reads one of them, or their number, and the size becomes a constant only then. ``torch.stack([x] * n)``, ``torch.cat([x] * n)``,
``torch.tensor([0] * n)`` and ``x[range(n), places]`` need no elements: they are a repetition, and a range in the graph.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import patched
from onnxplug.torch_private import FakeTensor, NonStrictFunctions, function_mode_enabled, function_modes, pytree

_Call = Callable[..., Tensor]
_BACKWARDS = slice(None, None, -1)


class DynamicRange(Sequence[int]):
    """``range(start, stop)``, of which a bound is a dynamic size, or the same numbers from the last to the first."""

    def __init__(self, start: Any, stop: Any, falls: bool = False) -> None:
        self._bounds, self._falls = (start, stop), falls

    def _made(self) -> range:
        """Python's own. The bounds are constants from then on."""
        numbers = range(*map(int, self._bounds))
        return numbers[::-1] if self._falls else numbers

    def backwards(self) -> DynamicRange:
        """``numbers[::-1]``"""
        return DynamicRange(*self._bounds, not self._falls)

    def index_tensor(self, device: torch.device) -> Tensor:
        """Its numbers as an index, int64."""
        start, stop = self._bounds
        numbers = torch.arange(start, torch.sym_max(start, stop), device=device)
        return numbers.flip(0) if self._falls else numbers

    def data_tensor(self, call: _Call, dtype: torch.dtype | None, device: Any) -> Tensor:
        """``torch.tensor`` of it."""
        numbers = self.index_tensor(device)
        if dtype is None:
            torch._check(numbers.shape[0] >= 1)  # no numbers are a tensor of floats to PyTorch
        return numbers if dtype is None else numbers.to(dtype)

    @property
    def start(self) -> int:
        """The first number."""
        return self._made().start

    @property
    def stop(self) -> int:
        """The end, which is no number of it."""
        return self._made().stop

    @property
    def step(self) -> int:
        """The difference of two numbers in sequence."""
        return self._made().step

    def __getitem__(self, place: Any) -> Any:
        return self.backwards() if place == _BACKWARDS else self._made()[place]

    def __len__(self) -> int:
        return len(self._made())

    def __iter__(self) -> Iterator[int]:
        return iter(self._made())

    def __contains__(self, number: object) -> bool:
        return number in self._made()

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._made())

    def __eq__(self, other: object) -> bool:
        return self._made() == _plain(other)

    def __hash__(self) -> int:
        return hash(self._made())

    def __repr__(self) -> str:
        return repr(self._made())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._made().__reduce__()


class DynamicList(list[Any]):
    """``items * times`` for a dynamic size, or the list of a :class:`DynamicRange`; without elements until code reads it."""

    def __init__(self, items: list[Any] | DynamicRange, times: Any = 1) -> None:
        # Torch refuses a list of tensors with other elements before it asks the function mode.
        of_tensors = isinstance(items, list) and all(isinstance(item, Tensor) for item in items)
        self._stored = [] if of_tensors else [object(), object()]
        super().__init__(self._stored)
        self.items, self.times, self._is_read = items, times, False

    @property
    def is_read(self) -> bool:
        """Whether it has its elements, and code may have changed them."""
        if not self._is_read and not all(map(operator.is_, _stored(self), [*self._stored, _END])):
            raise RuntimeError(
                "a method of list, called as list.method(items), changed a list as long as a dynamic size"
            )
        return self._is_read

    def read(self) -> None:
        """Gives the list its elements. Their number is a constant from then on."""
        if not self.is_read:
            elements = list(self.items) * int(self.times)
            self._is_read = True
            list.__init__(self, elements)

    def index_tensor(self, device: torch.device) -> Tensor | None:
        """Its numbers as an index, int64; ``None`` where PyTorch takes the elements for something else."""
        if isinstance(self.items, DynamicRange):
            return self.items.index_tensor(device)
        if any(isinstance(item, bool) or not isinstance(item, int | torch.SymInt) for item in self.items):
            return None
        numbers = [torch.scalar_tensor(item, dtype=torch.int64, device=device) for item in self.items]
        return torch.stack(numbers).repeat(torch.sym_max(self.times, 0))

    def data_tensor(self, call: _Call, dtype: torch.dtype | None, device: Any) -> Tensor:
        """``torch.tensor`` of it."""
        if isinstance(self.items, DynamicRange):
            return self.items.data_tensor(call, dtype, device)
        once = call(self.items, dtype=dtype, device=device)
        if dtype is None or once.dim() > 1:
            torch._check(self.times >= 1)  # no elements are floats along one axis to PyTorch
        return _repeated(once, 0, torch.sym_max(self.times, 0))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (list(self),)

    def __radd__(self, other: list[Any]) -> list[Any]:
        return other + list(self)


_END = object()


def _stored(items: list[Any]) -> Iterator[Any]:
    """The objects that Python has stored for a list, and an end."""
    return itertools.chain(list.__iter__(items), (_END,))


def _reading(name: str) -> Callable[..., Any]:
    method = getattr(list, name)

    def of_elements(self: DynamicList, *args: Any, **kwargs: Any) -> Any:
        for item in (self, *args):
            if isinstance(item, DynamicList):
                item.read()
        return method(self, *args, **kwargs)

    return of_elements


def _item(items: DynamicList, place: Any) -> Any:
    if place == _BACKWARDS and isinstance(items.items, DynamicRange) and not items.is_read:
        return DynamicList(items.items.backwards())
    return _read_item(items, place)


for _name in vars(list).keys() - {
    "__new__",
    "__init__",
    "__getattribute__",
    "__class_getitem__",
    "__doc__",
    "__hash__",
}:
    setattr(DynamicList, _name, _reading(_name))
_read_item = DynamicList.__getitem__
setattr(DynamicList, "__getitem__", _item)  # noqa: B010 - mypy refuses the assignment
pytree.register_pytree_node(DynamicList, lambda elements: (list(elements), None), lambda elements, _: list(elements))


def dynamic_range(*args: Any) -> Any:
    """As Python's ``range``, also to a dynamic size."""
    if len(args) in (1, 2) and any(isinstance(bound, torch.SymInt) for bound in args) and _Attempt.begins():
        return DynamicRange(*((0, *args) if len(args) == 1 else args))
    return range(*args)


def dynamic_list(*args: Any) -> Any:
    """As Python's ``list``, also of such a range."""
    return DynamicList(args[0]) if len(args) == 1 and type(args[0]) is DynamicRange else list(*args)


def _plain(item: Any) -> Any:
    """An argument with Python's own lists and ranges, whose lengths are constants from then on."""
    if isinstance(item, DynamicRange):
        return item._made()
    if isinstance(item, DynamicList):
        return list(item)
    if type(item) in (list, tuple):
        parts = list(map(_plain, item))
        return item if all(part is one for part, one in zip(parts, item, strict=True)) else type(item)(parts)
    return item


# -- the functions that need no elements -------------------------------------------------------------------------------


def _repeated(tensor: Tensor, axis: int, count: Any) -> Tensor:
    times: list[Any] = [1] * tensor.dim()
    times[axis] = count
    return tensor.repeat(times)


def _joined(call: _Call, tensors: Any, dim: int = 0) -> Tensor | None:
    """``torch.stack`` and ``torch.cat``."""
    if not _is_dynamic(tensors) or not all(isinstance(item, Tensor) for item in tensors.items):
        return None
    torch._check(tensors.times >= 1)  # PyTorch refuses a list without tensors
    return _repeated(call(tensors.items, dim), dim, tensors.times)


def _of_data(call: _Call, data: Any, dtype: Any = None, device: Any = None) -> Tensor | None:
    """``torch.tensor``."""
    if not isinstance(data, DynamicRange) and not _is_dynamic(data):
        return None
    result: Tensor = data.data_tensor(call, dtype, device)
    return result


def _is_dynamic(item: Any) -> bool:
    """Whether an item is a list that was not read, and so not changed either."""
    return isinstance(item, DynamicList) and not item.is_read


def _indices(tensor: Tensor, index: Any) -> Any:
    """An index with tensors for ranges and lists."""
    if isinstance(index, tuple):
        return tuple(_indices(tensor, item) for item in index)
    is_dynamic = isinstance(index, DynamicRange) or _is_dynamic(index)
    numbers = index.index_tensor(tensor.device) if is_dynamic else None
    return index if numbers is None else numbers


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((torch.stack, torch.cat, torch.concat, torch.concatenate), _joined),
    torch.tensor: _of_data,
}
#: The arguments that the functions above know.
_KNOWN = frozenset(("tensors", "data", "dim", "dtype", "device"))


def _overriding(original: Callable[..., Any]) -> Callable[..., Any]:
    def override(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            function, given, more = original(mode, func, args, kwargs)
            return function(*given, **more)

        kwargs = kwargs or {}
        replacement = _REPLACED.get(func)
        is_given = args or "tensors" in kwargs or "data" in kwargs
        if replacement is not None and is_given and kwargs.keys() <= _KNOWN:
            result = replacement(call, *args, **kwargs)
            if result is not None:
                return (lambda: result), (), {}
        return original(mode, func, _plain(tuple(args)), {name: _plain(value) for name, value in kwargs.items()})

    return override


class _Attempt:
    """An attempt of a capture. Torch's functions and indices are replaced in it once there is a list or range of a dynamic size."""

    running: _Attempt | None = None

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack, self._has_begun = stack, False

    @classmethod
    def begins(cls) -> bool:
        """Replaces torch's functions, unless they are; whether torch.export's function mode sees the calls of them."""
        running = cls.running
        if running is None or torch.compiler.is_dynamo_compiling() or not function_mode_enabled():
            return False
        if not any(isinstance(mode, NonStrictFunctions) for mode in function_modes()):
            return False
        if not running._has_begun:
            running._has_begun = True
            running._stack.enter_context(
                patched(NonStrictFunctions, "_override", _overriding(NonStrictFunctions._override))
            )
            # Torch reads an index before any function mode sees it.
            for name, method in (("__getitem__", _getitem), ("__setitem__", _setitem)):
                running._stack.enter_context(patched(FakeTensor, name, method))
        return True


def _getitem(tensor: Tensor, index: Any) -> Any:
    return Tensor.__getitem__(tensor, _indices(tensor, index))


def _setitem(tensor: Tensor, index: Any, value: Any) -> None:
    Tensor.__setitem__(tensor, _indices(tensor, index), value)


@contextlib.contextmanager
def lists_of_any_length(mentions: Mentions) -> Iterator[None]:
    """While it holds, ``[x] * n`` in the model's own code has no elements until code reads it, and torch's functions take it."""
    namespaces, getframe = {id(f.__globals__) for f in mentions.functions}, sys._getframe

    def multiplied(method: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(size: torch.SymInt, other: Any) -> Any:
            if type(other) is list and other and id(getframe(1).f_globals) in namespaces and _Attempt.begins():
                return DynamicList(list(other), size)
            return method(size, other)

        return multiply

    with contextlib.ExitStack() as stack:
        if hasattr(NonStrictFunctions, "_override"):
            stack.enter_context(patched(_Attempt, "running", _Attempt(stack)))
            for name in ("__mul__", "__rmul__"):
                stack.enter_context(patched(torch.SymInt, name, multiplied(getattr(torch.SymInt, name))))
        yield
