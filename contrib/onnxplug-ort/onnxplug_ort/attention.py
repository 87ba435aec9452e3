"""Rewrites to ONNX Runtime's operators of attention: attention written out, and self-attention with its projections.

B: batch, L: queries, S: keys, H: heads, E: size of a head, D: size of a row before it is projected.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import onnx_ir as ir

from onnxplug.build.matching import attribute_values, int_attribute, made_by, same_size, same_sizes, used_once
from onnxplug.registry.target import is_onnxruntime_cpu
from onnxplug_ort import DOMAIN
from onnxplug_ort.rewrites import all_float, made_by_op, scalar


class _Scores(NamedTuple):
    """The operands of scores: queries [B, L, H, E], keys [B, S, H, E], and the factor of their products."""

    queries: Any
    keys: Any
    scale: float


def written_out_attention(g: Any, node: Any) -> Any:
    """``Softmax(q kᵀ * scale + bias) v`` of heads, brought to rows [B, L, H E]: MultiHeadAttention.

    The match begins at the Reshape that joins the heads' results. Queries, keys and values must be transposed from rows
    [B, L, H, E], so that the operator copies no more than the plain form.
    """
    product = _exchanged(node.inputs[0], "MatMul")
    softmax = made_by(product.inputs[0], "Softmax") if product is not None else None
    values = _rows_of_heads(product.inputs[1]) if softmax is not None else None
    if (
        softmax is None
        or values is None
        or not used_once(softmax.outputs[0])
        or int_attribute(softmax, "axis", -1) not in (-1, 3)
    ):
        return None
    scores, bias = _scores_and_bias(g, softmax.inputs[0])
    if scores is None or not scores.scale or not all_float(*scores[:2], values, *([] if bias is None else [bias])):
        return None
    batch, length, heads, size = scores.queries.shape
    if not isinstance(heads, int) or not isinstance(size, int) or 0 in (heads, size):
        return None
    keys = scores.keys.shape[1]
    of_keys = [batch, keys, heads, size]
    if not same_sizes(scores.keys.shape, of_keys) or not same_sizes(values.shape, of_keys):
        return None
    if node.outputs[0].shape is None or not same_sizes(node.outputs[0].shape, [batch, length, heads * size]):
        return None
    if bias is not None and not _is_bias(bias, batch, heads, length, keys):
        return None
    rows = [_beside(g, x, heads * size) for x in (scores.queries, scores.keys, values)]
    return g.domain(DOMAIN).MultiHeadAttention(
        *rows, None, None, bias, num_heads=heads, unidirectional=0, scale=scores.scale
    )


def _beside(g: Any, x: Any, width: int) -> Any:
    """[B, S, H, E] as [B, S, H E]."""
    result = g.op.Reshape(x, g.const([0, 0, width]))
    wanted = [x.shape[0], x.shape[1], width]
    if result.shape is None or not same_sizes(result.shape, wanted):
        # Two Reshapes became a Reshape whose sizes are known at run time.
        result.shape = ir.Shape(wanted)
    return result


def _is_bias(bias: Any, batch: Any, heads: int, length: Any, keys: Any) -> bool:
    """Whether a bias is [B or 1, H or 1, L, S]: the operator repeats it along the first two axes alone."""
    shape = bias.shape
    if shape is None or len(shape) != 4 or not same_sizes(shape[2:], [length, keys]):
        return False
    return (shape[0] == 1 or same_size(shape[0], batch)) and shape[1] in (1, heads)


def _exchanged(value: Any, op_type: str) -> Any:
    """The node of this type whose result [B, H, L, E] a Transpose brings to ``value``; both have a single reader."""
    transpose = _of_perm(value, [0, 2, 1, 3])
    if transpose is None or not used_once(value) or not used_once(transpose.inputs[0]):
        return None
    return made_by(transpose.inputs[0], op_type)


def _of_perm(value: Any, perm: list[int]) -> Any:
    node = made_by(value, "Transpose")
    return (
        node if node is not None and "perm" in node.attributes and list(node.attributes["perm"].value) == perm else None
    )


def _has_rank(value: Any, rank: int) -> bool:
    return value is not None and value.shape is not None and len(value.shape) == rank


def _rows_of_heads(value: Any) -> Any:
    """[B, S, H, E], which a Transpose brings to ``value``, [B, H, S, E]."""
    node = _of_perm(value, [0, 2, 1, 3])
    rows = node.inputs[0] if node is not None else None
    return rows if _has_rank(rows, 4) else None


def _scores_and_bias(g: Any, value: Any) -> tuple[_Scores | None, Any]:
    """The operands of the scores, and the bias that is added to them."""
    parts = _scores(g, value)
    total = made_by(value, "Add")
    if parts is not None or total is None or not used_once(value):
        return parts, None
    for scores, bias in (total.inputs, total.inputs[::-1]):
        parts = _scores(g, scores)
        if parts is not None:
            return parts, bias
    return None, None


def _scores(g: Any, value: Any, scale: float = 1.0) -> _Scores | None:
    """The queries and keys of ``q kᵀ`` by MatMul or FusedMatMul, multiplied or divided by numbers."""
    if value is None or not used_once(value):
        return None
    factor, inner = _factor(g, value)
    if inner is not None:
        return _scores(g, inner, scale * factor)
    product = made_by(value, "MatMul") or made_by_op(value, "FusedMatMul", DOMAIN)
    if product is None or any(int_attribute(product, f, 0) for f in ("transA", "transBatchA", "transBatchB")):
        return None
    if int_attribute(product, "transB", 0):
        keys = _rows_of_heads(product.inputs[1])
    else:
        transpose = _of_perm(product.inputs[1], [0, 2, 3, 1])
        keys = transpose.inputs[0] if transpose is not None else None
    queries, factor = _scaled_rows(g, product.inputs[0])
    factor *= float(product.attributes["alpha"].value) if "alpha" in product.attributes else 1.0
    if queries is None or not _has_rank(keys, 4):
        return None
    return _Scores(queries, keys, scale * factor)


def _factor(g: Any, value: Any) -> tuple[float, Any]:
    """The number that a value is last multiplied by, and the other factor; 1 and ``None`` without such a number."""
    node = made_by(value, "Mul", "Div")
    if node is None:
        return 1.0, None
    pairs = [node.inputs] if node.op_type == "Div" else [node.inputs, node.inputs[::-1]]
    for inner, number in pairs:
        factor = scalar(g, number)
        if factor:
            return (1.0 / factor if node.op_type == "Div" else factor), inner
    return 1.0, None


def _scaled_rows(g: Any, value: Any) -> tuple[Any, float]:
    """The rows [B, L, H, E] of queries [B, H, L, E], and the number that multiplies them."""
    factor, inner = _factor(g, value)
    if inner is None or not used_once(value):
        return _rows_of_heads(value), 1.0
    return _rows_of_heads(inner), factor


class _Projection(NamedTuple):
    """``rows @ weight + bias``: [B, S, D], [D, H E], [H E] or ``None``."""

    rows: Any
    weight: Any
    bias: Any


def self_attention(g: Any, node: Any) -> Any:
    """MultiHeadAttention of three projections of the same rows: Attention, which computes the projections, too.

    The operator writes each head's part of a product where the head is read, without another copy. ONNX Runtime joins
    the weights when it loads the model. Its kernel reads the bias of the projections even where it is absent (1.31), so
    the operator always gets a bias.

    It is for the CPU, and for attention with a causal mask or a bias. Without either, MultiHeadAttention takes ONNX
    Runtime's flash attention, and vit_tiny takes 1 % less time than with Attention; gpt2 and t5 take 1 to 2 % less with
    Attention (1.31, one thread).
    """
    parts, others = list(node.inputs[:3]), list(node.inputs[3:])
    bias = others.pop(2) if len(others) > 2 else None
    if not is_onnxruntime_cpu(g.runtime) or (bias is None and not int_attribute(node, "unidirectional", 0)):
        return None
    if len(parts) != 3 or any(v is not None for v in others) or not all(used_once(v) for v in parts):
        return None
    whole = _split_projection(g, parts)
    if whole is not None:
        joint = whole.bias if whole.bias is not None else g.const([0.0] * whole.weight.shape[1])
        return g.domain(DOMAIN).Attention(whole.rows, whole.weight, joint, None, None, bias, **attribute_values(node))
    projections = [p for v in parts if (p := _projection(g, v)) is not None]
    if len(projections) != 3 or any(p.rows is not projections[0].rows for p in projections):
        return None
    width = projections[0].weight.shape[1]
    if any(p.weight.shape[1] != width for p in projections):
        return None
    zeros = g.const([0.0] * width)
    weights = g.op.Concat(*(p.weight for p in projections), axis=1)
    biases = g.op.Concat(*(zeros if p.bias is None else p.bias for p in projections), axis=0)
    return g.domain(DOMAIN).Attention(projections[0].rows, weights, biases, None, None, bias, **attribute_values(node))


def _split_projection(g: Any, parts: Any) -> _Projection | None:
    """The projection whose columns a Split divides into queries, keys and values of equal width, in this order."""
    split = made_by(parts[0], "Split")
    if split is None or list(split.outputs) != parts or not used_once(split.inputs[0]):
        return None
    if int_attribute(split, "axis", 0) not in (-1, 2) or len({v.shape[2] for v in parts if _has_rank(v, 3)}) != 1:
        return None
    return _projection(g, split.inputs[0]) if all(_has_rank(v, 3) for v in parts) else None


def _projection(g: Any, value: Any) -> _Projection | None:
    """The projection of rows to [B, S, H E]: a Gemm between two Reshapes, or a MatMul, with or without a bias."""
    gemm = made_by(value.producer().inputs[0], "Gemm") if made_by(value, "Reshape") is not None else None
    if gemm is not None:
        return _gemm(g, value, gemm)
    total = made_by(value, "Add")
    if total is None:
        return _matmul(g, value, None)
    for product, bias in (total.inputs, total.inputs[::-1]):
        projection = _matmul(g, product, bias) if used_once(product) else None
        if projection is not None:
            return projection
    return None


def _matmul(g: Any, value: Any, bias: Any) -> _Projection | None:
    product = made_by(value, "MatMul")
    if product is None or not _has_rank(product.inputs[0], 3):
        return None
    rows, weight = product.inputs
    return _checked(g, _Projection(rows, weight, bias))


def _gemm(g: Any, value: Any, gemm: Any) -> _Projection | None:
    """The projection by a Gemm of [B S, D], whose result ``value`` is brought to [B, S, H E]."""
    flat = made_by(gemm.inputs[0], "Reshape")
    rows: Any = flat.inputs[0] if flat is not None else None
    scaled = any(name in gemm.attributes and gemm.attributes[name].value != 1 for name in ("alpha", "beta"))
    if not _has_rank(rows, 3) or not _has_rank(value, 3) or not used_once(gemm.outputs[0]):
        return None
    if scaled or int_attribute(gemm, "transA", 0) or not same_sizes(rows.shape[:2], value.shape[:2]):
        return None
    weight, *bias = gemm.inputs[1:]
    if _has_rank(weight, 2) and int_attribute(gemm, "transB", 0):
        if not _is_stored(g, weight):
            return None
        weight = g.op.Transpose(weight, perm=[1, 0])
    projection = _checked(g, _Projection(rows, weight, bias[0] if bias else None))
    return projection if projection is not None and value.shape[2] == weight.shape[1] else None


def _checked(g: Any, projection: _Projection) -> _Projection | None:
    """The projection, if its weight and bias are weights or constants and fit its rows."""
    weight, bias = projection.weight, projection.bias
    if not _has_rank(weight, 2) or not all_float(projection.rows, weight):
        return None
    size, width = weight.shape
    if not isinstance(size, int) or not isinstance(width, int) or not same_size(projection.rows.shape[2], size):
        return None
    if bias is not None and not (_has_rank(bias, 1) and bias.shape[0] == width and _is_stored(g, bias)):
        return None
    return projection if _is_stored(g, weight) else None


def _is_stored(g: Any, value: Any) -> bool:
    """Whether a value is a weight or a constant, or a Transpose of either."""
    transpose = made_by(value, "Transpose")
    source = transpose.inputs[0] if transpose is not None else value
    return g.is_weight(source) or g.constant(source) is not None
