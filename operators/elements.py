"""Result shapes of operators that compute: elementwise operators, products, reductions, sorting, quantization, random numbers."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxplug.build.inference.dims import Attributes, Dim, Dims, Inputs, Result, axes_of, broadcast, dims_of, known


def same(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, dims_of(inputs[0]))]


def rank_kept(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, None if dims is None else (None,) * len(dims))]


def det(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, None if dims is None else dims[:-2])]


def einsum(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    """A letter's size; an operand may have 1 there, which onnx's own inference takes for the size."""
    left, arrow, right = attributes["equation"].replace(" ", "").partition("->")
    if not arrow or "." in left:
        return [(None, None)]
    sizes: dict[str, Dim] = {}
    for term, value in zip(left.split(","), inputs, strict=True):
        dims = dims_of(value)
        if dims is None or len(dims) != len(term):
            return [(None, (None,) * len(right))]
        for letter, dim in zip(term, dims, strict=True):
            (sizes[letter],) = broadcast([(sizes.get(letter, 1),), (dim,)]) or (None,)
    return [(None, tuple(sizes[letter] for letter in right))]


def elementwise(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, broadcast([dims_of(v) for v in inputs if v is not None]))]


def cast(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(ir.DataType(attributes["to"]), dims_of(inputs[0]))]


def cast_like(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    like = inputs[1]
    return [(like.dtype if like is not None else None, dims_of(inputs[0]))]


def matmul(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    a, b = dims_of(inputs[0]), dims_of(inputs[1])
    if a is None or b is None or not a or not b:
        return [(None, None)]
    batch = broadcast([a[:-2], b[:-2]]) if len(a) > 2 or len(b) > 2 else ()
    if batch is None:
        return [(None, None)]
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return [(None, (*batch, *rows, *columns))]


def gemm(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    a, b = dims_of(inputs[0]), dims_of(inputs[1])
    if a is None or b is None:
        return [(None, None)]
    return [(None, (a[1] if attributes.get("transA") else a[0], b[0] if attributes.get("transB") else b[1]))]


def reduce(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    axes = axes_of(inputs, attributes, len(dims))
    if axes is None:
        return [(None, (None,) * len(dims) if attributes.get("keepdims", 1) else None)]
    if not axes:
        if attributes.get("noop_with_empty_axes"):
            return [(None, dims)]
        axes = list(range(len(dims)))
    if attributes.get("keepdims", 1):
        return [(None, tuple(1 if i in axes else d for i, d in enumerate(dims)))]
    return [(None, tuple(d for i, d in enumerate(dims) if i not in axes))]


def arg_reduce(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    axis = attributes.get("axis", 0) % max(len(dims), 1)
    if attributes.get("keepdims", 1):
        return [(None, tuple(1 if i == axis else d for i, d in enumerate(dims)))]
    return [(None, tuple(d for i, d in enumerate(dims) if i != axis))]


def shape(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, (None,))]
    return [(None, (len(range(*slice(attributes.get("start", 0), attributes.get("end")).indices(len(dims)))),))]


def scalar(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, ())]


def constant_of_shape(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    value = attributes.get("value")
    dtype = value.dtype if value is not None else ir.DataType.FLOAT
    target = known(inputs[0])
    if target is not None:
        return [(dtype, tuple(target))]
    shape = dims_of(inputs[0])
    return [(dtype, (None,) * shape[0] if shape and isinstance(shape[0], int) else None)]


def range_(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    values = [known(v) for v in inputs]
    if all(v is not None for v in values):
        start, limit, delta = (v[0] for v in values if v is not None)
        return [(None, (max(0, -(-(limit - start) // delta)),))]
    return [(None, (None,))]


def layer_norm(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    stash = ir.DataType(attributes.get("stash_type", 1))
    return [(None, dims), (stash, None), (stash, None)]


def one_hot(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, depth = dims_of(inputs[0]), known(inputs[1])
    values = inputs[2]
    dtype = values.dtype if values is not None else None
    if dims is None:
        return [(dtype, None)]
    axis = attributes.get("axis", -1) % (len(dims) + 1)
    return [(dtype, (*dims[:axis], depth[0] if depth else None, *dims[axis:]))]


def top_k(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, k = dims_of(inputs[0]), known(inputs[1])
    if dims is None or not dims:
        return [(None, None), (ir.DataType.INT64, None)]
    axis = attributes.get("axis", -1) % len(dims)
    out = (*dims[:axis], k[0] if k else None, *dims[axis + 1 :])
    return [(None, out), (ir.DataType.INT64, out)]


def dropout(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, dims_of(inputs[0])), (ir.DataType.BOOL, dims_of(inputs[0]))]


def unique(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    x = inputs[0]
    dims = dims_of(x)
    axis = attributes.get("axis")
    if axis is None:
        values: Dims = (None,)
    else:
        values = None if dims is None else tuple(None if a == axis % len(dims) else d for a, d in enumerate(dims))
    indices = (ir.DataType.INT64, (None,))
    return [(x.dtype if x is not None else None, values), indices, indices, indices]


def non_zero(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, (len(dims) if dims is not None else None, None))]


def random(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(ir.DataType(attributes.get("dtype", 1)), tuple(attributes["shape"]))]


def random_like(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    source = inputs[0]
    dtype = attributes.get("dtype")
    return [(ir.DataType(dtype) if dtype is not None else source.dtype if source else None, dims_of(source))]


def recurrent(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    """LSTM, GRU and RNN, time first: every step's state, then the last one, and LSTM's cell."""
    x, weight = dims_of(inputs[0]), dims_of(inputs[2])
    if x is None or weight is None or attributes.get("layout", 0):
        return []
    last = (weight[0], x[1], weight[2])
    return [(None, (x[0], *last)), (None, last), (None, last)]


def quantize(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    zero = inputs[2] if len(inputs) > 2 else None
    if zero is not None:
        return [(zero.dtype, dims_of(inputs[0]))]
    return [(ir.DataType(attributes.get("output_dtype", 0) or ir.DataType.UINT8), dims_of(inputs[0]))]


def dequantize(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    scale = inputs[1]
    return [(scale.dtype if scale is not None else None, dims_of(inputs[0]))]


def attention(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    query, value = dims_of(inputs[0]), dims_of(inputs[2])
    if query is None or value is None or len(query) != 4:
        return [(None, None)]
    return [(None, (*query[:3], value[3]))]
