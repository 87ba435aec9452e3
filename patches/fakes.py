"""Results of common operators' shapes in one step, where sizes and strides of the operands prove them.

torch computes the kind of a result (sizes, strides, dtype) with dynamic sizes by decompositions in Python that ask about sizes at
every step: 16 ms for a batch norm in evaluation, whose result has the input's kind. For dense operands (strides are the
products of the sizes, compared as expressions):

- an operator that torch tags as pointwise returns its operands' sizes, where these are the same expression or the number 1 on each
  axis; its dtype does not depend on sizes, and is that of the same call on meta tensors of as many axes;
- ``batch_norm`` in evaluation and ``layer_norm`` return the input's kind, where mean, scale, … have the number of channels;
- ``linear`` returns ``[..., out]`` for ``[..., in]`` and a weight ``[out, in]``;
- ``interpolate`` returns the sizes that it is given; torch's decomposition leaves out results of size 1 where corners are aligned.

Everything else is left to torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.passes import shape_prop

from onnxplug.capture.kernels import patched_kernel
from onnxplug.capture.patching import patched
from onnxplug.patches.operands import expressions
from onnxplug.patches.shapes import INTERPOLATIONS
from onnxplug.torch_private import (
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    is_functional_tensor,
    is_transformed,
    torch_c,
    transforms_depth,
)

Function = Callable[..., Any]
#: The operators to which a constant goes that the model's code makes.
_LIFTS = frozenset((torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default))
#: Kinds of arguments without sizes.
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype))


@contextlib.contextmanager
def results_in_one_step() -> Iterator[None]:
    """While it holds, results that the operands' sizes and strides prove are made in one step, and so are constants."""
    composite = DispatchKey.CompositeImplicitAutograd
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(FakeTensorMode, "_dispatch_impl", _of_pointwise(FakeTensorMode._dispatch_impl)))
        name = "is_contiguous_for_memory_format_or_false"
        if hasattr(shape_prop, name):
            stack.enter_context(patched(shape_prop, name, _is_of_no_format))
        for op, sizes_of in _COMPOSITES.items():
            stack.enter_context(patched_kernel(op, composite, functools.partial(_kernel, sizes_of=sizes_of)))
        yield


def _of_pointwise(original: Function) -> Function:
    def dispatch(mode: Any, func: Any, types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        if func in _LIFTS and not kwargs:
            result = _lifted(mode, *args)
            if result is not None:
                return result
        if _is_pointwise(func) and all(type(value) in _PLAIN for value in kwargs.values()):
            with torch_c.DisableTorchFunction():
                result = _pointwise_result(mode, func, args, kwargs) if not transforms_depth() else None
            if result is not None:
                return result
        return original(mode, func, types, args, kwargs)

    return dispatch


def _is_of_no_format(tensor: Any, *, memory_format: torch.memory_format) -> bool:
    """Whether a node's metadata has a memory format for its result: nobody reads it, and torch proves it for each result."""
    return False


@functools.cache
def _is_pointwise(func: Any) -> bool:
    """Whether an operator computes each element of its only result, which is new, from the elements at its place."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or torch.Tag.pointwise not in func.tags:
        return False
    returns = func._schema.returns
    is_new = len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None
    return is_new and not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags


def _pointwise_result(mode: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors: list[Any] = [value for value in args if isinstance(value, torch.Tensor)]
    if not tensors or not all(type(value) in _PLAIN for value in args if not isinstance(value, torch.Tensor)):
        return None
    if any(type(tensor) is not FakeTensor for tensor in tensors) or not any(map(_is_dynamic, tensors)):
        return None  # static sizes are computed in C++
    sizes = [_dense_sizes(tensor, mode) for tensor in tensors]
    if None in sizes or any(tensor.fake_device != tensors[0].fake_device for tensor in tensors):
        return None
    shape = _broadcast([tensor.shape for tensor in tensors], sizes)
    if shape is None or (dtype := _result_dtype(func, args, kwargs)) is None:
        return None
    return FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), tensors[0].fake_device)


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is neither of a subclass nor transformed, and lies in the processor's memory as it is."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if tensor.is_inference() or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return False
    return not is_transformed(tensor) and not is_functional_tensor(tensor)


def fake_of(mode: Any, tensor: torch.Tensor) -> Any:
    """The fake tensor of a plain tensor, in new memory."""
    with torch_c._DisableTorchDispatch():
        kind = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, kind, tensor.device)


def _lifted(mode: Any, tensor: Any) -> Any:
    """The fake tensor of a constant that the code makes, whole and in memory of its own; ``None`` for other tensors.

    torch enters a dozen contexts for each. The mode's memo knows the tensor and its memory afterwards, as from torch.
    """
    if not is_plain(tensor) or tensor.requires_grad or tensor._is_view() or vars(tensor) or transforms_depth():
        return None
    describer, memory = mode.fake_tensor_converter.meta_converter.describer, tensor.untyped_storage()
    if tensor in describer.lookup_tensor or memory in describer.lookup_storage:
        return None
    if tensor.storage_offset() or memory.nbytes() != tensor.numel() * tensor.element_size():
        return None
    fake = fake_of(mode, tensor)
    mode.fake_tensor_converter.set_tensor_memo(tensor, fake)
    mode.fake_tensor_converter.meta_converter.storage_memo[describer.get_storage_id(memory)] = fake.untyped_storage()
    return fake


def _is_dynamic(tensor: Any) -> bool:
    return any(type(size) is torch.SymInt for size in tensor.shape)


def _broadcast(shapes: Sequence[Sequence[Any]], sizes: Sequence[Any]) -> Sequence[Any] | None:
    """The result's sizes of operands that are broadcast, where these hold for all values of symbols; ``None`` otherwise.

    Args:
        shapes: The operands' sizes.
        sizes: The same as expressions.
    """
    result: list[tuple[Any, Any]] = [(1, 1)] * max(map(len, sizes))  # from the last axis on
    for shape, of_shape in zip(shapes, sizes, strict=True):
        for axis, (size, expression) in enumerate(zip(reversed(shape), reversed(of_shape), strict=True)):
            if expression == 1:
                continue
            if result[axis][1] not in (1, expression):
                return None
            result[axis] = size, expression
    return [size for size, _ in reversed(result)]


def _result_dtype(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype of a pointwise operator's result, which does not depend on sizes."""
    described = tuple(
        (value.dtype, value.dim()) if isinstance(value, torch.Tensor) else (type(value), repr(value)) for value in args
    )
    key = (func, described, tuple(kwargs.items()), torch.get_default_dtype())
    if key not in _dtypes:
        metas = [
            torch.empty((1,) * value.dim(), dtype=value.dtype, device="meta")
            if isinstance(value, torch.Tensor)
            else value
            for value in args
        ]
        try:
            _dtypes[key] = func(*metas, **kwargs).dtype
        except Exception:  # torch's own path raises it
            _dtypes[key] = None
    return _dtypes[key]


_dtypes: dict[Any, torch.dtype | None] = {}


def _dense_sizes(tensor: Any, mode: Any = None) -> tuple[Any, ...] | None:
    """The sizes of a fake tensor whose strides are their products, as expressions; ``None`` for other tensors."""
    if type(tensor) is not FakeTensor or tensor.real_tensor is not None:
        return None
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return None
    if mode is not None and tensor.fake_mode is not mode:
        return None
    rank, *layout, _ = expressions(tensor)
    sizes = tuple(layout[:rank])
    expected: Any = 1
    for size, stride in zip(reversed(sizes), reversed(layout[rank:]), strict=True):
        if stride != expected:
            return None
        expected = size * expected
    return sizes


def _kernel(original: Function, sizes_of: Callable[..., Sequence[Any] | None]) -> Function:
    def kernel(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [value for value in args if isinstance(value, torch.Tensor)]
        # C++ computes results of static sizes, but those of interpolate.
        if type(x) is FakeTensor and not kwargs and (sizes_of is _resized or _is_dynamic(x)):
            with torch_c.DisableTorchFunction():
                shape = sizes_of(x, *args) if _fit(x, others) else None
                if shape is not None:
                    return x.new_empty(shape)
        return original(x, *args, **kwargs)

    return kernel


def _fit(x: Any, others: Sequence[Any]) -> bool:
    """Whether tensors are dense, of one floating-point type on one device, and the result has no history."""
    if not x.dtype.is_floating_point or not _dense_sizes(x):
        return False
    if torch.is_autocast_enabled(x.fake_device.type):
        return False
    for tensor in others:
        if not _dense_sizes(tensor, x.fake_mode) or (tensor.dtype, tensor.fake_device) != (x.dtype, x.fake_device):
            return False
    return not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (x, *others))


def _linear(x: Any, weight: Any, bias: Any = None) -> Sequence[Any] | None:
    if x.dim() < 2 or weight.dim() != 2 or not _are(weight.shape, (weight.shape[0], x.shape[-1])):
        return None
    if bias is not None and not _are(bias.shape, weight.shape[:1]):
        return None
    return (*x.shape[:-1], weight.shape[0])


def _layer_norm(x: Any, normalized: Any, weight: Any = None, bias: Any = None, *rest: Any) -> Sequence[Any] | None:
    if not 0 < len(normalized) < x.dim():
        return None
    inner = x.shape[-len(normalized) :]
    sizes = (normalized, *[tensor.shape for tensor in (weight, bias) if tensor is not None])
    return x.shape if all(_are(size, inner) for size in sizes) else None


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
) -> Sequence[Any] | None:
    if training or mean is None or var is None or x.dim() < 2:
        return None
    sizes = [tensor.shape for tensor in (weight, bias, mean, var) if tensor is not None]
    return x.shape if all(_are(size, x.shape[1:2]) for size in sizes) else None


def _resized(x: Any, sizes: Sequence[Any] | None, *rest: Any) -> Sequence[Any] | None:
    scales = rest[-1]
    if (sizes is None) == (scales is None) or x.dim() != 2 + len(sizes or scales):
        return None
    if sizes is None:
        if any(int(scale) != scale for scale in scales):
            return None
        sizes = [size * int(scale) for size, scale in zip(x.shape[2:], scales, strict=True)]
    return (*x.shape[:2], *sizes)


def _are(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether sizes are equal numbers."""
    return len(sizes) == len(others) and all(
        type(size) is int and type(other) is int and size == other for size, other in zip(sizes, others, strict=True)
    )


_COMPOSITES: dict[Any, Callable[..., Sequence[Any] | None]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.layer_norm.default: _layer_norm,
    torch.ops.aten.batch_norm.default: _batch_norm,
    **{getattr(torch.ops.aten, name).vec: _resized for name in INTERPOLATIONS if not name.endswith("_aa")},
}
