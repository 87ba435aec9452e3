"""Attention to a cache that new keys are written to, as ONNX Runtime's operator GroupQueryAttention.

The operator's cache is [batch, heads, size, E] where flash_attn's is [batch, size, heads, E], and its new cache differs
behind the used keys. So the cache is written without it, and the operator gets it transposed, with the same new keys
again.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from onnxplug import Decline
from onnxplug.registry.target import is_onnxruntime_cpu
from onnxplug_flash_attn.attention import Lengths, Terms, attend


def decomposed(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, used: Tensor, scale: float, left: int, softcap: float
) -> Tensor:
    """The result, [batch, L, heads, E], by ATen operators.

    Args:
        q: [batch, L, heads, E], where L or the batch is 1.
        k, v: [batch, L, a divisor of heads, E], also the last of the used places of ``keys`` and ``values``.
        keys, values: [batch, size, the same divisor, E].
        used: int64 [batch], the number of used keys of each element.
        scale, left, softcap: As in :class:`Terms`; the attention is causal.
    """
    terms = Terms(scale, left, 0, softcap, None, keys.shape[1])
    return attend(q, keys, values, terms, Lengths(None, used))[0]


written = torch.library.custom_op("onnxplug_flash_attn::written", decomposed, mutates_args=())


@written.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, used: Tensor, scale: float, left: int, softcap: float
) -> Tensor:
    return torch.empty_like(q)


def convert(g: Any, node: Any) -> Any:
    """written(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor used, float scale, SymInt left, float softcap) -> Tensor"""  # noqa: E501
    q, k, v, keys, values, used, scale, left, softcap = node.args
    if q.dtype != ir.DataType.FLOAT or not is_onnxruntime_cpu(g.runtime):
        raise Decline("the kernel is used in float32 on the CPU")
    rows = (g.op.Reshape(x, g.const([0, 0, -1])) for x in (q, k, v))
    past = (g.op.Transpose(x, perm=[0, 2, 1, 3]) for x in (keys, values))
    used = g.cast(used, ir.DataType.INT32)
    result, _, _ = g.domain("com.microsoft").GroupQueryAttention(
        *rows,
        *past,
        g.op.Sub(used, g.const(1, ir.DataType.INT32)),
        g.op.ReduceMax(used, g.const([0]), keepdims=0) if g.opset >= 18 else g.op.ReduceMax(used, axes=[0], keepdims=0),
        num_heads=g.dim(q, 2),
        kv_num_heads=g.dim(k, 2),
        scale=scale,
        local_window_size=left + 1 if left >= 0 else -1,
        softcap=softcap,
        _outputs=3,
    )
    return g.op.Reshape(result, g.const([0, 0, g.dim(q, 2), g.dim(q, 3)]))
