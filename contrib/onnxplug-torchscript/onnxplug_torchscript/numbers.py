"""Operators of a script on numbers, where a number is symbolic or a truth value is a tensor.

On plain numbers torch's own kernels compute, so that rounding and division are the script's.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug_torchscript.values import ScalarTensor, is_symbolic, is_unbacked, scalar


def as_item(value: Any) -> Any:
    """``value.item()``."""
    if isinstance(value, ScalarTensor):
        value = value.known()
    return value.item() if isinstance(value, torch.Tensor) else value


def as_int(value: Any) -> Any:
    """``int(value)``, of a tensor too: its item is a symbolic number."""
    if isinstance(value, ScalarTensor):
        value = value.known()
    if isinstance(value, torch.Tensor):
        exact = not value.is_floating_point() and value.dtype != torch.bool
        return (value if exact else value.to(torch.int64)).item()
    if isinstance(value, torch.SymFloat):
        return math.trunc(value)
    if isinstance(value, torch.SymBool):
        return torch.sym_ite(value, 1, 0)
    return value if isinstance(value, torch.SymInt) else int(value)


def as_float(value: Any) -> Any:
    """``float(value)``, of a tensor too."""
    if isinstance(value, ScalarTensor):
        value = value.known()
    if isinstance(value, torch.Tensor):
        return value.to(torch.float64).item()
    if isinstance(value, torch.SymBool):
        value = as_int(value)
    return torch.sym_float(value) if isinstance(value, torch.SymInt | torch.SymFloat) else float(value)


def as_bool(value: Any) -> Any:
    """``bool(value)``; for a tensor it is a tensor, as a branch on it is a branch of the graph."""
    if isinstance(value, ScalarTensor):
        value = value.known()
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise RuntimeError(f"bool() of a tensor of shape {list(value.shape)}")
        value = value.reshape(()) if value.dim() else value
        return value if value.dtype == torch.bool else value != 0
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value != 0
    return value if isinstance(value, torch.SymBool) else bool(value)


def _as_tensor(value: Any) -> torch.Tensor:
    """A truth value as a tensor."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, torch.SymBool):
        return scalar(as_int(value), torch.int64) != 0
    return scalar(bool(value), torch.bool)


def truth_tensor(value: Any) -> torch.Tensor:
    """A truth value that follows from data, as a tensor."""
    return _as_tensor(value)


def _not(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.logical_not(value)
    return torch.sym_not(value)


def _logical(on_tensors: Callable[..., Any], on_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return on_tensors(_as_tensor(a), _as_tensor(b))
        return on_numbers(a, b)

    return apply


def _exclusive(a: Any, b: Any) -> Any:
    """``a ^ b``; torch.export has no such operator of symbolic numbers."""
    return (a & torch.sym_not(b)) | (torch.sym_not(a) & b) if _is_truth(a) and _is_truth(b) else (a | b) - (a & b)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool | torch.SymBool)


def _pow(a: Any, b: Any) -> Any:
    return a**b


def _round(a: Any) -> Any:
    return torch.sym_float(round(a))


def _min(*values: Any) -> Any:
    values = tuple(values[0]) if len(values) == 1 else values
    result = values[0]
    for value in values[1:]:
        result = torch.sym_min(result, value)
    return result


def _max(*values: Any) -> Any:
    values = tuple(values[0]) if len(values) == 1 else values
    result = values[0]
    for value in values[1:]:
        result = torch.sym_max(result, value)
    return result


def derived_index(index: Any, start: Any, step: Any) -> Any:
    """The element of a range at an index."""
    return start + index * step


def range_length(low: Any, high: Any, step: Any) -> Any:
    """The number of elements of a range."""
    if step == 0:
        raise RuntimeError("range() arg 3 must not be zero")
    length = (high - low + step - 1) // step if step > 0 else (low - high - step - 1) // -step
    # A symbolic length is compared with nothing, so that no guard is made.
    return torch.sym_max(0, length) if isinstance(length, torch.SymInt) else max(0, length)


#: Operators by name, for arguments of which at least one is symbolic or a tensor.
SYMBOLIC: dict[str, Callable[..., Any]] = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::mul": operator.mul,
    "aten::div": operator.truediv,
    "aten::floordiv": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::neg": operator.neg,
    "aten::pow": _pow,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::lt": operator.lt,
    "aten::le": operator.le,
    "aten::gt": operator.gt,
    "aten::ge": operator.ge,
    "aten::divmod": lambda a, b: (a // b, a % b),
    "aten::floor": math.floor,
    "aten::ceil": math.ceil,
    "aten::round": _round,
    "aten::sqrt": lambda a: a**0.5,
    "aten::__not__": _not,
    "aten::__and__": _logical(torch.logical_and, operator.and_),
    "aten::__or__": _logical(torch.logical_or, operator.or_),
    "aten::__xor__": _logical(torch.logical_xor, _exclusive),
    "aten::__lshift__": operator.lshift,
    "aten::__rshift__": operator.rshift,
    "aten::Int": as_int,
    "aten::Float": as_float,
    "aten::Bool": as_bool,
    "aten::IntImplicit": as_int,
    "aten::FloatImplicit": as_float,
    "prim::abs": abs,
    "prim::min": _min,
    "prim::max": _max,
    "aten::__derive_index": derived_index,
    "aten::__range_length": range_length,
}

# -- tensors without axes whose number is known ------------------------------------------------------------------------


def _divided(a: Any, b: Any, mode: str | None) -> ScalarTensor | None:
    """``torch.div`` of integers."""
    if mode == "floor":
        return ScalarTensor(a // b, torch.int64)
    if mode == "trunc":
        known = all(statically_known_true(n >= 0) for n in (a, b))  # rounding up has no operator for symbolic numbers
        return ScalarTensor(a // b, torch.int64) if known else None
    dtype = torch.get_default_dtype()
    if is_symbolic(a) or is_symbolic(b):
        return ScalarTensor(a / b, dtype)  # exact; the script rounds to float32: the same up to sizes of 2**24
    if dtype == torch.float32:
        return ScalarTensor(_rounded(_rounded(a) / _rounded(b)), dtype)
    return ScalarTensor(a / b, dtype)


def _rounded(number: float) -> float:
    """The closest float32."""
    (result,) = struct.unpack("f", struct.pack("f", number))
    return float(result)


#: Operators by name on the numbers of integer tensors without axes, in which a trace computes with sizes.
_ON_SCALAR_TENSORS: dict[str, Callable[..., Any]] = {
    "aten::add": lambda a, b, alpha=1: a + b * alpha,
    "aten::sub": lambda a, b, alpha=1: a - b * alpha,
    "aten::rsub": lambda a, b, alpha=1: b - a * alpha,
    "aten::mul": operator.mul,
    "aten::floor_divide": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::neg": operator.neg,
    "aten::minimum": torch.sym_min,
    "aten::maximum": torch.sym_max,
}
_COMPARED: dict[str, Callable[..., Any]] = {
    f"aten::{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_KEPT = ("aten::detach", "aten::clone", "aten::alias", "aten::contiguous", "aten::cpu", "aten::lift_fresh")


def on_scalar_tensors(kind: str, args: list[Any]) -> Any:
    """The result of an operator for tensors whose numbers are known.

    Returns:
        A :class:`ScalarTensor`; ``None`` where only a tensor is right.
    """
    tensors = [a for a in args if isinstance(a, ScalarTensor)]
    if kind in _KEPT or (kind == "aten::to" and _is_plain_conversion(args)):
        dtype = next((a for a in args[1:] if isinstance(a, torch.dtype)), args[0].dtype)
        return ScalarTensor(args[0].value, dtype) if dtype == args[0].dtype == torch.int64 else None
    numbers = [a.value if isinstance(a, ScalarTensor) else a for a in args]
    if any(t.dtype != torch.int64 for t in tensors) or any(type(n) is bool or _is_real(n) for n in numbers):
        return _floored(kind, args)
    if kind in _COMPARED:
        return ScalarTensor(_COMPARED[kind](*numbers), torch.bool)
    if kind == "aten::div":
        return _divided(numbers[0], numbers[1], numbers[2] if len(numbers) > 2 else None)
    function = _ON_SCALAR_TENSORS.get(kind)
    if function is None or any(isinstance(n, torch.Tensor) for n in numbers):
        return None
    return ScalarTensor(function(*numbers), torch.int64)


_ROUNDED: dict[str, Callable[[Any], Any]] = {
    "aten::floor": math.floor,
    "aten::ceil": math.ceil,
    "aten::trunc": math.trunc,
}


def _floored(kind: str, args: list[Any]) -> Any:
    """Floor and ceiling of a symbolic quotient of sizes."""
    rounding = _ROUNDED.get(kind)
    if rounding is None or not isinstance(args[0].value, torch.SymFloat) or is_unbacked(args[0].value):
        return None
    return ScalarTensor(torch.sym_float(rounding(args[0].value)), args[0].dtype)


def _is_real(number: Any) -> bool:
    return isinstance(number, float | torch.SymFloat | torch.SymBool)


def _is_plain_conversion(args: list[Any]) -> bool:
    return all(not isinstance(a, torch.memory_format | torch.Tensor) for a in args[1:])
