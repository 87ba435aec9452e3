"""Operators of a script on lists, dicts, tuples and strings, and its queries of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from onnxplug_torchscript.numbers import as_bool, as_float, as_int, as_item, truth_tensor
from onnxplug_torchscript.sequences import unbound
from onnxplug_torchscript.values import (
    ScalarTensor,
    as_dtype,
    as_layout,
    as_memory_format,
    dtype_code,
    is_symbolic,
    leaves,
    mapped,
    scalar,
)

# -- lists, dicts, tuples ----------------------------------------------------------------------------------------------


def _set_item(container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return container


def _append(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


def _insert(items: list[Any], index: int, item: Any) -> None:
    items.insert(index, item)


def _extended(items: list[Any], more: Sequence[Any]) -> list[Any]:
    items += more
    return items


def _multiplied(items: list[Any], count: int) -> list[Any]:
    items *= count
    return items


def _delete(container: Any, key: Any) -> None:
    del container[key]


def _sort(items: list[Any], reverse: bool = False) -> None:
    items.sort(reverse=reverse)


def _slice(items: Any, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    return items[start:end:step]


def _contains(container: Any, item: Any) -> bool:
    return item in container


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


def _unpacked(value: Any) -> Any:
    return tuple(value)


class _Real(float):
    """A real number that is written as a script writes it: ``2.`` and ``0.10000000000000001``."""

    def __repr__(self) -> str:
        return f"{int(self)}." if self.is_integer() and -(2**63) <= self < 2**63 else f"{self:.17g}"


class _Text(str):
    """A text that is written without quotes in a list or tuple."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _written(value: Any) -> Any:
    """A value that Python's formats write as a script's do."""
    kinds = ((float, _Real), (str, _Text))
    return mapped(value, lambda leaf: next((kind(leaf) for plain, kind in kinds if isinstance(leaf, plain)), leaf))


def _format(template: str, *values: Any) -> str:
    return template.format(*_written(values))


def _percent_format(template: str, values: Any) -> str:
    return template % _written(values if isinstance(values, tuple) else (values,))


def _first_item(items: dict[Any, Any]) -> tuple[Any, Any]:
    """``items.popitem()``, in a script the oldest item."""
    key = next(iter(items))
    return key, items.pop(key)


def _unwrapped(value: Any) -> Any:
    if value is None:
        raise RuntimeError("Unwrapping null optional")
    return value


# -- tensors -----------------------------------------------------------------------------------------------------------


def _number_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, torch.SymBool):
        return truth_tensor(value)
    kinds = ((bool, torch.bool), (int | torch.SymInt, torch.int64), (complex, torch.complex128))
    dtype = next((dtype for kind, dtype in kinds if isinstance(value, kind)), torch.float64)
    return ScalarTensor(value, dtype) if dtype != torch.complex128 else scalar(value, dtype)


def _tensor(data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
    dtype = as_dtype(dtype)
    if isinstance(data, torch.Tensor):
        return data.to(dtype=dtype or data.dtype, copy=True)
    if any(is_symbolic(leaf) or isinstance(leaf, torch.Tensor) for leaf in leaves(data)):
        made = _stacked(data)
        if made.dtype == torch.float64:
            made = made.to(torch.get_default_dtype())
        return made.to(dtype or made.dtype)
    if isinstance(data, bool | int | float):
        kinds = ((bool, torch.bool), (int, torch.int64), (float, torch.get_default_dtype()))
        return scalar(data, dtype or next(kind for python, kind in kinds if isinstance(data, python)))
    return torch.tensor(data, dtype=dtype)


def _stacked(data: Any) -> torch.Tensor:
    """A tensor of nested lists of numbers, of which some are symbolic."""
    if isinstance(data, list):
        return torch.stack([_stacked(item) for item in data])
    made = _number_tensor(data)
    return made.tensor() if isinstance(made, ScalarTensor) else made


def _as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data.to(dtype=as_dtype(dtype) or data.dtype)
    return _tensor(data, dtype, device)


def to_list(value: torch.Tensor, kind: int, axes: int) -> Any:
    """``value.tolist()``: ``kind`` is 0 for integers, 1 for real numbers, 2 for truth values."""
    if not axes:
        return (as_int, as_float, as_bool)[kind](value)
    return [to_list(value[index], kind, axes - 1) for index in range(value.shape[0])]


def _converted(value: Any, *args: Any) -> Any:
    """``to(device?, dtype?, non_blocking, copy)`` and ``to(dtype?, non_blocking, copy)``."""
    dtype = as_dtype(args[-3])
    return value.to(dtype=dtype or value.dtype, copy=bool(args[-1]))


def _indices(values: Sequence[Any]) -> list[Any]:
    return list(values)


def _interpolate(value: Any, size: Any = None, factor: Any = None, mode: str = "nearest", *more: Any) -> Any:
    names = ("align_corners", "recompute_scale_factor", "antialias")
    return functional.interpolate(value, size, factor, mode, **dict(zip(names, more, strict=False)))


def _upsample(value: Any, size: Any = None, factor: Any = None, mode: str = "nearest", corners: Any = None) -> Any:
    return functional.interpolate(value, size, factor, mode, corners)


def _upsample_nearest(value: Any, size: Any = None, factor: Any = None) -> Any:
    return functional.interpolate(value, size, factor, "nearest")


def _upsample_bilinear(value: Any, size: Any = None, factor: Any = None) -> Any:
    return functional.interpolate(value, size, factor, "bilinear", align_corners=True)


def _convolved(
    value: Any, weight: Any, bias: Any, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Any:
    return torch.convolution(value, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def _nothing(*_: Any) -> None:
    """For operators that have no effect on a model's results."""


def _like(name: str) -> Callable[..., Any]:
    def apply(value: Any, *args: Any) -> Any:
        return getattr(value, name)(*args)

    return apply


def _property(name: str) -> Callable[[Any], Any]:
    return lambda value: getattr(value, name)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def _is_on(kind: str) -> Callable[[Any], bool]:
    return lambda value: value.device.type == kind


#: Operators by name, for the overloads that torch's dispatcher does not know.
GENERIC: dict[str, Callable[..., Any]] = {
    "aten::add": lambda a, b: a + b,  # lists and strings
    "aten::mul": lambda a, b: a * b,
    "aten::add_": _extended,
    "aten::mul_": _multiplied,
    "aten::append": _append,
    "aten::extend": _extended,
    "aten::insert": _insert,
    "aten::pop": _like("pop"),
    "aten::popitem": _first_item,
    "aten::clear": _like("clear"),
    "aten::reverse": _like("reverse"),
    "aten::remove": _like("remove"),
    "aten::Delete": _delete,
    "aten::sort": _sort,
    "aten::sorted": lambda items: sorted(items),
    "aten::copy": lambda container: container.copy(),
    "aten::list": list,
    "aten::dict": lambda *items: dict(*items),
    "aten::keys": lambda container: list(container),
    "aten::values": lambda container: list(container.values()),
    "aten::items": lambda container: list(container.items()),
    "aten::get": lambda container, key, default=None: container.get(key, default),
    "aten::setdefault": _like("setdefault"),
    "aten::update": _like("update"),
    "aten::count": _like("count"),
    "aten::index": _like("index"),
    "aten::__getitem__": lambda container, key: container[key],
    "aten::select": lambda container, key: container[key],
    "aten::_set_item": _set_item,
    "aten::__contains__": _contains,
    "aten::slice": _slice,
    "aten::len": _length,
    "aten::eq": lambda a, b: a == b,
    "aten::ne": lambda a, b: a != b,
    "aten::__is__": lambda a, b: a is b,
    "aten::__isnot__": lambda a, b: a is not b,
    "aten::_unwrap_optional": _unwrapped,
    "aten::format": _format,
    "aten::percentFormat": _percent_format,
    "aten::str": lambda value: str(_written(value)),
    "aten::hash": hash,
    "aten::Size": list,
    "aten::size": lambda value: list(value.shape),
    "aten::sym_size": lambda value: list(value.shape),
    "aten::stride": lambda value: list(value.stride()),
    "aten::sym_stride": lambda value: list(value.stride()),
    "aten::tensor": _tensor,
    "aten::as_tensor": _as_tensor,
    "aten::_list_to_tensor": _tensor,
    "aten::to": _converted,
    "aten::cpu": _like("cpu"),
    "aten::cuda": _like("cuda"),
    "aten::mT": _property("mT"),
    "aten::mH": _property("mH"),
    "aten::matrix_H": _property("H"),
    "aten::numpy_T": _property("T"),
    "aten::element_size": _like("element_size"),
    "aten::einsum": torch.einsum,
    "aten::index_put": lambda value, indices, new, accumulate=False: value.index_put(
        _indices(indices), new, accumulate
    ),
    "aten::index_put_": lambda value, indices, new, accumulate=False: value.index_put_(
        _indices(indices), new, accumulate
    ),
    "aten::_index_put_impl_": lambda value, indices, new, accumulate=False, unsafe=False: value.index_put_(
        _indices(indices), new, accumulate
    ),
    "aten::_unsafe_index_put": lambda value, indices, new, accumulate=False: value.index_put(
        _indices(indices), new, accumulate
    ),
    "aten::_unsafe_index": lambda value, indices: torch.ops.aten.index.Tensor(value, _indices(indices)),
    "aten::broadcast_shapes": lambda shapes: list(torch.broadcast_shapes(*shapes)),
    "aten::_infer_size": lambda a, b: list(torch.broadcast_shapes(a, b)),
    "aten::_no_grad_zero_": _like("zero_"),
    "aten::_no_grad_fill_": _like("fill_"),
    "aten::_no_grad_uniform_": _like("uniform_"),
    "aten::_no_grad_normal_": _like("normal_"),
    "aten::dequantize": lambda value: (
        [v.dequantize() for v in value] if isinstance(value, list) else value.dequantize()
    ),
    "aten::__interpolate": _interpolate,
    "aten::__upsample": _upsample,
    "aten::__upsample_nearest": _upsample_nearest,
    "aten::__upsample_bilinear": _upsample_bilinear,
    "aten::ScalarImplicit": lambda value: as_item(value),
    "aten::is_scripting": _constant(True),
    "aten::_get_tracing_state": _constant(False),
    "aten::has_torch_function": _constant(False),
    # With gradients torch's layers call their ordinary operators, without them fused ones.
    "aten::is_grad_enabled": _constant(True),
    "aten::is_autocast_enabled": _constant(False),
    "aten::is_autocast_cpu_enabled": _constant(False),
    "aten::set_grad_enabled": _nothing,
    "aten::warn": _nothing,
    "aten::wait": lambda value: value,
    "aten::local_value": lambda value: value,
    "prim::Print": _nothing,
    "prim::AddStatValue": _nothing,
    "prim::TimePoint": _constant(0),
    "prim::NumToTensor": _number_tensor,
    "prim::TupleIndex": lambda items, index: items[index],
    "prim::ModuleContainerIndex": lambda container, index: container[index],
    "prim::TupleUnpack": _unpacked,
    "prim::ListUnpack": _unpacked,
    "prim::ListConstruct": lambda *items: list(items),
    "prim::DictConstruct": lambda *items: dict(zip(items[::2], items[1::2], strict=True)),
    "prim::StringIndex": lambda text, index: text[index],
    "prim::rangelist": lambda count: list(range(count)),
    "prim::unchecked_cast": lambda value: value,
    "prim::unchecked_unwrap_optional": _unwrapped,
    "prim::EnumName": lambda value: value.name,
    "prim::EnumValue": lambda value: value.value,
    "prim::dtype": lambda value: dtype_code(value.dtype),
    "prim::device": lambda value: value.device,
    "prim::layout": _constant(0),
    "prim::type": lambda device: device.type,
    "prim::index": lambda device: device.index,
    "prim::data": lambda value: value.detach(),
    "prim::grad": _constant(None),
    "prim::requires_grad": lambda value: value.requires_grad,
    "prim::itemsize": lambda value: value.dtype.itemsize,
    "prim::nbytes": lambda value: value.numel() * value.dtype.itemsize,
    "prim::is_cpu": _is_on("cpu"),
    "prim::is_cuda": _is_on("cuda"),
    "prim::is_meta": _is_on("meta"),
    "prim::is_quantized": lambda value: value.is_quantized,
    **{
        f"prim::is_{name}": _constant(False)
        for name in "ipu maia mkldnn mps mtia nested sparse sparse_csr vulkan xla xpu".split()
    },
    # Operators that torch.jit.optimize_for_inference inserts, here on ordinary tensors.
    "prim::mkldnn_convolution": _convolved,
    "prim::BroadcastMKLDNNTensors": lambda a, b: torch.broadcast_tensors(a, b),
    "prim::MKLDNNScalarMul": torch.mul,
    "prim::MKLDNNScalarMul_": torch.mul,
    **dict.fromkeys(("prim::MKLDNNHardSwish", "prim::MKLDNNHardSwish_"), functional.hardswish),
    **dict.fromkeys(("prim::MKLDNNHardSigmoid", "prim::MKLDNNHardSigmoid_"), functional.hardsigmoid),
    **dict.fromkeys(
        ("prim::MKLDNNLayerNorm", "prim::MKLDNNLayerNorm_"),
        lambda value, shape, weight, bias, eps, *_: functional.layer_norm(value, shape, weight, bias, eps),
    ),
    "prim::VarConcat": lambda *items: torch.cat(items[:-1], items[-1]),
    "prim::VarStack": lambda *items: torch.stack(items[:-1], items[-1]),
    "prim::AutogradAdd": lambda a, b: b if a is None else a if b is None else a + b,
    "prim::AutogradZero": _constant(None),
}

#: Operators by name and overload that query a tensor, so that sizes stay symbolic.
EXACT: dict[str, Callable[..., Any]] = {
    "aten::size.int": lambda value, axis: value.shape[axis],
    "aten::sym_size.int": lambda value, axis: value.shape[axis],
    "aten::unbind.int": unbound,
    "aten::stride.int": lambda value, axis: value.stride()[axis],
    "aten::sym_stride.int": lambda value, axis: value.stride()[axis],
    "aten::dim": lambda value: value.dim(),
    "aten::numel": lambda value: value.numel(),
    "aten::sym_numel": lambda value: value.numel(),
    "aten::is_floating_point": lambda value: value.is_floating_point(),
    "aten::is_complex": lambda value: value.is_complex(),
    "aten::is_signed": lambda value: value.dtype.is_signed,
    "aten::item": lambda value: as_item(value),
    "aten::is_nonzero": as_bool,
    "aten::index.Tensor_hacked_twin": lambda value, indices: torch.ops.aten.index.Tensor(value, _indices(indices)),
    "aten::requires_grad_": lambda value, *_: value,
    "aten::to_mkldnn": lambda value, *_: value,
    "aten::to_dense": lambda value, *_: value.to_dense() if value.is_sparse else value,
    "aten::add.str": lambda a, b: a + b,
    "aten::device": lambda text: torch.device(text),
    "aten::device.with_index": lambda text, index: torch.device(text, index),
}

#: By type of an operator's argument: the conversion of a script's number to it.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "ScalarType": as_dtype,
    "MemoryFormat": as_memory_format,
    "Layout": as_layout,
}
