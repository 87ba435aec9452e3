"""Rewrites of computations that models write out. All are for float: ONNX Runtime's CPU has no other kernels.

A rewrite takes a node and returns its replacement, or ``None``. The two rewrites of norms begin at the sum that both
the norm and the residual path read, and replace the sum and the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DOMAIN = "com.microsoft"
_FLOAT = 1  # onnx_ir.DataType.FLOAT, without importing it


def all_float(*values: Any) -> bool:
    """Whether all values are known to be float."""
    return all(v is not None and v.dtype is not None and int(v.dtype) == _FLOAT for v in values)


def made_by_op(value: Any, op_type: str, domain: str = "") -> Any:
    """The producer of a value, if it is this operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def _rank(value: Any) -> int | None:
    return None if value.shape is None else len(value.shape)


def _alone(value: Any) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()


def scalar(g: Any, value: Any) -> float | None:
    """The number of a constant without axes; ``None`` for other values."""
    array = g.constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.ndim == 0 else None


def _int_attribute(node: Any, name: str, default: int) -> int:
    return int(node.attributes[name].value) if name in node.attributes else default


def _swaps_last(node: Any) -> bool:
    """Whether a Transpose swaps the last two axes and no others."""
    if node is None or "perm" not in node.attributes:
        return False
    perm = list(node.attributes["perm"].value)
    rank = len(perm)
    return rank >= 2 and perm == [*range(rank - 2), rank - 1, rank - 2]


def fused_matmul(g: Any, node: Any) -> Any:
    """``MatMul(a, Transpose(b))``, on either side: ``FusedMatMul(a, b, transB=1)``."""
    inputs, flags = list(node.inputs), [0, 0]
    # onnxplug computes only the gathered columns of a product that GatherElements reads.
    if any(reader.op_type == "GatherElements" for reader in node.outputs[0].consumers()):
        return None
    if not all_float(*inputs) or any((_rank(v) or 0) < 2 for v in inputs):
        return None
    for side, value in enumerate(inputs):
        producer = made_by_op(value, "Transpose")
        if _swaps_last(producer) and _alone(value):
            inputs[side], flags[side] = producer.inputs[0], 1
    if not any(flags):
        return None
    return g.domain(_DOMAIN).FusedMatMul(*inputs, transA=flags[0], transB=flags[1])


def scaled_matmul(g: Any, node: Any) -> Any:
    """``MatMul(a, b) * c`` or ``/ c`` with a constant: the factor of a FusedMatMul."""
    pairs = [node.inputs] if node.op_type == "Div" else [node.inputs, node.inputs[::-1]]
    for product, factor in pairs:
        number = scalar(g, factor)
        producer = made_by_op(product, "MatMul") or made_by_op(product, "FusedMatMul", _DOMAIN)
        if number is None or not number or producer is None or not _alone(product) or not all_float(product):
            continue
        if any((_rank(v) or 0) < 2 for v in producer.inputs):
            continue
        alpha = float(producer.attributes["alpha"].value) if "alpha" in producer.attributes else 1.0
        return g.domain(_DOMAIN).FusedMatMul(
            *producer.inputs,
            transA=_int_attribute(producer, "transA", 0),
            transB=_int_attribute(producer, "transB", 0),
            alpha=alpha / number if node.op_type == "Div" else alpha * number,
        )
    return None


def _sum_with_bias(node: Any) -> tuple[Any, Any] | None:
    """The tensor and the bias of the sum that a node reads, if one operand is a vector along the last axis."""
    total = node.inputs[0]
    producer = made_by_op(total, "Add")
    if producer is None or not _alone(total) or not all_float(*producer.inputs) or total.shape is None:
        return None
    for x, bias in (producer.inputs, producer.inputs[::-1]):
        fits = _rank(bias) == 1 and isinstance(bias.shape[0], int) and bias.shape[0] == total.shape[-1]
        if fits and _rank(x) == len(total.shape) and x.shape[-1] == total.shape[-1]:
            return x, bias
    return None


def bias_gelu(g: Any, node: Any) -> Any:
    """``Gelu(x + bias)``: BiasGelu."""
    operands = _sum_with_bias(node)
    approximate = node.attributes.get("approximate")
    if operands is None or (approximate is not None and approximate.value != "none"):
        return None
    return g.domain(_DOMAIN).BiasGelu(*operands)


def bias_fast_gelu(g: Any, node: Any) -> Any:
    """``FastGelu(x + bias)``: FastGelu with a bias."""
    operands = _sum_with_bias(node) if len(node.inputs) == 1 else None
    return None if operands is None else g.domain(_DOMAIN).FastGelu(*operands)


def _skippable(node: Any) -> bool:
    """Whether the operands of a sum are different values of one shape, batch by row by feature."""
    a, b = node.inputs
    if not all_float(a, b) or _rank(a) != 3 or _rank(b) != 3 or a is b:
        return False
    return all(
        x == y if isinstance(x, int) or isinstance(y, int) else x.value is not None and x.value == y.value
        for x, y in zip(a.shape, b.shape, strict=True)
    )


def _parameter(value: Any) -> bool:
    """Whether a value has no producer, so that a node that reads it may move up in the graph."""
    return value is not None and value.producer() is None


def skip_layer_normalization(g: Any, node: Any) -> Any:
    """``LayerNormalization(x + skip)``: SkipLayerNormalization, which gives the sum to its other readers."""
    if not _skippable(node):
        return None
    total = node.outputs[0]
    for norm in total.consumers():
        if norm.op_type != "LayerNormalization" or norm.domain or norm.inputs[0] is not total:
            continue
        if norm.graph is not node.graph:  # a branch or a body: a node replaces values of its own graph alone
            continue
        scale, bias = norm.inputs[1], norm.inputs[2] if len(norm.inputs) > 2 else None
        if _int_attribute(norm, "axis", -1) not in (-1, 2) or len(norm.outputs) > 1:
            continue
        if not _parameter(scale) or (bias is not None and not _parameter(bias)) or _rank(scale) != 1:
            continue
        epsilon = float(norm.attributes["epsilon"].value) if "epsilon" in norm.attributes else 1e-5
        return _skipped(g, "SkipLayerNormalization", [*node.inputs, scale, bias], epsilon, total, norm.outputs[0])
    return None


def _skipped(g: Any, op_type: str, operands: Sequence[Any], epsilon: float, total: Any, normal: Any) -> dict[Any, Any]:
    """The node of a sum and its norm, in place of both.

    Mean and deviation have no name: ONNX Runtime allocates no memory for them.
    """
    operator = getattr(g.domain(_DOMAIN), op_type)
    result, mean, deviation, kept = operator(*operands, epsilon=epsilon, _outputs=4)
    mean.name = deviation.name = ""
    return {total: kept, normal: result}


def _only_consumer(value: Any, op_type: str) -> Any:
    """The only reader of a node's output, if it is this operator in the same graph."""
    if not _alone(value):
        return None
    (node,) = value.consumers()
    return node if node.op_type == op_type and not node.domain and node.graph is value.producer().graph else None


def _other(node: Any, value: Any) -> Any:
    """The other input of a node with two inputs."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _root_mean_square(g: Any, x: Any) -> tuple[list[Any], Any, float] | None:
    """The nodes that norm ``x`` by its root mean square (the last first), the weight and epsilon."""
    for square in x.consumers():
        if square.op_type != "Mul" or square.domain or square.inputs[0] is not x or square.inputs[1] is not x:
            continue
        if square.graph is not x.producer().graph:
            continue
        mean = _only_consumer(square.outputs[0], "ReduceMean")
        axes = g.constant(mean.inputs[1]) if mean is not None and len(mean.inputs) > 1 else None
        if axes is None and mean is not None and "axes" in mean.attributes:
            axes = mean.attributes["axes"].value
        if mean is None or axes is None or list(axes) not in ([-1], [2]) or not _int_attribute(mean, "keepdims", 1):
            continue
        add = _only_consumer(mean.outputs[0], "Add")
        epsilon = scalar(g, _other(add, mean.outputs[0])) if add is not None else None
        root = _only_consumer(add.outputs[0], "Sqrt") if epsilon is not None else None
        inverse = _only_consumer(root.outputs[0], "Reciprocal") if root is not None else None
        normal = _only_consumer(inverse.outputs[0], "Mul") if inverse is not None else None
        if inverse is None or normal is None or _other(normal, inverse.outputs[0]) is not x:
            continue
        scaled = _only_consumer(normal.outputs[0], "Mul")
        weight = _other(scaled, normal.outputs[0]) if scaled is not None else None
        if weight is None or not _parameter(weight) or _rank(weight) != 1 or weight.shape[0] != x.shape[-1]:
            continue
        assert epsilon is not None
        return [scaled, normal, inverse, root, add, mean, square], weight, epsilon
    return None


def skip_simplified_layer_normalization(g: Any, node: Any) -> Any:
    """``x + skip`` normed by its root mean square, as Llama writes it: SkipSimplifiedLayerNormalization."""
    if not _skippable(node):
        return None
    norm = _root_mean_square(g, node.outputs[0])
    if norm is None:
        return None
    chain, weight, epsilon = norm
    operands = [*node.inputs, weight]
    return _skipped(g, "SkipSimplifiedLayerNormalization", operands, epsilon, node.outputs[0], chain[0].outputs[0])


def skip_simplified_layer_normalization_of_decoders(g: Any, node: Any) -> Any:
    """:func:`skip_simplified_layer_normalization` in a model whose attention has a cache in its operator.

    Such a model mostly computes one token.

    Measured with ONNX Runtime 1.31 and 4 bits, 8 layers of 512: a token takes 3 % less time, a prompt of 128 tokens 0.6 % more.
    """
    if not any(_has_cache(other) for other in node.graph or ()):
        return None
    return skip_simplified_layer_normalization(g, node)


def _has_cache(node: Any) -> bool:
    return node.op_type == "GroupQueryAttention" and len(node.inputs) > 3 and node.inputs[3] is not None


def _half(g: Any, value: Any) -> tuple[Any, int, int] | None:
    """The tensor that a Slice along the last axis cuts, and the Slice's start and end."""
    producer = made_by_op(value, "Slice")
    if producer is None or len(producer.inputs) < 4 or producer.inputs[0].shape is None:
        return None
    source = producer.inputs[0]
    start, end, axes = (g.constant(v) for v in producer.inputs[1:4])
    step = g.constant(producer.inputs[4]) if len(producer.inputs) > 4 else None
    size = source.shape[-1]
    if any(v is None or v.size != 1 for v in (start, end, axes)) or (step is not None and step.tolist() != [1]):
        return None
    if int(axes[0]) not in (-1, len(source.shape) - 1) or not isinstance(size, int):
        return None
    return source, int(start[0]), min(int(end[0]), size)


def _rotated(g: Any, value: Any) -> Any:
    """The ``x`` of a ``value`` that is ``Concat(-x[..., half:], x[..., :half])``."""
    producer = made_by_op(value, "Concat")
    if (
        producer is None
        or len(producer.inputs) != 2
        or _int_attribute(producer, "axis", 0) not in (-1, (_rank(value) or 0) - 1)
    ):
        return None
    negated = made_by_op(producer.inputs[0], "Neg")
    high = _half(g, negated.inputs[0]) if negated is not None else None
    low = _half(g, producer.inputs[1])
    if high is None or low is None or high[0] is not low[0]:
        return None
    size = high[0].shape[-1]
    return high[0] if high[1:] == (size // 2, size) and low[1:] == (0, size // 2) and size % 2 == 0 else None


def _table(g: Any, value: Any, operation: str) -> Any:
    """The first half of a table ``Unsqueeze(Cos(f, f))``: [S, E / 2] of [1, 1, S, E], [B S, E / 2] of [B, 1, S, E]."""
    shape = value.shape
    if shape is None or len(shape) != 4 or shape[1] != 1:  # equal for every head
        return None
    if g.constant(value) is not None:
        half = _first_half(g, value)
        return None if half is None else g.op.Reshape(half, g.const([-1, half.shape[-1]]))
    producer = made_by_op(value, "Unsqueeze")
    wave = made_by_op(producer.inputs[0] if producer is not None else value, operation)
    angles = _first_half(g, wave.inputs[0]) if wave is not None else None
    if angles is None or not isinstance(angles.shape[-1], int):
        return None
    return getattr(g.op, operation)(g.op.Reshape(angles, g.const([-1, angles.shape[-1]])))


def _first_half(g: Any, value: Any) -> Any:
    """The first half of a tensor whose halves along the last axis are equal."""
    known = g.constant(value)
    if known is not None:
        half = known.shape[-1] // 2 if known.ndim else 0
        same = half > 0 and known.shape[-1] == 2 * half and (known[..., :half] == known[..., half:]).all()
        return g.const(known[..., :half].copy()) if same else None
    producer = made_by_op(value, "Concat")
    if producer is None or len(producer.inputs) != 2 or producer.inputs[0] is not producer.inputs[1]:
        return None
    return producer.inputs[0] if _int_attribute(producer, "axis", 0) in (-1, (_rank(value) or 0) - 1) else None


def rotary_embedding(g: Any, node: Any) -> Any:
    """``x * cos + rotated(x) * sin`` on [B, H, S, E], as Llama writes it.

    It moves before a Transpose from [B, S, H, E]: the operator takes [B, S, H E] too, and is faster there.
    """
    products = [made_by_op(v, "Mul") for v in node.inputs]
    if any(p is None for p in products) or not all_float(node.outputs[0]) or _rank(node.outputs[0]) != 4:
        return None
    for plain, turned in (products, products[::-1]):
        for rotated, sine in (turned.inputs, turned.inputs[::-1]):
            x = _rotated(g, rotated)
            if x is None or not any(v is x for v in plain.inputs):
                continue
            cosine = _other(plain, x)
            tables = [_table(g, cosine, "Cos"), _table(g, sine, "Sin")]
            if _rank(x) != 4 or any(t is None for t in tables):
                continue
            places = _places(g, x, cosine, sine)
            if places is not None:
                return _turned(g, x, tables, places)
    return None


def _places(g: Any, x: Any, cosine: Any, sine: Any) -> Any:
    """The position of the first token, or positions [B, S] where each row of the batch has positions of its own."""
    if not all(_known_same(table.shape[2], x.shape[2]) for table in (cosine, sine)):
        return None
    if cosine.shape[0] == 1 and sine.shape[0] == 1:
        return g.const([0])
    if not all(_known_same(table.shape[0], x.shape[0]) for table in (cosine, sine)):
        return None
    rows, steps = g.as_scalar(g.dim(x, 0)), g.as_scalar(g.dim(x, 2))
    return g.op.Reshape(g.op.Range(0, g.op.Mul(rows, steps), 1), g.vector([g.dim(x, 0), g.dim(x, 2)]))


def _known_same(left: Any, right: Any) -> bool:
    """Whether two dimensions are known to be equal; unknown dimensions are not."""
    return bool(left == right) and (isinstance(left, int) or left.value is not None)


def _turned(g: Any, x: Any, tables: list[Any], places: Any) -> Any:
    """RotaryEmbedding of [B, H, S, E]."""
    transpose = made_by_op(x, "Transpose")
    _, heads, _, size = x.shape
    before = transpose is not None and "perm" in transpose.attributes and isinstance(heads, int)
    if not before or list(transpose.attributes["perm"].value) != [0, 2, 1, 3] or 0 in (heads, size):
        return g.domain(_DOMAIN).RotaryEmbedding(x, places, *tables)
    rows = g.op.Reshape(transpose.inputs[0], g.const([0, 0, heads * size]))
    turned = g.domain(_DOMAIN).RotaryEmbedding(rows, places, *tables, num_heads=heads)
    turned.type, turned.shape = rows.type, rows.shape
    return g.op.Transpose(g.op.Reshape(turned, g.const([0, 0, heads, size])), perm=[0, 2, 1, 3])
