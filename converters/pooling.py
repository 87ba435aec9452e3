"""Max and average pooling, and their adaptive forms. Fractional pooling and unpooling are families of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dtypes import DOUBLE, FLOAT
from onnxplug.converters.helpers.exactness import SKIPS_NAN, of_floats
from onnxplug.converters.helpers.matrices import product_along
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import is_long, reduce, reduced
from onnxplug.converters.helpers.runtimes import PADDING_IS_NARROW, computed_in
from onnxplug.converters.helpers.tables import of_rank
from onnxplug.converters.helpers.windows import (
    adaptive_mask,
    adaptive_max_dynamic,
    adaptive_windows,
    average_dynamic,
    ceil_extra_dynamic,
    has_ceil_mode,
    max_of_windows,
    spread,
    windows_of,
)
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def _batched(g: GraphBuilder, x: Value, spatial: int) -> tuple[Value, bool]:
    single = rank_of(x) == spatial + 1
    return (unsqueeze(g, x, 0) if single else x), single


def _window(spatial: int, kernel: Any, stride: Any, padding: Any) -> tuple[list[int], list[int], list[int]]:
    kernel = spread(kernel, spatial)
    return kernel, spread(stride, spatial) if stride not in ([], None) else kernel, spread(padding, spatial)


def _ceil_extra(
    x: Value,
    out: Sequence[Any],
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
    dilation: Sequence[int],
) -> list[int] | None:
    """The padding to add at each end so that rounding down gives the size of torch's ceil_mode.

    torch drops a last window that would start in the padding; ONNX's own ceil_mode, before opset 22, does not.
    ``None`` where a size is dynamic.
    """
    extra = []
    sizes = list(x.shape or ())[2:]
    for size, result, k, s, p, d in zip(sizes, out, kernel, stride, pads, dilation, strict=True):
        if not isinstance(size, int) or not isinstance(result, int):
            return None
        extra.append(max(0, (result - 1) * s + d * (k - 1) + 1 - (size + 2 * p)))
    return extra


def _max_pool(
    g: GraphBuilder, node: FxNode, spatial: int, outputs: int, replacement: Value | None = None
) -> tuple[Any, Value, bool]:
    """The pool of the node's tensor, or of its replacement."""
    x, kernel, stride, padding, dilation, ceil = node.args
    x = x if replacement is None else replacement
    kernel, stride, pads = _window(spatial, kernel, stride, padding)
    dilation = spread(dilation, spatial)
    x, single = _batched(g, x, spatial)
    window: dict[str, Any] = {"kernel_shape": kernel, "strides": stride, "dilations": dilation}
    ends: list[Any] = list(pads)
    dynamic = False
    if ceil:
        extra: Sequence[Any] | None = _ceil_extra(x, node.shape[-spatial:], kernel, stride, pads, dilation)
        if extra is None:
            spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
            dynamic = not has_ceil_mode(g, spans, stride, pads)
            extra = ceil_extra_dynamic(g, x, spans, stride, pads) if dynamic else [0] * spatial
            window |= {} if dynamic else {"ceil_mode": 1}
        ends = [g.op.Add(e, g.const(p)) if dynamic else p + e for p, e in zip(pads, extra, strict=True)]
    dtype = x.dtype
    if dtype is not None and dtype.is_integer() and dtype.bitwidth > 8:
        # ONNX pools floats and bytes; double is exact for integers below 2**53.
        x = g.cast(x, DOUBLE)
    if dynamic or (PADDING_IS_NARROW.concerns(g) and _is_wide(kernel, pads, ends)):
        return _explicitly_padded(g, x, window, pads, ends, outputs), x, single
    result = g.op.MaxPool(x, pads=[*pads, *ends], **window, _outputs=outputs)
    return result, x, single


def _is_wide(kernel: Sequence[int], pads: Sequence[int], ends: Sequence[int]) -> bool:
    """Whether a padding is as wide as the kernel, which torch allows for dilated kernels."""
    return any(p >= k for p, k in zip([*pads, *ends], [*kernel, *kernel], strict=True))


def _explicitly_padded(
    g: GraphBuilder,
    x: Value,
    window: dict[str, Any],
    pads: Sequence[int],
    ends: Sequence[Any],
    outputs: int,
) -> Any:
    """Max pool of a tensor padded by a Pad node; the indices are converted to indices of the unpadded plane.

    For padding that is dynamic, which ONNX's attribute can't express, or as wide as the kernel.
    """
    assert x.dtype is not None
    low: Any = float("-inf")
    if x.dtype.is_integer():
        low = 0 if not x.dtype.is_signed() else -(1 << (x.dtype.bitwidth - 1))
    padded = g.op.Pad(x, g.vector([0, 0, *pads, 0, 0, *ends]), g.const(low, x.dtype))
    result = g.op.MaxPool(padded, **window, _outputs=outputs)
    if outputs == 1:
        return result
    values, places = result
    index = g.const(0)
    factor = g.const(1)
    for axis in range(len(pads) - 1, -1, -1):
        size = g.as_scalar(g.dim(x, 2 + axis))
        whole = g.op.Add(g.op.Add(size, g.as_scalar(ends[axis])), g.const(pads[axis]))
        here = g.op.Sub(g.op.Mod(places, whole), g.const(pads[axis]))
        places = g.op.Div(places, whole)
        index = g.op.Add(index, g.op.Mul(here, factor))
        factor = g.op.Mul(factor, size)
    return values, index


def max_pool(g: GraphBuilder, node: FxNode, spatial: int) -> Value:
    """max_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> Tensor"""  # noqa: E501
    result, _, single = _max_pool(g, node, spatial, 1)
    result = g.cast(result, node.dtype)
    return squeeze(g, result, 0) if single else result


def max_pool_exact(g: GraphBuilder, node: FxNode, spatial: int) -> Value:
    """max_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> Tensor

    The result is NaN where a window contains NaN, and -inf where it contains only -inf. A second pool finds both cases:
    ONNX Runtime's MaxPool skips NaN, and gives the lowest finite number for a window of -inf.
    """  # noqa: E501
    x = node.args[0]
    lowest = g.const(float("-inf"), node.dtype)
    flags = g.op.Where(g.op.IsNaN(x), 2.0, g.cast(g.op.Greater(x, lowest), FLOAT))
    largest, _, single = _max_pool(g, node, spatial, 1, flags)
    largest = squeeze(g, largest, 0) if single else largest
    result = g.op.Where(g.op.Less(largest, 0.5), lowest, max_pool(g, node, spatial))
    return g.op.Where(g.op.Greater(largest, 1.5), g.const(float("nan"), node.dtype), result)


def max_pool_with_indices(g: GraphBuilder, node: FxNode, spatial: int) -> list[Value]:
    """max_pool2d_with_indices(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)

    torch's indices count within a plane, ONNX's within the whole tensor.
    """  # noqa: E501
    (values, indices), x, single = _max_pool(g, node, spatial, 2)
    plane: Any = 1
    for axis in range(2, rank_of(x)):
        size = g.dim(x, axis)
        plane = plane * size if isinstance(plane, int) and isinstance(size, int) else g.op.Mul(plane, size)
    indices = g.op.Mod(indices, g.as_scalar(plane))
    values = g.cast(values, node.dtype)
    return [squeeze(g, v, 0) if single else v for v in (values, indices)]


def avg_pool(g: GraphBuilder, node: FxNode, spatial: int) -> Value:
    """avg_pool2d(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor

    The part of a last window that ceil_mode adds beyond the padding is never counted, whatever count_include_pad is.
    """  # noqa: E501
    x, kernel, stride, padding, ceil, include = node.args[:6]
    divisor = node.args[6] if len(node.args) > 6 else None
    kernel, stride, pads = _window(spatial, kernel, stride, padding)
    x, single = _batched(g, x, spatial)
    if node.dtype.is_integer():
        result = _integer_mean(g, node, x, kernel, stride, pads, ceil, include, divisor)
        return squeeze(g, result, 0) if single else result
    ends = list(pads)
    if ceil:
        extra = _ceil_extra(x, node.shape[-spatial:], kernel, stride, pads, [1] * spatial)
        if extra is None and divisor is None and not (include and any(pads)) and has_ceil_mode(g, kernel, stride, pads):
            result = g.op.AveragePool(x, kernel_shape=kernel, strides=stride, pads=[*pads, *pads], ceil_mode=1)
            return squeeze(g, result, 0) if single else result
        if extra is None:
            result = average_dynamic(g, x, kernel, stride, pads, include, divisor)
            return squeeze(g, result, 0) if single else result
        if any(extra) and include and divisor is None and any(pads):
            full = [0, 0, *pads, 0, 0, *pads]
            x = g.op.Pad(x, g.const(full), g.const(0.0, x.dtype))
            pads, include = [0] * spatial, False
            ends = extra
        else:
            ends = [p + e for p, e in zip(pads, extra, strict=True)]
            include = include and not any(extra)
    counted = include or divisor is not None
    result = g.op.AveragePool(
        x, kernel_shape=kernel, strides=stride, pads=[*pads, *ends], count_include_pad=int(counted)
    )
    if divisor is not None:
        result = g.op.Mul(result, g.const(math.prod(kernel) / divisor, node.dtype))
    return squeeze(g, result, 0) if single else result


def _integer_mean(
    g: GraphBuilder,
    node: FxNode,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[int],
    ceil: bool,
    include: bool,
    divisor: int | None,
) -> Value:
    """The quotients of sums and counts, cut off: an axis after the other, by a Gather of its windows."""
    spatial = len(kernel)
    extra: Sequence[Any] = [0] * spatial
    if ceil:
        known = _ceil_extra(x, node.shape[-spatial:], kernel, stride, pads, [1] * spatial)
        extra = ceil_extra_dynamic(g, x, kernel, stride, pads) if known is None else known
    ends = [e + p if isinstance(e, int) else g.op.Add(e, g.const(p)) for e, p in zip(extra, pads, strict=True)]
    total = g.op.Pad(x, g.vector([0, 0, *pads, 0, 0, *ends]), g.const(0, node.dtype))
    count = g.const(1)
    for axis in range(spatial):
        window = kernel[axis], stride[axis]
        total = reduced(
            g, "ReduceSum", windows_of(g, total, 2 + axis, *window), 3 + axis, False, node.dtype, exact=True
        )
        ones = g.op.Expand(g.const(1), g.as_vector(g.dim(x, 2 + axis)))
        ones = g.op.Pad(ones, g.const([pads[axis]] * 2), g.const(int(include)))
        ones = g.op.Pad(ones, g.vector([0, extra[axis]]), g.const(0))
        counted = reduce(g, "ReduceSum", windows_of(g, ones, 0, *window), [1], False)
        count = g.op.Mul(count, unsqueeze(g, counted, *range(1, spatial - axis)) if axis < spatial - 1 else counted)
    return g.op.Div(total, g.cast(count if divisor is None else g.const(divisor), node.dtype))


def adaptive_avg_pool(g: GraphBuilder, node: FxNode, spatial: int) -> Value:
    """adaptive_avg_pool2d(Tensor self, SymInt[2] output_size) -> Tensor

    Size 1 is a global mean, sizes that divide the input's are an ordinary pool, others a product with a matrix of weights per axis.
    """
    x, size = node.args
    if node.dtype.is_integer():
        raise Unsupported("PyTorch has no adaptive average pool of integers")
    out: list[Any] = spread(size, spatial)
    x, single = _batched(g, x, spatial)
    if all(isinstance(o, int) and o == 1 for o in out):
        axes = range(2, rank_of(x))
        result = reduce(g, "ReduceMean", x, axes, True) if is_long(g, x, axes) else g.op.GlobalAveragePool(x)
        return squeeze(g, result, 0) if single else result
    sizes = g.dims(x)[2:]
    whole = [(s, o) for s, o in zip(sizes, out, strict=True) if isinstance(s, int) and isinstance(o, int)]
    if len(whole) == len(out) and all(o and s % o == 0 for s, o in whole):
        kernel = [s // o for s, o in whole]
        result = g.op.AveragePool(x, kernel_shape=kernel, strides=kernel)
    else:
        inner = computed_in(g, "MatMul", wide(node.dtype))
        result = g.cast(_mean_by_matrices(g, g.cast(x, inner), out), node.dtype)
    return squeeze(g, result, 0) if single else result


def _mean_by_matrices(g: GraphBuilder, x: Value, out: Sequence[Any]) -> Value:
    """The means of torch's adaptive windows: a product with a matrix of weights for each axis.

    The last axis comes first: with an output size of 0, ONNX Runtime 1.31 rejects a transposed product (FusedMatMul) of
    an empty batch, and an axis of size 0 would be one of the following products' batch axes.
    """
    assert x.dtype is not None
    sizes = g.dims(x)[2:]
    for axis in reversed(range(2, rank_of(x))):
        s, o = sizes[axis - 2], out[axis - 2]
        if isinstance(s, int) and isinstance(o, int):
            weights = g.const(_windows(s, o), x.dtype)
        else:
            weights = _mean_windows(g, s, o, x.dtype)
        x = product_along(g, x, axis, weights)
    return x


def _windows(size: int, out: int) -> np.ndarray:
    """Weights of the mean over torch's adaptive windows, floor(i n / o) to ceil((i + 1) n / o): [size, out]."""
    weights = np.zeros((size, out))
    for i in range(out):
        start, end = (i * size) // out, -((-(i + 1) * size) // out)
        weights[start:end, i] = 1.0 / (end - start)
    return weights


def _mean_windows(g: GraphBuilder, size: Any, out: Any, dtype: ir.DataType) -> Value:
    """As :func:`_windows`, for sizes that are only known at run time."""
    inside = adaptive_mask(g, size, out)
    weights = g.cast(inside, dtype)
    count = reduce(g, "ReduceSum", weights, [1], True)
    return g.op.Transpose(g.op.Div(weights, count), perm=[1, 0])


def adaptive_max_pool(g: GraphBuilder, node: FxNode, spatial: int) -> list[Value]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)"""
    x, size = node.args
    out = g.concrete_shape(spread(size, spatial), "output size")
    x, single = _batched(g, x, spatial)
    sizes = list(x.shape or ())[2:]
    if not all(isinstance(s, int) and o and s % o == 0 for s, o in zip(sizes, out, strict=True)):
        return _uneven_max_pool(g, x, single, out)
    kernel = [s // o for s, o in zip(g.concrete_shape(sizes, "size"), out, strict=True)]
    values, indices = g.op.MaxPool(x, kernel_shape=kernel, strides=kernel, _outputs=2)
    indices = g.op.Mod(indices, g.const(math.prod(g.concrete_shape(sizes, "size"))))
    return [squeeze(g, v, 0) if single else v for v in (values, indices)]


def adaptive_max_pool_exact(g: GraphBuilder, node: FxNode, spatial: int) -> list[Value]:
    """adaptive_max_pool2d(Tensor self, int[2] output_size) -> (Tensor, Tensor)

    A window with NaN gives the first NaN.
    """
    x, size = node.args
    out = g.concrete_shape(spread(size, spatial), "output size")
    return _uneven_max_pool(g, *_batched(g, x, spatial), out, exact=True)


def _uneven_max_pool(g: GraphBuilder, x: Value, single: bool, out: Sequence[int], exact: bool = False) -> list[Value]:
    """Max pool of windows of different sizes; the places of each window are constants."""
    sizes = list(x.shape or ())[2:]
    results: Sequence[Value]
    if all(isinstance(s, int) for s in sizes):
        known = g.concrete_shape(sizes, "size of an adaptive pool's input")
        windows = [adaptive_windows(s, o)[0] for s, o in zip(known, out, strict=True)]
        results = max_of_windows(g, x, known, windows, exact)
    else:
        results = adaptive_max_dynamic(g, x, out, exact)
    return [squeeze(g, v, 0) if single else v for v in results]


def _each(name: str, convert: Callable[[GraphBuilder, FxNode, int], Any], **conditions: Any) -> list[Rule]:
    return [Rule(f"aten::{name.replace('N', str(n))}.default", of_rank(convert, n), **conditions) for n in (1, 2, 3)]


RULES: list[Rule] = [
    *_each("max_poolNd", max_pool),
    *_each("max_poolNd_with_indices", max_pool_with_indices),
    *_each("avg_poolNd", avg_pool),
    *_each("adaptive_avg_poolNd", adaptive_avg_pool),
    Rule("aten::_adaptive_avg_pool2d.default", of_rank(adaptive_avg_pool, 2)),
    Rule("aten::_adaptive_avg_pool3d.default", of_rank(adaptive_avg_pool, 3)),
    *_each("adaptive_max_poolNd", adaptive_max_pool),
    *_each("max_poolNd", max_pool_exact, when=of_floats, **SKIPS_NAN),
    *_each("adaptive_max_poolNd", adaptive_max_pool_exact, when=of_floats, **SKIPS_NAN),
]
