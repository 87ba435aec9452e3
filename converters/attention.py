"""Scaled dot-product attention."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import made_by, same_sizes
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dropout import randomly_dropped
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, HALVES, fits_attribute
from onnxplug.converters.helpers.fill import filled
from onnxplug.converters.helpers.fused_layers import FUSED
from onnxplug.converters.helpers.matrices import dtype_of
from onnxplug.converters.helpers.reductions import log_of_sum, reduce
from onnxplug.converters.helpers.results import wanted
from onnxplug.converters.helpers.runtimes import LEAST_BIAS_HIDES, has_kernel
from onnxplug.errors import Decline
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def scaled_dot_product_attention(g: GraphBuilder, node: FxNode) -> Value:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor

    query [..., L, E], key [..., S, E], value [..., S, Ev], mask broadcast to [..., L, S]: bool (true is seen) or added.
    Causal: query i sees keys 0 to i, also where L and S differ. The result of a row whose keys are all hidden is zero.
    """  # noqa: E501
    query, key, value, mask, dropout, causal, scale, gqa = node.args
    if gqa:
        key, value = (_repeat_heads(g, query, x) for x in (key, value))
    return _attend(g, query, key, value, mask, dropout, causal, scale)


def _attend(
    g: GraphBuilder,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Value:
    """The attention's result, [..., L, Ev]. A mask and ``causal`` exclude each other."""
    dtype = dtype_of(query)
    scores = _scores(g, query, key, scale)
    inner = dtype_of(scores)
    seen_rows = None
    if causal:
        weights = g.op.Softmax(g.op.Add(scores, _bias(g, _causal(g, query, key), inner)), axis=-1)
    elif mask is None:
        weights = g.op.Softmax(scores, axis=-1)
    elif mask.dtype == BOOL and rank_of(mask) > 2 and g.dim(mask, -3) != 1:
        weights = g.op.Softmax(g.op.Where(mask, scores, g.const(float("-inf"), inner)), axis=-1)
        # Hidden keys have weight 0, also in a row without a visible key, for which Softmax gives NaN.
        weights = g.op.Where(mask, weights, g.const(0.0, inner))
    else:
        bias, seen_rows = _bias_and_seen_rows(g, mask, inner)
        weights = g.op.Softmax(g.op.Add(scores, bias), axis=-1)
    weights = g.cast(weights, dtype)
    if dropout:
        weights = randomly_dropped(g, weights, dropout)[0]
    sharing = _sharing_heads(g, weights, value)
    if sharing is None:
        result = g.op.MatMul(weights, value)
    else:
        result = _apart(g, g.op.MatMul(sharing[0], sharing[1]), weights)
    return result if seen_rows is None else g.op.Mul(result, g.cast(seen_rows, dtype))


def _scores(g: GraphBuilder, query: Value, key: Value, scale: float | None) -> Value:
    """The scaled products of queries and keys, [..., L, S], in float where the operands are of a half type."""
    rank = rank_of(key)
    order = [*range(rank - 2), rank - 1, rank - 2]
    sharing = _sharing_heads(g, query, key)
    if sharing is None:
        scores = g.op.MatMul(_scaled(g, query, scale), g.op.Transpose(key, perm=order))
    else:
        rows, heads = sharing
        scores = _apart(g, g.op.MatMul(_scaled(g, rows, scale), g.op.Transpose(heads, perm=order)), query)
    return g.cast(scores, FLOAT) if query.dtype in HALVES else scores


def flash_attention_for_cpu(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)

    query [B, H, L, E], key and value [B, H or its divisor, S, E], a mask that is added, also together with ``is_causal``.
    logsumexp [B, H, L], of the masked scores, is 0 for a row whose keys are all hidden. There is no dropout: torch refuses it.
    Half types are computed in float, as in torch's kernel, and the logarithms stay float.
    """  # noqa: E501
    *operands, _, causal, mask, scale = node.args
    query, key, value = (g.cast(x, FLOAT) if x.dtype in HALVES else x for x in operands)
    if all(isinstance(g.dim(x, 1), int) for x in (query, key)):
        key, value = (_repeat_heads(g, query, x) for x in (key, value))
    scores = _scores(g, query, key, scale)
    dtype = dtype_of(scores)
    if mask is not None and causal:
        mask = g.op.Add(g.cast(mask, dtype), _bias(g, _causal(g, query, key), dtype))
        causal = False
    output = g.cast(_attend(g, query, key, value, mask, 0.0, causal, scale), dtype_of(operands[0]))
    seen_rows = None
    if causal:
        scores = g.op.Add(scores, _bias(g, _causal(g, query, key), dtype))
    elif mask is not None:
        bias, seen_rows = _bias_and_seen_rows(g, mask, dtype)
        scores = g.op.Add(scores, bias)
    total = log_of_sum(g, scores, [3], False)
    return [output, total if seen_rows is None else g.op.Mul(total, squeeze(g, seen_rows, rank_of(seen_rows) - 1))]


def flash_attention(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_scaled_dot_product_flash_attention(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)

    Unlike elsewhere the causal mask ends in the lower right corner: query i of L sees keys 0 to i + S - L. PyTorch takes this
    kernel where L and S differ for such a mask alone (torch.nn.attention.bias.causal_lower_right).
    """  # noqa: E501
    query, key, value, dropout, causal, _, scale = node.args
    mask = None
    if causal and list(query.shape or ())[-2:-1] != list(key.shape or ())[-2:-1]:
        later = g.op.Sub(g.as_scalar(g.dim(key, -2)), g.as_scalar(g.dim(query, -2)))
        mask, causal = _causal(g, query, key, later), False
    return _fused(g, node, query, key, value, mask, dropout, causal, scale)


def efficient_attention(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_scaled_dot_product_efficient_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, Tensor philox_offset)

    The logarithms are padded with infinity to a multiple of 32 queries, or left out.
    """  # noqa: E501
    query, key, value, mask, logarithms, dropout, causal, scale = node.args
    results = _fused(g, node, query, key, value, mask, dropout, causal, scale)
    total, (batch, heads, rows) = results[1], g.dims(query)[:3]
    if total is not None and not logarithms:
        results[1] = filled(g, 0.0, [batch, heads, 0], FLOAT)
    elif total is not None:
        short = g.op.Mod(g.op.Neg(g.as_vector(rows)), g.const([32]))
        pads = g.op.Concat(g.const([0] * 5), short, axis=0)
        results[1] = g.op.Pad(total, pads, g.const(math.inf, FLOAT))
    return results


def cudnn_attention(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_scaled_dot_product_cudnn_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)

    Its logarithms have a last axis of size 1.
    """  # noqa: E501
    query, key, value, mask, _, dropout, causal, _, scale = node.args
    results = _fused(g, node, query, key, value, mask, dropout, causal, scale)
    if results[1] is not None:
        results[1] = unsqueeze(g, results[1], 3)
    return results


def overrideable_attention(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)

    [B, H, L, E], or [H, L, E], whose logarithms have a batch of 1.
    """  # noqa: E501
    query, key, value, mask, dropout, causal, _, scale = node.args
    results = _fused(g, node, query, key, value, mask, dropout, causal, scale)
    if results[1] is not None and rank_of(query) == 3:
        results[1] = unsqueeze(g, results[1], 0)
    return results


def _fused(
    g: GraphBuilder,
    node: FxNode,
    query: Value,
    key: Value,
    value: Value,
    mask: Value | None,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> list[Value | None]:
    """The results of an attention on a GPU: the output, and where it is read the logarithms of the sums, [..., L] in float.

    They are infinite for a row that sees no key. Half types are computed in float, as these kernels accumulate.
    The other results (states of random numbers, results of varlen calls) have no meaning in ONNX: reading them is an error.
    """
    query, key, value = (g.cast(x, FLOAT) if x.dtype in HALVES else x for x in (query, key, value))
    if all(isinstance(g.dim(x, -3), int) for x in (query, key)):
        key, value = (_repeat_heads(g, query, x) for x in (key, value))
    if mask is not None and causal:
        dtype = dtype_of(query)
        bias = _bias(g, mask, dtype) if mask.dtype == BOOL else g.cast(mask, dtype)
        mask, causal = g.op.Add(bias, _bias(g, _causal(g, query, key), dtype)), False
    output = g.cast(_attend(g, query, key, value, mask, dropout, causal, scale), node.dtype)
    rest: list[Value | None] = [None] * (len(node.outputs) - 1)
    if wanted(node, 1):
        scores = g.cast(_scores(g, query, key, scale), FLOAT)
        if causal:
            scores = g.op.Add(scores, _bias(g, _causal(g, query, key), FLOAT))
        elif mask is not None:
            scores = g.op.Add(scores, _bias(g, mask, FLOAT) if mask.dtype == BOOL else g.cast(mask, FLOAT))
        total = log_of_sum(g, scores, [rank_of(scores) - 1], False)
        rest[0] = g.op.Where(g.op.Equal(total, g.const(-math.inf)), g.const(math.inf), total)
    return [output, *rest]


def attention(g: GraphBuilder, node: FxNode) -> Value:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor

    ONNX's Attention where it applies: four axes, no dropout, a mask that spans the keys. The result of a row whose keys
    are all hidden is zero, as in PyTorch.
    """  # noqa: E501
    query, key, value, mask, dropout, causal, scale, _ = node.args
    if any(rank_of(x) != 4 for x in (query, key, value)) or dropout:
        raise Decline("not four axes, or dropout")
    if not has_kernel(g, "Attention", query.dtype):
        raise Decline("a dtype that Attention has no kernel for")
    if not fits_attribute(query.dtype, scale if scale is not None else 1.0):
        raise Decline("a scale that is no float32")
    if scale is not None and not scale > 0:
        raise Decline("a scale whose root is no positive number, by which Attention multiplies queries and keys")
    heads, shared = g.dim(query, 1), g.dim(key, 1)
    if not isinstance(heads, int) or not isinstance(shared, int):
        raise Decline("a dynamic number of heads")
    if not shared or heads % shared or g.dim(value, 1) != shared:
        raise Decline("heads of queries, or of keys or values alone, that are broadcast")
    if not all(same_sizes((query.shape or ())[:1], (x.shape or ())[:1]) for x in (key, value)):
        raise Decline("a batch that is broadcast")
    if mask is not None:
        if rank_of(mask) not in (2, 4) or list(mask.shape or ())[-2:] != [query.shape[-2], key.shape[-2]]:
            raise Decline("a mask to be broadcast over queries or keys")
        mask = mask if mask.dtype == BOOL else _seen(g, g.cast(mask, query.dtype))
    return g.op.Attention(
        query, key, value, mask, is_causal=int(causal), scale=float(scale) if scale is not None else None
    )


def _seen(g: GraphBuilder, bias: Value) -> Value:
    """The bias of the scores, whose finite elements hide no key."""
    if not LEAST_BIAS_HIDES.concerns(g):
        return bias
    info = ml_dtypes.finfo(dtype_of(bias).numpy())
    least = g.const(float(info.min), bias.dtype)
    return g.op.Where(g.op.Equal(bias, least), g.const(float(np.nextafter(info.min, info.max)), bias.dtype), bias)


def _scaled(g: GraphBuilder, query: Value, scale: float | None) -> Value:
    """The query times the scale, which is 1/√E by default."""
    dtype = query.dtype
    assert dtype is not None
    if scale is None:
        size = g.dim(query, -1)
        if isinstance(size, int):
            scale = 1.0 / math.sqrt(size) if size else 1.0
        else:
            root = g.op.Sqrt(g.cast(size, DOUBLE if dtype == DOUBLE else FLOAT))
            return g.op.Div(query, g.cast(root, dtype))
    result = g.op.Mul(query, g.const(scale, dtype))
    return result


def _bias(g: GraphBuilder, seen: Value, dtype: ir.DataType) -> Value:
    """The mask as a bias added to the scores: 0 for visible keys, −inf for hidden keys."""
    return g.op.Where(seen, g.const(0.0, dtype), g.const(float("-inf"), dtype))


def _bias_and_seen_rows(g: GraphBuilder, mask: Value, dtype: ir.DataType) -> tuple[Value, Value]:
    """The bias of the scores, and [..., L, 1]: 1 for rows that see some key, 0 for others.

    Both depend only on the mask, so layers with the same mask share them. The bias of a row that sees no key has no −inf:
    the row's weights are finite, and the factor of 0 removes them afterwards.
    """
    last = rank_of(mask) - 1
    if mask.dtype == BOOL:
        some = g.op.Greater(reduce(g, "ReduceSum", _as_number(g, mask, dtype), [last], True), g.const(0.0, dtype))
        return _bias(g, g.op.Or(mask, g.op.Not(some)), dtype), _as_number(g, some, dtype)
    bias = g.cast(mask, dtype)
    hidden = g.op.Equal(reduce(g, "ReduceMax", bias, [last], True), g.const(float("-inf"), dtype))
    return g.op.Where(hidden, g.const(0.0, dtype), bias), _as_number(g, g.op.Not(hidden), dtype)


def _as_number(g: GraphBuilder, x: Value, dtype: ir.DataType) -> Value:
    """1 where a mask is true, else 0: tools that make a model's floats narrower leave the type that a Cast names as it is."""
    return g.op.Where(x, g.const(1.0, dtype), g.const(0.0, dtype))


def _causal(g: GraphBuilder, query: Value, key: Value, later: Value | None = None) -> Value:
    """[L, S]: whether query i sees key j: j <= i, or j <= i + ``later``."""
    rows = g.op.Range(g.const(0), g.as_scalar(g.dim(query, -2)), g.const(1))
    rows = rows if later is None else g.op.Add(rows, later)
    columns = g.op.Range(g.const(0), g.as_scalar(g.dim(key, -2)), g.const(1))
    return g.op.LessOrEqual(columns, unsqueeze(g, rows, 1))


def _sharing_heads(g: GraphBuilder, x: Value, repeated: Value) -> tuple[Value, Value] | None:
    """Queries or weights with the rows of heads that share a key's head in one matrix, and the unrepeated keys or values.

    x [B, G H, L, E] as [B, H, G L, E], ``repeated`` [B, G H, S, E] as [B, H, S, E]: nothing is copied then, and each matrix of
    keys or values goes into one product. ``None`` where heads are not shared.
    """
    reshape = made_by(repeated, "Reshape")
    expand = made_by(reshape.inputs[0], "Expand") if reshape is not None else None
    unsqueeze = made_by(expand.inputs[0], "Unsqueeze") if expand is not None else None
    heads = unsqueeze.inputs[0] if unsqueeze is not None else None
    if heads is None or expand is None or not g.optimize or rank_of(x) != 4:
        return None
    source, apart, wide, dims, after = (dims_of(v) for v in (heads, expand.inputs[0], expand.outputs[0], x, repeated))
    if source is None or apart is None or wide is None or dims is None or after is None:
        return None
    if len(source) != 4 or len(wide) != 5:
        return None
    batch, shared, *inner = source
    if not same_sizes(apart, [batch, shared, 1, *inner]):  # the repeated axis is another one
        return None
    groups, wanted = wide[2], dims[1]
    if not isinstance(groups, int) or not isinstance(shared, int) or wanted != groups * shared or groups < 2:
        return None
    if not same_sizes(wide, [batch, shared, groups, *inner]) or not same_sizes(after, [batch, wanted, *inner]):
        return None
    if not same_sizes(dims[:1], [batch]):
        return None
    rows = g.dim(x, 2)
    rows = rows * groups if isinstance(rows, int) else g.op.Mul(rows, g.const(groups))
    return g.reshape(x, [g.dim(x, 0), shared, rows, g.dim(x, 3)]), heads


def _apart(g: GraphBuilder, product: Value, x: Value) -> Value:
    """[B, H, G L, N] as [B, G H, L, N], as the heads of ``x`` are."""
    return g.reshape(product, [*g.dims(x)[:3], g.dim(product, 3)])


def _repeat_heads(g: GraphBuilder, query: Value, x: Value) -> Value:
    """Keys or values with each head repeated for the queries that share it: [B, H, S, E] to [B, G H, S, E]."""
    rank = rank_of(x)
    heads, wanted = g.concrete_shape([g.dim(x, -3), g.dim(query, -3)], "number of heads")
    if heads == wanted:
        return x
    groups = wanted // heads
    wide = unsqueeze(g, x, rank - 2)
    sizes: list[Any] = [1] * (rank + 1)
    sizes[rank - 2] = groups
    wide = g.op.Expand(wide, g.vector(sizes))
    shape: list[Any] = list(g.dims(x))
    shape[rank - 3] = wanted
    return g.reshape(wide, shape)


#: torch has no decomposition for them: the fast path of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` in evaluation.
DECOMPOSITIONS = {f"{name}.default": function for name, function in FUSED.items()}

RULES: list[Rule] = [
    Rule("aten::scaled_dot_product_attention.default", attention, opset=(23, None)),
    Rule("aten::scaled_dot_product_attention.default", scaled_dot_product_attention),
    Rule("aten::_scaled_dot_product_flash_attention_for_cpu.default", flash_attention_for_cpu),
    Rule("aten::_scaled_dot_product_flash_attention.default", flash_attention),
    Rule("aten::_scaled_dot_product_efficient_attention.default", efficient_attention),
    Rule("aten::_scaled_dot_product_cudnn_attention.default", cudnn_attention),
    Rule("aten::_scaled_dot_product_fused_attention_overrideable.default", overrideable_attention),
]
