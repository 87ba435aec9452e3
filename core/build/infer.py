"""Dtype and shape of what an ai.onnx operator returns, as far as it is cheap to tell.

What a converter emits must carry dtype and shape at once: converters read them, and the interpreter compares the last one
with what torch computed. Each function takes ``(inputs, attributes, spec)`` and gives one ``(dtype, dims)`` an output; a
``None`` dtype means what the schema says, ``None`` dims an unknown rank, and a ``None`` dimension an unknown size. For an
operator without a function here, and for an unknown rank, onnx's own inference is asked (``onnx_inference.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

Dim = int | ir.SymbolicDim | None
Dims = tuple[Dim, ...] | None
Result = list[tuple[ir.DataType | None, Dims]]
Inputs = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]


def dims_of(value: ir.Value | None) -> Dims:
    """The dimensions of a value, ``None`` when its rank is unknown."""
    if value is None or value.shape is None:
        return None
    return value.shape.dims


def known(value: ir.Value | None) -> list[int] | None:
    """The integers of a constant value, ``None`` when it isn't one."""
    if value is None or value.const_value is None or value.const_value.size > 64:
        return None
    array = value.const_value.numpy()
    return [int(v) for v in array.reshape(-1)] if array.dtype.kind in "iub" else None


def broadcast(shapes: Sequence[Dims]) -> Dims:
    """The dimensions that numpy broadcasting gives; an unknown size beside 1 stays unknown."""
    if any(s is None for s in shapes):
        return None
    present = [s for s in shapes if s is not None]
    first = present[0]
    if all(s == first for s in present[1:]):
        return first
    rank = max(len(s) for s in present)
    result: list[Dim] = []
    for axis in range(-rank, 0):
        dim: Dim = 1
        for shape in present:
            if len(shape) < -axis:
                continue
            other = shape[axis]
            if isinstance(other, int) and other == 1:
                continue
            if isinstance(dim, int) and dim == 1:
                dim = other
            elif isinstance(other, int):
                dim = other
            elif not isinstance(dim, int) and dim != other:
                dim = None
        result.append(dim)
    return tuple(result)


def _same(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, dims_of(inputs[0]))]


def _rank_kept(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, None if dims is None else (None,) * len(dims))]


def _det(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, None if dims is None else dims[:-2])]


def _elementwise(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, broadcast([dims_of(v) for v in inputs if v is not None]))]


def _cast(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(ir.DataType(attributes["to"]), dims_of(inputs[0]))]


def _cast_like(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    like = inputs[1]
    return [(like.dtype if like is not None else None, dims_of(inputs[0]))]


def _matmul(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    a, b = dims_of(inputs[0]), dims_of(inputs[1])
    if a is None or b is None or not a or not b:
        return [(None, None)]
    batch = broadcast([a[:-2], b[:-2]]) if len(a) > 2 or len(b) > 2 else ()
    if batch is None:
        return [(None, None)]
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return [(None, (*batch, *rows, *columns))]


def _gemm(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    a, b = dims_of(inputs[0]), dims_of(inputs[1])
    if a is None or b is None:
        return [(None, None)]
    return [(None, (a[1] if attributes.get("transA") else a[0], b[0] if attributes.get("transB") else b[1]))]


def _transpose(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    perm = attributes.get("perm")
    return [(None, tuple(dims[p] for p in perm) if perm is not None else dims[::-1])]


def _reshape(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    target = known(inputs[1])
    if target is None:
        shape = dims_of(inputs[1])
        rank = shape[0] if shape else None
        return [(None, (None,) * rank if isinstance(rank, int) else None)]
    source = dims_of(inputs[0])
    copies = not attributes.get("allowzero")
    result: list[Dim] = []
    for axis, size in enumerate(target):
        if size == 0 and copies:
            result.append(source[axis] if source is not None and axis < len(source) else None)
        else:
            result.append(None if size == -1 else size)
    if -1 in target and source is not None and all(isinstance(d, int) for d in source):
        others = [d for axis, d in enumerate(result) if target[axis] != -1]
        if all(isinstance(d, int) for d in others):
            rest = _product(others)
            if rest:
                result[target.index(-1)] = _product(source) // rest
    return [(None, tuple(result))]


def _product(dims: Sequence[Dim]) -> int:
    total = 1
    for dim in dims:
        total *= dim if isinstance(dim, int) else 1
    return total


def _axes(inputs: Inputs, attributes: Attributes, rank: int) -> list[int] | None:
    """Axes from the attribute or the second input, made non-negative; ``None`` when they aren't known."""
    axes = attributes.get("axes")
    if axes is None and len(inputs) > 1 and inputs[1] is not None:
        axes = known(inputs[1])
        if axes is None:
            return None
    return [a % rank if rank else 0 for a in axes] if axes is not None else []


def _reduce(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    axes = _axes(inputs, attributes, len(dims))
    if axes is None:
        return [(None, (None,) * len(dims) if attributes.get("keepdims", 1) else None)]
    if not axes:
        if attributes.get("noop_with_empty_axes"):
            return [(None, dims)]
        axes = list(range(len(dims)))
    if attributes.get("keepdims", 1):
        return [(None, tuple(1 if i in axes else d for i, d in enumerate(dims)))]
    return [(None, tuple(d for i, d in enumerate(dims) if i not in axes))]


def _arg_reduce(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    axis = attributes.get("axis", 0) % max(len(dims), 1)
    if attributes.get("keepdims", 1):
        return [(None, tuple(1 if i == axis else d for i, d in enumerate(dims)))]
    return [(None, tuple(d for i, d in enumerate(dims) if i != axis))]


def _unsqueeze(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    axes = attributes.get("axes")
    if axes is None:
        axes = known(inputs[1])
    if dims is None or axes is None:
        return [(None, None)]
    rank = len(dims) + len(axes)
    new = {a % rank for a in axes}
    rest = iter(dims)
    return [(None, tuple(1 if i in new else next(rest) for i in range(rank)))]


def _squeeze(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    axes = _axes(inputs, attributes, len(dims))
    if axes is None:
        return [(None, None)]
    if not axes:
        if any(not isinstance(d, int) for d in dims):
            return [(None, None)]
        return [(None, tuple(d for d in dims if d != 1))]
    return [(None, tuple(d for i, d in enumerate(dims) if i not in axes))]


def _concat(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    shapes = [dims_of(v) for v in inputs]
    if any(s is None for s in shapes):
        return [(None, None)]
    first = list(shapes[0] or ())
    axis = attributes["axis"] % max(len(first), 1)
    sizes = [s[axis] for s in shapes if s is not None and axis < len(s)]
    first[axis] = sum(s for s in sizes if isinstance(s, int)) if all(isinstance(s, int) for s in sizes) else None
    return [(None, tuple(first))]


def _gather(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    data, indices = dims_of(inputs[0]), dims_of(inputs[1])
    if data is None or indices is None or not data:
        return [(None, None)]
    axis = attributes.get("axis", 0) % len(data)
    return [(None, (*data[:axis], *indices, *data[axis + 1 :]))]


def _second(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, dims_of(inputs[1]))]


def _gather_nd(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    data, indices = dims_of(inputs[0]), dims_of(inputs[1])
    if data is None or indices is None or not indices or not isinstance(indices[-1], int):
        return [(None, None)]
    return [(None, (*indices[:-1], *data[attributes.get("batch_dims", 0) + indices[-1] :]))]


def _slice(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    starts, ends = known(inputs[1]), known(inputs[2])
    axes = known(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    steps = known(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else None
    result = list(dims)
    if axes is None and len(inputs) > 3 and inputs[3] is not None:
        return [(None, (None,) * len(dims))]
    touched = axes if axes is not None else list(range(len(starts) if starts is not None else len(dims)))
    for position, axis in enumerate(touched):
        size = dims[axis]
        exact = starts is not None and ends is not None and (len(inputs) < 5 or inputs[4] is None or steps is not None)
        if not exact or not isinstance(size, int):
            result[axis] = None
            continue
        assert starts is not None and ends is not None
        step = steps[position] if steps is not None else 1
        result[axis] = len(range(*slice(starts[position], ends[position], step).indices(size)))
        if step < 0 and ends[position] <= -(1 << 31):
            result[axis] = len(range(*slice(starts[position], None, step).indices(size)))
    return [(None, tuple(result))]


def _split(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    sizes = attributes.get("split")
    if sizes is None and len(inputs) > 1:
        sizes = known(inputs[1])
    if dims is None:
        return []
    axis = attributes.get("axis", 0) % len(dims)
    count = attributes.get("num_outputs")
    if sizes is None and count is not None and isinstance(dims[axis], int):
        total = dims[axis]
        assert isinstance(total, int)
        chunk = -(-total // count)
        sizes = [chunk] * (total // chunk) + ([total % chunk] if total % chunk else [])
    if sizes is None:
        return [(None, (*dims[:axis], None, *dims[axis + 1 :]))] * (count or 0)
    return [(None, (*dims[:axis], size, *dims[axis + 1 :])) for size in sizes]


def _shape(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, (None,))]
    return [(None, (len(range(*slice(attributes.get("start", 0), attributes.get("end")).indices(len(dims)))),))]


def _scalar(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, ())]


def _expand(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    target = known(inputs[1])
    if target is None:
        shape = dims_of(inputs[1])
        source = dims_of(inputs[0])
        if shape and isinstance(shape[0], int) and source is not None:
            return [(None, (None,) * max(shape[0], len(source)))]
        return [(None, None)]
    return [(None, broadcast([dims_of(inputs[0]), tuple(target)]))]


def _constant_of_shape(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    value = attributes.get("value")
    dtype = value.dtype if value is not None else ir.DataType.FLOAT
    target = known(inputs[0])
    if target is not None:
        return [(dtype, tuple(target))]
    shape = dims_of(inputs[0])
    return [(dtype, (None,) * shape[0] if shape and isinstance(shape[0], int) else None)]


def _range(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    values = [known(v) for v in inputs]
    if all(v is not None for v in values):
        start, limit, delta = (v[0] for v in values if v is not None)
        return [(None, (max(0, -(-(limit - start) // delta)),))]
    return [(None, (None,))]


def _layer_norm(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    stash = ir.DataType(attributes.get("stash_type", 1))
    return [(None, dims), (stash, None), (stash, None)]


def _one_hot(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, depth = dims_of(inputs[0]), known(inputs[1])
    values = inputs[2]
    dtype = values.dtype if values is not None else None
    if dims is None:
        return [(dtype, None)]
    axis = attributes.get("axis", -1) % (len(dims) + 1)
    return [(dtype, (*dims[:axis], depth[0] if depth else None, *dims[axis:]))]


def _top_k(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, k = dims_of(inputs[0]), known(inputs[1])
    if dims is None or not dims:
        return [(None, None), (ir.DataType.INT64, None)]
    axis = attributes.get("axis", -1) % len(dims)
    out = (*dims[:axis], k[0] if k else None, *dims[axis + 1 :])
    return [(None, out), (ir.DataType.INT64, out)]


def _dropout(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, dims_of(inputs[0])), (ir.DataType.BOOL, dims_of(inputs[0]))]


def _pad(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    pads = known(inputs[1])
    if dims is None:
        return [(None, None)]
    axes = known(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else list(range(len(dims)))
    if pads is None or axes is None:
        return [(None, (None,) * len(dims))]
    result = list(dims)
    for position, axis in enumerate(axes):
        size, total = dims[axis], pads[position] + pads[position + len(axes)]
        result[axis] = size + total if isinstance(size, int) else (size if total == 0 else None)
    return [(None, tuple(result))]


def _spatial(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    """Convolution and pooling keep the rank and the batch; channels follow the weight, sizes the windows."""
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    channels: Dim = dims[1]
    count = len(dims) - 2
    kernel: Sequence[Dim] = attributes.get("kernel_shape") or (None,) * count
    weight = dims_of(inputs[1]) if len(inputs) > 1 else None
    transposed = spec.op_type == "ConvTranspose"
    if weight is not None:
        first = weight[1] if transposed else weight[0]
        channels = first * attributes.get("group", 1) if transposed and isinstance(first, int) else first
        kernel = weight[2:]
    sizes = _windows(dims[2:], kernel, attributes, transposed) or (None,) * count
    out = (dims[0], channels, *sizes)
    return [(None, out), (ir.DataType.INT64, out)]


def _windows(
    sizes: Sequence[Dim], kernel: Sequence[Dim], attributes: Attributes, transposed: bool
) -> tuple[Dim, ...] | None:
    """The size of each axis after windows of ``kernel`` went over it; ``None`` where that takes more than the formula."""
    if attributes.get("auto_pad", "NOTSET") != "NOTSET" or attributes.get("ceil_mode") or "output_shape" in attributes:
        return None
    count = len(sizes)
    strides, dilations = attributes.get("strides") or (1,) * count, attributes.get("dilations") or (1,) * count
    pads, extra = attributes.get("pads") or (0,) * (2 * count), attributes.get("output_padding") or (0,) * count
    result: list[Dim] = []
    for axis, (size, k) in enumerate(zip(sizes, kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(k, int):
            result.append(None)
            continue
        span, padding = dilations[axis] * (k - 1) + 1, pads[axis] + pads[count + axis]
        if transposed:
            result.append(strides[axis] * (size - 1) + extra[axis] + span - padding)
        else:
            result.append((size + padding - span) // strides[axis] + 1)
    return tuple(result)


def _global_pool(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, (*dims[:2], *(1,) * (len(dims) - 2)) if dims is not None else None)]


def _resize(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    sizes = known(inputs[3]) if len(inputs) > 3 else None
    plain = "axes" not in attributes and attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    return [(None, tuple(sizes) if sizes is not None and plain else (None,) * len(dims))]


def _tile(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, repeats = dims_of(inputs[0]), known(inputs[1])
    if dims is None or repeats is None:
        return [(None, (None,) * len(dims) if dims is not None else None)]
    return [(None, tuple(_times(d, r) for d, r in zip(dims, repeats, strict=True)))]


def _times(dim: Dim, factor: int) -> Dim:
    return dim * factor if isinstance(dim, int) else dim if factor == 1 else None


def _depth_to_space(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None or len(dims) != 4:
        return [(None, None)]
    block = attributes["blocksize"]
    batch, channels, *sizes = dims
    if spec.op_type == "SpaceToDepth":
        down = (s // block if isinstance(s, int) else None for s in sizes)
        return [(None, (batch, _times(channels, block * block), *down))]
    fewer = channels // (block * block) if isinstance(channels, int) else None
    return [(None, (batch, fewer, *(_times(s, block) for s in sizes)))]


def _grid_sample(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, grid = dims_of(inputs[0]), dims_of(inputs[1])
    if dims is None or grid is None:
        return [(None, None)]
    return [(None, (*dims[:2], *grid[1:-1]))]


def _flatten(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, (None, None))]
    axis = attributes.get("axis", 1)
    axis += len(dims) if axis < 0 else 0
    halves = dims[:axis], dims[axis:]
    return [(None, tuple(_product(h) if all(isinstance(d, int) for d in h) else _only(h) for h in halves))]


def _only(dims: Sequence[Dim]) -> Dim:
    """The one dimension that is not 1."""
    others = [d for d in dims if d != 1]
    return others[0] if len(others) == 1 else None


def _unique(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    x = inputs[0]
    dims = dims_of(x)
    axis = attributes.get("axis")
    if axis is None:
        values: Dims = (None,)
    else:
        values = None if dims is None else tuple(None if a == axis % len(dims) else d for a, d in enumerate(dims))
    indices = (ir.DataType.INT64, (None,))
    return [(x.dtype if x is not None else None, values), indices, indices, indices]


def _non_zero(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, (len(dims) if dims is not None else None, None))]


def _random(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(ir.DataType(attributes.get("dtype", 1)), tuple(attributes["shape"]))]


def _random_like(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    source = inputs[0]
    dtype = attributes.get("dtype")
    return [(ir.DataType(dtype) if dtype is not None else source.dtype if source else None, dims_of(source))]


def _branches(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    graph = attributes["then_branch"]
    return [(v.dtype, dims_of(v)) for v in graph.outputs]


def _loop(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    body = attributes["body"]
    carried = len(inputs) - 2
    result: Result = []
    for position, value in enumerate(body.outputs[1:]):
        dims = dims_of(value)
        if position >= carried:
            dims = (None, *dims) if dims is not None else None
        result.append((value.dtype, dims))
    return result


def _scan(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    body = attributes["body"]
    states = len(inputs) - attributes["num_scan_inputs"]
    return [
        (v.dtype, dims_of(v) if i < states else ((None, *(dims_of(v) or ())) if dims_of(v) is not None else None))
        for i, v in enumerate(body.outputs)
    ]


def _recurrent(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    """LSTM, GRU and RNN, time first: every step's state, then the last one, and LSTM's cell."""
    x, weight = dims_of(inputs[0]), dims_of(inputs[2])
    if x is None or weight is None or attributes.get("layout", 0):
        return []
    last = (weight[0], x[1], weight[2])
    return [(None, (x[0], *last)), (None, last), (None, last)]


def _quantize(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    zero = inputs[2] if len(inputs) > 2 else None
    if zero is not None:
        return [(zero.dtype, dims_of(inputs[0]))]
    return [(ir.DataType(attributes.get("output_dtype", 0) or ir.DataType.UINT8), dims_of(inputs[0]))]


def _dequantize(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    scale = inputs[1]
    return [(scale.dtype if scale is not None else None, dims_of(inputs[0]))]


def _attention(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    query, value = dims_of(inputs[0]), dims_of(inputs[2])
    if query is None or value is None or len(query) != 4:
        return [(None, None)]
    return [(None, (*query[:3], value[3]))]


_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh CumSum Elu Erf Exp Floor Gelu "
    "HardSigmoid HardSwish Hardmax Identity IsInf IsNaN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu Round "
    "Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Trilu "
    "BatchNormalization InstanceNormalization GroupNormalization LpNormalization MeanVarianceNormalization LRN "
    "RMSNormalization ScatterElements ScatterND RotaryEmbedding ReverseSequence"
)
_BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or PRelu Pow Sub Sum Where Xor"
)
_REDUCE = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)

INFER: dict[str, Callable[[Inputs, Attributes, Any], Result]] = {
    **dict.fromkeys(_UNARY.split(), _same),
    **dict.fromkeys(_BROADCAST.split(), _elementwise),
    **dict.fromkeys(_REDUCE.split(), _reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), _arg_reduce),
    **dict.fromkeys(("Conv", "ConvTranspose", "AveragePool", "LpPool", "MaxPool"), _spatial),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), _global_pool),
    **dict.fromkeys(("RandomNormal", "RandomUniform"), _random),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike", "Bernoulli", "EyeLike"), _random_like),
    **dict.fromkeys(("DFT", "CenterCropPad"), _rank_kept),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), _depth_to_space),
    "Attention": _attention,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "DequantizeLinear": _dequantize,
    "Det": _det,
    "Dropout": _dropout,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _second,
    "GatherND": _gather_nd,
    "Gemm": _gemm,
    "GridSample": _grid_sample,
    "GRU": _recurrent,
    "If": _branches,
    "LayerNormalization": _layer_norm,
    "Loop": _loop,
    "LSTM": _recurrent,
    "MatMul": _matmul,
    "NonZero": _non_zero,
    "OneHot": _one_hot,
    "Pad": _pad,
    "QuantizeLinear": _quantize,
    "Range": _range,
    "RNN": _recurrent,
    "Reshape": _reshape,
    "Resize": _resize,
    "Scan": _scan,
    "Shape": _shape,
    "Size": _scalar,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top_k,
    "Transpose": _transpose,
    "Unique": _unique,
    "Unsqueeze": _unsqueeze,
}
