"""Values of a script without a type in Python, and the tensors and numbers within values."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

#: torch's dtypes in the order of their numbers in a script.
_DTYPES = (
    "uint8 int8 int16 int32 int64 float16 float32 float64 complex32 complex64 complex128 bool qint8 quint8 qint32 bfloat16 "
    "quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 bits16 float8_e5m2 float8_e4m3fn float8_e5m2fnuz float8_e4m3fnuz uint16 "
    "uint32 uint64"
).split()
_CODES = {getattr(torch, name): code for code, name in enumerate(_DTYPES) if hasattr(torch, name)}
_BY_CODE = {code: dtype for dtype, code in _CODES.items()}
_MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_LAYOUTS = (torch.strided, torch.sparse_coo)


def dtype_code(dtype: torch.dtype) -> int:
    """The number that a script has for a dtype."""
    return _CODES[dtype]


def as_dtype(code: Any) -> Any:
    """The dtype for a script's number of it; a dtype stays."""
    return _BY_CODE[code] if isinstance(code, int) else code


def as_memory_format(code: Any) -> Any:
    """The memory format for a script's number of it; a memory format stays."""
    return _MEMORY_FORMATS[code] if isinstance(code, int) else code


def as_layout(code: Any) -> Any:
    """The layout for a script's number of it; a layout stays."""
    return _LAYOUTS[code] if isinstance(code, int) else code


class _Uninitialized:
    """The value of a variable that the branch taken does not set (``prim::Uninitialized``)."""

    def __repr__(self) -> str:
        return "uninitialized"


UNINITIALIZED = _Uninitialized()


@dataclass(eq=False)
class Instance:
    """An object of a class of the script (``@torch.jit.script class``)."""

    type_name: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class ScalarTensor:
    """A tensor without axes whose number is known: ``prim::NumToTensor``, and constants.

    A trace computes with sizes in such tensors; as numbers they stay sizes.

    Attributes:
        written: The tensor, once an operator has written it in place and its number is not known any more.
    """

    value: Any
    dtype: torch.dtype
    written: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The tensor."""
        return scalar(self.value, self.dtype) if self.written is None else self.written

    def to_write(self) -> torch.Tensor:
        """The tensor for an operator that writes it."""
        self.written = self.tensor()
        return self.written

    def known(self) -> Any:
        """The number, or the tensor where the number is not known."""
        return self.value if self.written is None else self.written

    shape = torch.Size()
    device = torch.device("cpu")
    is_quantized = False
    requires_grad = False

    def dim(self) -> int:
        """The number of axes: 0."""
        return 0

    def numel(self) -> int:
        """The number of elements: 1."""
        return 1

    def stride(self) -> tuple[int, ...]:
        """The strides: none, as there are no axes."""
        return ()

    def is_floating_point(self) -> bool:
        """Whether the dtype is a float dtype."""
        return self.dtype.is_floating_point

    def is_complex(self) -> bool:
        """Whether the dtype is complex: never."""
        return False


@dataclass(eq=False)
class Stacked:
    """A list of tensors of one shape, of dynamic length.

    Attributes:
        tensor: The tensors of the list, stacked along the first axis.
    """

    tensor: torch.Tensor


def scalar(number: Any, dtype: torch.dtype) -> torch.Tensor:
    """A number, symbolic or not, as a tensor without axes."""
    return torch.scalar_tensor(number, dtype=dtype)


def is_number(value: Any) -> bool:
    """Whether a value is a number or truth value of Python's, symbolic or not."""
    return isinstance(value, bool | int | float | torch.SymBool | torch.SymInt | torch.SymFloat)


def is_symbolic(value: Any) -> bool:
    """Whether a value is a symbolic number."""
    return isinstance(value, torch.SymBool | torch.SymInt | torch.SymFloat)


def is_unbacked(value: Any) -> bool:
    """Whether a value is a symbolic number that depends on a tensor's values, not only on sizes of the inputs."""
    return is_symbolic(value) and not value.node.has_hint()


@lru_cache(maxsize=256)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """A class of named tuples."""
    return namedtuple(name, fields)


# -- tensors and numbers within values -----------------------------------------------------------------------------------


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with each of its leaves changed; containers are copied, modules are leaves."""
    if isinstance(value, tuple):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, Instance):
        return Instance(value.type_name, mapped(value.attributes, change))
    if isinstance(value, Stacked):
        return Stacked(change(value.tensor))
    return change(value)


def _parts(value: Any) -> Iterable[Any] | None:
    """The items of a container; ``None`` for a leaf."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, Instance):
        return value.attributes.values()
    return (value.tensor,) if isinstance(value, Stacked) else None


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a value in their order."""
    parts = _parts(value)
    if parts is None:
        yield value
        return
    for part in parts:
        yield from leaves(part)


def structure(value: Any) -> Any:
    """The structure of a value without its leaves: equal for values of the same structure."""
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(structure(item) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((key, structure(item)) for key, item in value.items())
    if isinstance(value, Instance):
        return value.type_name, structure(value.attributes)
    if isinstance(value, Stacked):
        return "stacked"
    return "leaf"


def lists_in(value: Any) -> Iterator[list[Any]]:
    """The lists within a value, itself included."""
    if isinstance(value, list):
        yield value
    for part in _parts(value) or ():
        yield from lists_in(part)


def holds_stacked(value: Any) -> bool:
    """Whether a value is, or holds, a list of dynamic length."""
    return isinstance(value, Stacked) or any(map(holds_stacked, _parts(value) or ()))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors within a value."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))
