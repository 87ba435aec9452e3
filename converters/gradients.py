"""Backward operators of training for which torch has no decomposition.

A convolution's gradients are convolutions again. The others are decompositions in terms of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, swap
from onnxplug.converters.helpers.fill import filled
from onnxplug.converters.helpers.scattering import scatter_elements
from onnxplug.converters.helpers.windows import spread
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

# -- convolution -----------------------------------------------------------------------------------------------------------


def convolution_backward(g: GraphBuilder, node: FxNode) -> list[Value | None]:
    """convolution_backward(Tensor grad_output, Tensor input, Tensor weight, SymInt[]? bias_sizes, SymInt[] stride, SymInt[] padding, SymInt[] dilation, bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"""  # noqa: E501
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, wanted = node.args
    spatial = rank_of(grad) - 2
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
    sizes, counts, kernel = ([g.dim(v, axis) for axis in axes] for v in (x, grad, weight))
    if all(isinstance(size, int) for size in (*sizes, *counts, *kernel)):
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
    channels = swap(g, image, 0, 1)
    if groups > 1:
        # [N, G C, …] → [C, G N, …]: every group convolves its own channels with its own gradient.
        rest = [g.dim(image, axis) for axis in range(2, spatial + 2)]
        batch = g.dim(image, 0)
        width = g.dim(weight, 1)
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
    axes = g.const(list(range(2, spatial + 2)))
    ends = g.vector([g.dim(weight, axis) for axis in range(2, spatial + 2)])
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
    planes, sizes, counts = math.prod(x.shape[:-spatial]), x.shape[-spatial:], grad.shape[-spatial:]
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
    full = transposed(shared.reshape([planes, 1, *counts]), window, stride=list(stride))
    ends_of = [n for s, p in zip(reversed(stride), reversed(padding), strict=True) for n in (0, s + p)]
    full = torch.nn.functional.pad(full, ends_of)
    for axis in range(spatial):
        if ceil_mode:  # the number of windows is a minimum, of which torch does not prove that they are enough
            full = full.index_select(axis + 2, torch.arange(sizes[axis]) + padding[axis])
        else:
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


def by_index_backward(g: GraphBuilder, node: FxNode) -> Value:
    """max_pool2d_with_indices_backward(Tensor grad_output, Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, Tensor indices) -> Tensor

    Each maximum's gradient goes to the place that its index names, counted within a channel.
    """  # noqa: E501
    grad, x, indices = node.args[0], node.args[1], node.args[-1]
    spatial = 3 if "3d" in node.op_name else 2
    lead = g.dims(x)[:-spatial]
    start = g.reshape(filled(g, 0, g.dims(x), node.dtype), [*lead, -1])
    values, places = (g.reshape(v, [*lead, -1]) for v in (grad, indices))
    return g.reshape(scatter_elements(g, start, len(lead), places, values, "add"), g.dims(x))


# -- interpolation ---------------------------------------------------------------------------------------------------------

#: The places along an axis that each result is interpolated from, and their weights: both [out].
_Taps = list[tuple[torch.Tensor, torch.Tensor | None]]
_KEYS = -0.75  # the parameter of Keys' cubic kernel, 1981, in PyTorch
_KEYS_OF_FILTER = -0.5


def _ratio(size: Any, out: Any, factor: float | None) -> torch.Tensor:
    """The step between results on an axis, 0-dim float32 as PyTorch computes it: from the factor if there is a factor."""
    if factor is not None and factor > 0:
        return torch.full((), 1.0 / factor, dtype=torch.float32)
    return torch.full((), size, dtype=torch.float32) / torch.full((), out, dtype=torch.float32)


def _nearest_taps(size: Any, out: Any, factor: float | None, _: bool, *, offset: float) -> _Taps:
    if not offset and isinstance(size, int) and isinstance(out, int) and size == out:
        return [(torch.arange(out), None)]  # whatever the factor
    at = (torch.arange(out, dtype=torch.float32) + offset) * _ratio(size, out, factor)
    return [(at.to(torch.int64).clamp(max=size - 1), None)]


def _places(size: Any, out: Any, factor: float | None, align_corners: bool) -> torch.Tensor:
    """Where the results lie among the elements, [out] in float32."""
    number = torch.arange(out, dtype=torch.float32)
    if not align_corners:
        return (number + 0.5) * _ratio(size, out, factor) - 0.5
    steps = torch.full((), out, dtype=torch.float32) - 1
    return number * torch.where(steps > 0, (torch.full((), size, dtype=torch.float32) - 1) / steps, 0.0)


def _linear_taps(size: Any, out: Any, factor: float | None, align_corners: bool) -> _Taps:
    at = _places(size, out, factor, align_corners).clamp(min=0)
    first = at.to(torch.int64).clamp(max=size - 1)
    share = (at - first).clamp(0, 1)
    return [(first, 1 - share), ((first + 1).clamp(max=size - 1), share)]


def _cubic_taps(size: Any, out: Any, factor: float | None, align_corners: bool) -> _Taps:
    at = _places(size, out, factor, align_corners)
    first = at.floor()
    share = at - first
    distances = [share + 1, share, 1 - share, 2 - share]
    places = [(first.to(torch.int64) + k).clamp(0, size - 1) for k in (-1, 0, 1, 2)]
    return list(zip(places, [_cubic(d, _KEYS) for d in distances], strict=True))


def _cubic(distance: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' kernel at distances of at least 0."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))


def _resize_backward(
    taps: Callable[..., _Taps], corners: bool, grad: torch.Tensor, output_size: Any, input_size: Any, *rest: Any
) -> torch.Tensor:
    """An interpolation is linear, an axis after the other: its gradient adds to each place that it reads.

    Args:
        taps: The places and weights from which each result on an axis is interpolated.
        corners: Whether the operator's next argument is ``align_corners``.
        grad: [N, C, *output_size].
        output_size, input_size: The sizes, batch and channels with the input's.
        rest: ``align_corners``, and the factor of each axis or ``None``.
    """
    align_corners, factors = (bool(rest[0]), rest[1:]) if corners else (False, rest)
    spatial = len(output_size)
    pairs = list(zip(output_size, input_size[2:], strict=True))
    if corners and all(isinstance(out, int) and isinstance(size, int) and out == size for out, size in pairs):
        return grad  # PyTorch copies then, whatever the factors
    factors = (*factors, *([None] * (spatial - len(factors))))
    for i in range(spatial):
        axis, size = 2 + i, input_size[2 + i]
        sizes = [*grad.shape]
        sizes[axis] = size
        total = grad.new_zeros(sizes)
        for place, weight in taps(size, output_size[i], factors[i], align_corners):
            column = None if weight is None else weight.to(grad.dtype).reshape([-1] + [1] * (spatial - 1 - i))
            total = total.index_add(axis, place, grad if column is None else grad * column)
        grad = total
    return grad


def _lanczos(distance: torch.Tensor) -> torch.Tensor:
    return torch.where(distance < 3, torch.sinc(distance) * torch.sinc(distance / 3), 0.0)


#: The filter that reaches so many elements far, of distances of at least 0.
_FILTERS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    1: lambda distance: (1 - distance).clamp(min=0),
    2: partial(_cubic, a=_KEYS_OF_FILTER),
    3: _lanczos,
}


def _filtered_backward(
    reach: int, grad: torch.Tensor, output_size: Any, input_size: Any, align_corners: bool, *factors: Any
) -> torch.Tensor:
    """The gradient of an interpolation with antialiasing: a product an axis with the weights of its filter, [out, in].

    The filter reaches 1 (linear), 2 (cubic) or 3 elements (Lanczos) far.
    """
    for i, factor in enumerate((*factors, None, None)[:2]):
        size, out = input_size[2 + i], output_size[i]
        ratio = _ratio(size, out, factor)
        if align_corners:
            steps = torch.full((), out, dtype=torch.float32) - 1
            ratio = torch.where(steps > 0, (torch.full((), size, dtype=torch.float32) - 1) / steps, 0.0)
        wide = ratio.clamp(min=1)
        support = wide * reach
        center = (ratio * (torch.arange(out, dtype=torch.float32) + 0.5)).unsqueeze(1)
        place = torch.arange(size, dtype=torch.float32)
        first, last = (center - support + 0.5).to(torch.int64), (center + support + 0.5).to(torch.int64)
        distance = ((place - center + 0.5) / wide).abs()
        weight = _FILTERS[reach](distance)
        weight = torch.where((place >= first) & (place < last), weight, 0.0)
        weight = (weight / weight.sum(1, keepdim=True)).to(grad.dtype)
        grad = (grad.transpose(2 + i, -1) @ weight).transpose(2 + i, -1)
    return grad


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


_RESIZES: dict[str, Callable[..., Any]] = {
    **{
        f"upsample_nearest{n}d": partial(_resize_backward, partial(_nearest_taps, offset=0.0), False) for n in (1, 2, 3)
    },
    **{
        f"_upsample_nearest_exact{n}d": partial(_resize_backward, partial(_nearest_taps, offset=0.5), False)
        for n in (1, 2, 3)
    },
    **{
        f"upsample_{mode}": partial(_resize_backward, _linear_taps, True)
        for mode in ("linear1d", "bilinear2d", "trilinear3d")
    },
    "upsample_bicubic2d": partial(_resize_backward, _cubic_taps, True),
    "_upsample_bilinear2d_aa": partial(_filtered_backward, 1),
    "_upsample_bicubic2d_aa": partial(_filtered_backward, 2),
    "_upsample_lanczos2d_aa": partial(_filtered_backward, 3),
}

#: Qualified name to the decomposition of a backward operator.
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}_backward.default": backward for name, backward in _RESIZES.items()},
    **{f"aten::replication_pad{n}d_backward.default": _replication_backward for n in (1, 2, 3)},
    **{f"aten::_adaptive_avg_pool{n}d_backward.default": partial(_adaptive_backward, n) for n in (2, 3)},
    "aten::avg_pool2d_backward.default": partial(_average_backward, 2),
    "aten::avg_pool3d_backward.default": partial(_average_backward, 3),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "aten::hardshrink_backward.default": _shrink_backward,
    "aten::softshrink_backward.default": _shrink_backward,
}

#: Backward operators of pools that recorded where each maximum was.
_BY_INDEX = (
    *(f"adaptive_max_pool{n}d" for n in (2, 3)),
    *(f"max_pool{n}d_with_indices" for n in (2, 3)),
    *(f"fractional_max_pool{n}d" for n in (2, 3)),
)

RULES: list[Rule] = [
    Rule("aten::convolution_backward.default", convolution_backward),
    *[Rule(f"aten::{name}_backward.default", by_index_backward) for name in _BY_INDEX],
]
