"""Backward operators of training: those that torch has no decomposition for.

A convolution's gradients are convolutions again. The others are decompositions in terms of PyTorch, most of them the
vector-Jacobian product of torch's own decomposition of the forward operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import swap
from onnxplug.converters.helpers.windows import spread
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import decomposition_table

_ATEN = torch.ops.aten


# -- convolution -----------------------------------------------------------------------------------------------------------


def convolution_backward(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
    spatial = len(node.outputs[1].shape if node.outputs[1] is not None else g.concrete_shape(weight, "weight")) - 2
    steps: dict[str, Any] = {"strides": spread(stride, spatial), "dilations": spread(dilation, spatial)}
    pads = spread(padding, spatial) * 2
    results: list[Value | None] = [None, None, None]
    if wanted[0]:
        if transposed:
            results[0] = g.op.Conv(grad, weight, None, pads=pads, group=groups, **steps)
        else:
            results[0] = _input_gradient(g, grad, x, weight, pads, groups, steps)
    if wanted[1]:
        image, kernel = (grad, x) if transposed else (x, grad)
        results[1] = _weight_gradient(g, image, kernel, weight, pads, groups, steps)
    if wanted[2]:
        axes = [0, *range(2, spatial + 2)]
        results[2] = g.op.ReduceSum(grad, g.const(axes), keepdims=0)
    return results


def _input_gradient(
    g: GraphBuilder, grad: Value, x: Value, weight: Value, pads: Sequence[int], groups: int, steps: dict[str, Any]
) -> Value:
    """The transposed convolution of the gradient, with the input's size.

    Places at the end that the strided kernel does not reach have the gradient 0.
    """
    spatial = len(pads) // 2
    axes = range(2, spatial + 2)
    kernel = g.concrete_shape(weight, "weight")[2:]
    sizes, counts = [g.dim(x, axis) for axis in axes], [g.dim(grad, axis) for axis in axes]
    if all(isinstance(size, int) for size in (*sizes, *counts)):
        left = [
            n + 2 * p - d * (k - 1) - 1 - (o - 1) * s
            for n, p, d, k, o, s in zip(sizes, pads, steps["dilations"], kernel, counts, steps["strides"], strict=False)
        ]
        return g.op.ConvTranspose(
            grad, weight, None, pads=list(pads), output_padding=left if any(left) else None, group=groups, **steps
        )
    # First every place that the windows cover, and a stride more; then the padding and the surplus are cropped.
    full = g.op.ConvTranspose(grad, weight, None, group=groups, **steps)
    full = g.op.Pad(full, g.const([0] * (4 + spatial) + steps["strides"]), g.const(0.0, grad.dtype))
    starts = g.const(list(pads[:spatial]))
    return g.op.Slice(full, starts, g.op.Add(starts, g.vector(sizes)), g.const(list(axes)))


def _weight_gradient(
    g: GraphBuilder, image: Value, kernel: Value, weight: Value, pads: Sequence[int], groups: int, steps: dict[str, Any]
) -> Value:
    """The convolution of the image with the output's gradient as the kernel.

    Batch and channels are exchanged, and so are strides and dilations. Windows that the stride leaves out make the
    result too wide; its end is cropped.
    """
    spatial = len(pads) // 2
    sizes = g.concrete_shape(weight, "weight")[2:]
    channels = swap(g, image, 0, 1)
    if groups > 1:
        # [N, G C, …] → [C, G N, …]: every group convolves its own channels with its own gradient.
        rest = [g.dim(image, axis) for axis in range(2, spatial + 2)]
        batch = g.dim(image, 0)
        width = g.concrete_shape(weight, "weight")[1]
        apart = g.op.Reshape(image, g.vector([batch, groups, width, *rest]))
        apart = g.op.Transpose(apart, perm=[2, 1, 0, *range(3, spatial + 3)])
        channels = g.op.Reshape(apart, g.vector([width, -1, *rest]))
    result = g.op.Conv(
        channels,
        swap(g, kernel, 0, 1),
        None,
        pads=list(pads),
        strides=steps["dilations"],
        dilations=steps["strides"],
        group=groups,
    )
    ends, axes = g.const(list(sizes)), g.const(list(range(2, spatial + 2)))
    return swap(g, g.op.Slice(result, g.const([0] * spatial), ends, axes), 0, 1)


# -- pools -----------------------------------------------------------------------------------------------------------------


def _average_backward(
    spatial: int,
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> torch.Tensor:
    """Each place of a window receives the window's gradient divided by the number of places averaged."""
    kernel, padding = spread(kernel, spatial), spread(padding, spatial)
    stride = spread(stride or kernel, spatial)
    sizes, counts = x.shape[-spatial:], grad.shape[-spatial:]
    shared = grad
    for axis in range(spatial):
        starts = torch.arange(counts[axis]) * stride[axis] - padding[axis]
        ends = (starts + kernel[axis]).clamp(max=sizes[axis] + padding[axis])
        if not count_include_pad:
            starts, ends = starts.clamp(min=0), ends.clamp(max=sizes[axis])
        if divisor is None:
            shared = shared / (ends - starts).to(grad.dtype).reshape([-1] + [1] * (spatial - 1 - axis))
    if divisor is not None:
        shared = shared / divisor
    transposed = torch.nn.functional.conv_transpose2d if spatial == 2 else torch.nn.functional.conv_transpose3d
    window = torch.ones([1, 1, *kernel], dtype=grad.dtype)
    full = transposed(shared.reshape([-1, 1, *counts]), window, stride=list(stride))
    ends_of = [n for s, p in zip(reversed(stride), reversed(padding), strict=True) for n in (0, s + p)]
    full = torch.nn.functional.pad(full, ends_of)
    for axis in range(spatial):
        full = full.narrow(axis + 2, padding[axis], sizes[axis])
    return full.reshape(x.shape)


def _adaptive_backward(spatial: int, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One product an axis: window i of o over n places is floor(i n / o) to ceil((i + 1) n / o)."""
    for axis in range(-spatial, 0):
        size, count = x.shape[axis], grad.shape[axis]
        window = torch.arange(count)
        starts, ends = window * size // count, ((window + 1) * size + count - 1) // count
        place = torch.arange(size)
        within = (place >= starts.unsqueeze(1)) & (place < ends.unsqueeze(1))
        shares = within.to(grad.dtype) / (ends - starts).to(grad.dtype).unsqueeze(1)
        grad = (grad.transpose(axis, -1) @ shares).transpose(axis, -1)
    return grad


def _replication_backward(grad: torch.Tensor, x: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """The places at the borders receive the gradients of the padding that repeats them."""
    for i in range(len(padding) // 2):
        axis, size = x.dim() - 1 - i, x.shape[-1 - i]
        places = (torch.arange(grad.shape[axis]) - padding[2 * i]).clamp(0, size - 1)
        sizes = [*grad.shape]
        sizes[axis] = size
        grad = grad.new_zeros(sizes).index_add(axis, places, grad)
    return grad


def _by_index_backward(spatial: int, grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Each maximum's gradient goes to the place that its index names, counted within a channel."""
    indices = rest[-1]
    lead = list(x.shape[:-spatial])
    flat = torch.zeros_like(x).reshape([*lead, -1])
    flat = flat.scatter_add(-1, indices.reshape([*lead, -1]), grad.reshape([*lead, -1]))
    return flat.reshape(x.shape)


# -- vector-Jacobian products ----------------------------------------------------------------------------------------------


def _pull_back(function: Callable[..., Any], x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.func.vjp(function, x)[1](grad)[0]
    return result


def _resize_backward(forward: Any, grad: torch.Tensor, output_size: Any, input_size: Any, *rest: Any) -> torch.Tensor:
    """The gradient of an interpolation, which is linear, so that only the input's shape matters."""
    x = grad.new_zeros(input_size)
    return _pull_back(lambda x: decomposition_table[forward](x, output_size, *rest), x, grad)


# -- attention and activations ---------------------------------------------------------------------------------------------


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """The arguments of the softmax, in float32 at least: [batch, heads, queries, keys]."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(wide) @ key.to(wide).transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if attn_mask is not None:
        scores = scores + attn_mask
    if is_causal:
        rows, columns = torch.arange(scores.shape[-2]), torch.arange(scores.shape[-1])
        scores = scores.masked_fill(rows.unsqueeze(1) < columns, float("-inf"))
    return scores


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of softmax(q kᵀ s + mask) v, with the probabilities made anew from the forward's logsumexp.

    With P the probabilities and D = Σ grad · out a row: dV = Pᵀ grad, dS = P (grad Vᵀ - D), dQ = s dS K, dK = s dSᵀ Q (Dao et
    al., FlashAttention, 2022, appendix B). Where torch has decomposed the forward operator, ``logsumexp`` has a fourth axis and
    is P itself.
    """
    assert dropout_p == 0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if logsumexp.dim() == 4:
        probabilities = logsumexp
    else:
        scores = _scores(query, key, is_causal, attn_mask, scale)
        probabilities = (scores - logsumexp.unsqueeze(-1)).exp().to(query.dtype)
    share = (grad * out).sum(-1, keepdim=True)
    inner = probabilities * (grad @ value.transpose(-2, -1) - share) * scale
    return inner @ key, inner.transpose(-2, -1) @ query, probabilities.transpose(-2, -1) @ grad


def _shrink_backward(grad: torch.Tensor, x: torch.Tensor, bound: float) -> torch.Tensor:
    """The gradient is 0 within the bounds, where the shrinking activations are constant."""
    return torch.where((x >= -bound) & (x <= bound), 0.0, grad)


_RESIZES = [
    *(f"upsample_{mode}" for mode in ("nearest1d", "nearest2d", "nearest3d")),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *(f"upsample_{mode}" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
]

#: Qualified name to the decomposition of a backward operator.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}_backward.default": partial(_resize_backward, getattr(_ATEN, name).default) for name in _RESIZES},
    **{f"aten::replication_pad{n}d_backward.default": _replication_backward for n in (1, 2, 3)},
    **{f"aten::_adaptive_avg_pool{n}d_backward.default": partial(_adaptive_backward, n) for n in (2, 3)},
    "aten::avg_pool2d_backward.default": partial(_average_backward, 2),
    "aten::avg_pool3d_backward.default": partial(_average_backward, 3),
    "aten::adaptive_max_pool2d_backward.default": partial(_by_index_backward, 2),
    "aten::adaptive_max_pool3d_backward.default": partial(_by_index_backward, 3),
    "aten::max_pool3d_with_indices_backward.default": partial(_by_index_backward, 3),
    "aten::fractional_max_pool2d_backward.default": partial(_by_index_backward, 2),
    "aten::fractional_max_pool3d_backward.default": partial(_by_index_backward, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten::hardshrink_backward.default": _shrink_backward,
    "aten::softshrink_backward.default": _shrink_backward,
}

RULES: list[Rule] = [Rule("aten::convolution_backward.default", convolution_backward)]
