"""Rules for whole operators. ONNX Runtime's CPU has these kernels for float alone."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxplug import Decline
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.registry.target import is_onnxruntime_cpu

_DOMAIN = "com.microsoft"
_FLOAT = ir.DataType.FLOAT


def gelu(g: Any, node: Any) -> Any:
    """gelu(Tensor self, *, str approximate="none") -> Tensor

    The exact form is in ai.onnx from opset 20 on.
    """
    x, approximate = node.args
    if x.dtype != _FLOAT:
        raise Decline(f"{x.dtype}: the kernels are for float")
    if approximate == "tanh":
        if not x.shape:
            raise Decline("FastGelu takes tensors that have axes")
        return g.domain(_DOMAIN).FastGelu(x)
    if g.opset >= 20:
        raise Decline("ai.onnx has Gelu")
    return g.domain(_DOMAIN).Gelu(x)


def multi_head_attention(g: Any, node: Any) -> Any:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor

    MultiHeadAttention takes queries as [B, L, H E], keys and values as [B, S, H E] or as [B, H, S, E]. Its causal mask
    ends at the last key where torch's begins at the first: they are equal where L is S. A row whose keys are all hidden
    is zero in torch.
    """  # noqa: E501
    query, key, value, mask, dropout, causal, scale, gqa = node.args
    heads, size = _checked(g, query, key, value, dropout, scale)
    if gqa and g.dim(key, 1) != heads:
        raise Decline("several heads share keys")
    if is_onnxruntime_cpu(g.runtime) and _is_repeated(key) and _is_repeated(value):
        raise Decline("keys and values are repeated for several heads, which the plain form does not copy")
    if g.dim(value, 3) != size:
        raise Decline("values and keys have different widths")
    if causal and not _same(query, 2, key, 2):
        raise Decline("the attention is causal, and queries and keys differ in number")
    if mask is not None and (mask.shape is None or len(mask.shape) != 4 or mask.shape[1] not in (1, heads)):
        raise Decline("a mask that isn't [batch, heads or 1, queries, keys]")
    if mask is not None and not (_same(mask, 2, query, 2) and _same(mask, 3, key, 2)):
        raise Decline("the mask is broadcast over queries or keys")
    if mask is not None and not (mask.shape[0] == 1 or _same(mask, 0, query, 0)):
        raise Decline("the mask has another batch size")
    bias, seen = _bias_and_seen_rows(g, mask)
    packed = _packed(g, query, heads * size)
    if _is_of_rows(key) and _is_of_rows(value):
        key, value = (_packed(g, v, heads * size) for v in (key, value))
    result = g.domain(_DOMAIN).MultiHeadAttention(
        packed, key, value, None, None, bias, num_heads=heads, unidirectional=int(causal), scale=scale
    )
    if seen is not None and mask.shape[1] == 1:
        _give_shape(result, query, heads * size)
        result, seen = g.op.Mul(result, g.op.Squeeze(seen, g.const([1]))), None
    result = _unpacked(g, result, query, heads, size)
    return result if seen is None else g.op.Mul(result, seen)


def _bias_and_seen_rows(g: Any, mask: Any) -> tuple[Any, Any]:
    """The bias of the scores, and a factor [batch, heads or 1, queries, 1]: 1 for rows that see a key, 0 for others.

    A row that sees no key has no −inf in the bias: its result is finite, and the factor makes it 0.
    """
    if mask is None:
        return None, None
    zero, hidden = g.const(0.0, _FLOAT), g.const(float("-inf"), _FLOAT)
    if mask.dtype == ir.DataType.BOOL:
        some = _any_over_last(g, g.cast(mask, ir.DataType.INT32))
        return g.op.Where(g.op.Or(mask, g.op.Not(some)), zero, hidden), g.cast(some, _FLOAT)
    some = _any_over_last(g, g.cast(g.op.Greater(mask, hidden), ir.DataType.INT32))
    return g.op.Where(some, mask, zero), g.cast(some, _FLOAT)


def group_query_attention(g: Any, node: Any) -> Any:
    """scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0., bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor

    GroupQueryAttention is causal, has no mask, and takes the number of each row's keys.
    """  # noqa: E501
    query, key, value, mask, dropout, causal, scale, gqa = node.args
    heads, size = _checked(g, query, key, value, dropout, scale)
    groups = g.dim(key, 1)
    if not gqa or not isinstance(groups, int) or groups == heads:
        raise Decline("every head has keys of its own")
    if size % 8:
        raise Decline(f"heads of size {size}: ONNX Runtime takes multiples of 8")
    if mask is not None or not causal or not _same(query, 2, key, 2):
        raise Decline("the attention is not causal, has a mask, or has another number of keys than of queries")
    if g.dim(value, 3) != size:
        raise Decline("values and keys have different widths")
    count = g.cast(g.as_scalar(g.dim(query, 2)), ir.DataType.INT32)
    batch = g.vector([g.dim(query, 0)])
    last = g.op.Expand(g.op.Sub(count, g.const(1, ir.DataType.INT32)), batch)
    result, _, _ = g.domain(_DOMAIN).GroupQueryAttention(
        _packed(g, query, heads * size),
        _packed(g, key, groups * size),
        _packed(g, value, groups * size),
        None,
        None,
        last,
        count,
        num_heads=heads,
        kv_num_heads=groups,
        scale=scale,
        _outputs=3,
    )
    return _unpacked(g, result, query, heads, size)


def _checked(g: Any, query: Any, key: Any, value: Any, dropout: float, scale: float | None) -> tuple[int, int]:
    """The number of heads and their size.

    Raises:
        Decline: They are dynamic, or the operator doesn't take these operands.
    """
    if any(v.dtype != _FLOAT for v in (query, key, value)):
        raise Decline("the kernels are for float")
    if any(v.shape is None or len(v.shape) != 4 for v in (query, key, value)):
        raise Decline("the tensors are not of rank 4")
    if dropout:
        raise Decline("dropout")
    if scale == 0:
        raise Decline("a scale of 0, which stands for 1/sqrt(E) in ONNX Runtime's operators")
    heads, size = g.dim(query, 1), g.dim(query, 3)
    if not isinstance(heads, int) or not isinstance(size, int) or not isinstance(g.dim(value, 3), int):
        raise Decline("the number of heads or their size is dynamic")
    if not _same(query, 0, key, 0) or not _same(query, 0, value, 0) or not _same(key, 1, value, 1):
        raise Decline("keys and values are broadcast")
    return heads, size


def _same(a: Any, i: int, b: Any, j: int) -> bool:
    """Whether two dimensions are known to be equal."""
    left, right = a.shape[i], b.shape[j]
    if isinstance(left, int) or isinstance(right, int):
        return bool(left == right)
    return left.value is not None and left.value == right.value


def _any_over_last(g: Any, x: Any) -> Any:
    """Whether any element along the last axis is positive; the axis stays, with size 1."""
    return g.op.Greater(reduce(g, "ReduceMax", x, [len(x.shape) - 1], True), g.const(0, ir.DataType.INT32))


def _is_repeated(x: Any) -> bool:
    """Whether the heads of a value are repeated by an Expand of [B, H, 1, S, E], as transformers repeats keys.

    Measured with ONNX Runtime 1.31 on [2, 4, 64, 64] with 2 heads of keys, one thread: a layer takes 656 us where the rows of
    the heads that share keys are one matrix, and 680 us with MultiHeadAttention.
    """
    for name in ("Reshape", "Expand", "Unsqueeze"):
        producer = x.producer() if x is not None else None
        if producer is None or producer.op_type != name:
            return False
        x = producer.inputs[0]
    return True


def _is_of_rows(x: Any) -> bool:
    """Whether a value [B, H, S, E] is a Transpose of [B, S, H, E], which packing cancels."""
    producer = x.producer()
    perm = producer.attributes.get("perm") if producer is not None and producer.op_type == "Transpose" else None
    return perm is not None and list(perm.value) == [0, 2, 1, 3]


def _packed(g: Any, x: Any, width: int) -> Any:
    """[B, H, L, E] as [B, L, H E]."""
    return g.op.Reshape(g.op.Transpose(x, perm=[0, 2, 1, 3]), g.const([0, 0, width]))


def _give_shape(x: Any, query: Any, width: int) -> None:
    """Sets a result's shape [B, L, H E]: shape inference doesn't know operators of another domain."""
    x.type = ir.TensorType(_FLOAT)
    x.shape = ir.Shape([query.shape[0], query.shape[2], width])


def _unpacked(g: Any, x: Any, query: Any, heads: int, width: int) -> Any:
    """[B, L, H E] as [B, H, L, E]."""
    _give_shape(x, query, heads * width)
    rows = g.op.Reshape(x, g.const([0, 0, heads, width]))
    return g.op.Transpose(rows, perm=[0, 2, 1, 3])
