"""Convolutions with what stands around them: zeros before, and batch norms after, also written out by scales and shifts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import sympy
import torch

from onnxplug.build.dtypes import to_torch_dtype
from onnxplug.build.inference.dims import dims_of
from onnxplug.build.matching import attribute_values, int_attribute, made_by, reads, used_once
from onnxplug.capture.implication import implied
from onnxplug.rewrite.rewrite import Rewrite
from onnxplug.torch_private import sympy_functions

if TYPE_CHECKING:
    from onnxplug.build.builder import GraphBuilder

_Known = ir.Value | torch.Tensor
#: The largest depth and size of expressions of weights.
_DEEPEST, _LARGEST = 8, 1 << 16


def batch_norm_of_conv(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``BatchNormalization(Conv(x, w, b), gamma, beta, mean, variance)``: the ``Conv`` whose weights are scaled and shifted."""
    conv = _foldable(g, node.inputs[0])
    known = [_known(g, value) for value in node.inputs[1:5]]
    if conv is None or int_attribute(node, "training_mode", 0) or any(value is None for value in known):
        return None
    gamma, beta, mean, variance = known
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5

    def factor(gamma: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return gamma.double() / (variance.double() + epsilon).sqrt()

    def weight(w: torch.Tensor, gamma: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return _scaled(w, factor(gamma, variance))

    def bias(
        beta: torch.Tensor, b: torch.Tensor, gamma: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor
    ) -> torch.Tensor:
        shift = (b.double() - mean.double()) * factor(gamma, variance)
        return (shift + beta.double()).to(beta.dtype)

    before = _bias(g, conv)
    if before is None:
        return None
    return _conv(
        g,
        conv,
        _joined(g, [conv.inputs[1], gamma, variance], weight, ("batch norm", epsilon)),
        # It is named after the first weight.
        _joined(g, [beta, before, gamma, mean, variance], bias, ("batch norm", epsilon)),
    )


def pad_of_conv(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``Conv`` of an image with zeros around it, which nothing else reads: the convolution's own padding."""
    pad = _zeros_before(g, node)
    if pad is None:
        return None
    x, widths, _, axes = [*pad.inputs, None, None][:4]
    shape, numbers = dims_of(x), g.constant(widths)
    if x is None or shape is None or numbers is None:
        return None
    chosen = np.arange(len(shape)) if axes is None else g.constant(axes)
    if chosen is None or (numbers < 0).any():
        return None
    whole = np.zeros((2, len(shape)), np.int64)
    whole[:, chosen % len(shape)] = numbers.reshape(2, -1)
    if whole[:, :2].any():  # of the batch or of the channels
        return None
    options = attribute_values(node)
    pads = np.array(options.get("pads") or [0] * (2 * len(shape) - 4)) + whole[:, 2:].reshape(-1)
    result: ir.Value = g.op.Conv(x, *node.inputs[1:], **{**options, "pads": pads.tolist()})
    return result


def _zeros_before(g: GraphBuilder, conv: ir.Node) -> ir.Node | None:
    """The Pad with zeros of a convolution's input, if nothing else reads it."""
    pad, auto_pad = made_by(conv.inputs[0], "Pad"), conv.attributes.get("auto_pad")
    if pad is None or not used_once(conv.inputs[0]) or (auto_pad is not None and auto_pad.as_string() != "NOTSET"):
        return None
    mode, fill = pad.attributes.get("mode"), pad.inputs[2] if len(pad.inputs) > 2 else None
    value = g.constant(fill) if fill is not None else np.zeros(1)
    is_of_zeros = value is not None and value.size == 1 and value.item() == 0
    return pad if is_of_zeros and (mode is None or mode.as_string() == "constant") else None


def same_padding_of_conv(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """A ``Conv`` of an image of dynamic size, with the zeros of ``same`` around it: the operator's ``auto_pad``.

    The result has an axis for each ``ceil(size / stride)``, which the widths of the zeros, as expressions of the sizes, prove.
    """
    pad = _zeros_before(g, node)
    if pad is None:
        return None
    sizes, kernel = dims_of(pad.inputs[0]), (dims_of(node.inputs[1]) or ())[2:]
    options = attribute_values(node)
    strides = options.get("strides") or [1] * len(kernel)
    widths = _expressions(g, pad.inputs[1])
    if sizes is None or widths is None or len(pad.inputs) > 3 or len(widths) != 2 * len(sizes):
        return None
    if any(options.get("pads") or ()) or any(n != 1 for n in options.get("dilations") or ()):
        return None
    axes = [g.sizes.expression(size) if isinstance(size, ir.SymbolicDim) else size for size in sizes]
    low, high = widths[: len(axes)], widths[len(axes) :]
    if any(width != 0 for width in (*low[:2], *high[:2])) or any(size is None for size in axes[2:]):
        return None
    rows = list(zip(axes[2:], kernel, strides, low[2:], high[2:], strict=True))
    for mode, is_upper in (("SAME_UPPER", True), ("SAME_LOWER", False)):
        if all(_is_same(*row, is_upper) for row in rows):
            others = {name: value for name, value in options.items() if name != "pads"}
            result: ir.Value = g.op.Conv(pad.inputs[0], *node.inputs[1:], **{**others, "auto_pad": mode})
            return result
    return None


def _is_same(size: Any, kernel: Any, stride: int, low: Any, high: Any, is_upper: bool) -> bool:
    """Whether the widths before and after an axis are those of ``same``, the larger one after it if ``is_upper``."""
    if not isinstance(kernel, int) or kernel < stride:  # ONNX Runtime cuts an image where a stride leaves its end out
        return False
    floor = sympy_functions.FloorDiv
    total = (floor(size + stride - 1, stride) - 1) * stride + kernel - size
    less, more = floor(total, 2), total - floor(total, 2)
    wanted = (less, more) if is_upper else (more, less)
    return all(implied(sympy.Eq(width, same), {}) for width, same in zip((low, high), wanted, strict=True))


def _expressions(g: GraphBuilder, value: ir.Value | None) -> list[Any] | None:
    """The elements of a vector of sizes, as numbers and expressions; ``None`` where one is unknown."""
    numbers = g.constant(value)
    if numbers is not None:
        return [sympy.Integer(int(number)) for number in numbers.reshape(-1)]
    node = made_by(value, "Concat", "Unsqueeze")
    if node is None:
        return None
    if node.op_type == "Unsqueeze":
        scalar = node.inputs[0]
        expression = g.sizes.expression(scalar) if scalar is not None else None
        return None if expression is None else [expression]
    parts = [_expressions(g, part) for part in node.inputs]
    return None if any(part is None for part in parts) else [e for part in parts if part is not None for e in part]


def scale_of_conv(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Conv(x, w, b)`` times a number for each channel that is computed from weights."""
    for x, other in (node.inputs, node.inputs[::-1]):
        conv = _foldable(g, x)
        scale = _of_channels(g, conv, other) if conv is not None else None
        if conv is None or scale is None:
            continue
        weight = _joined(g, [conv.inputs[1], scale], lambda w, s: _scaled(w, s.double().reshape(-1)), "scaled")
        if len(conv.inputs) < 3 or conv.inputs[2] is None:
            return _conv(g, conv, weight, None, has_bias=False)
        return _conv(g, conv, weight, _joined(g, [_known(g, conv.inputs[2]), scale], _times, "scaled"))
    return None


def shift_of_conv(g: GraphBuilder, node: ir.Node) -> ir.Value | None:
    """``Conv(x, w, b)`` plus a number for each channel that is computed from weights."""
    for x, other in (node.inputs, node.inputs[::-1]):
        conv = _foldable(g, x)
        shift = _of_channels(g, conv, other) if conv is not None else None
        if conv is not None and shift is not None:
            return _conv(g, conv, conv.inputs[1], _joined(g, [shift, _bias(g, conv)], _plus, "shifted"))
    return None


def _scaled(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The product in float64, rounded once; torch computes it in blocks, so that no weight is copied as float64."""
    return torch.mul(weight, factor.reshape(-1, *[1] * (weight.dim() - 1)), out=torch.empty_like(weight))


def _times(bias: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (bias.double() * scale.double().reshape(-1)).to(bias.dtype)


def _plus(shift: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (shift.double().reshape(-1) + bias.double()).to(shift.dtype)


def _foldable(g: GraphBuilder, value: ir.Value | None) -> ir.Node | None:
    """The Conv that makes a value, if neither the value nor the weight has another reader."""
    conv = made_by(value, "Conv")
    if conv is None or not used_once(value):
        return None
    weight = conv.inputs[1]
    return conv if weight is not None and g.weights.is_read_once(weight) else None


def _bias(g: GraphBuilder, conv: ir.Node) -> _Known | None:
    """A convolution's bias; zeros where it has none."""
    weight = conv.inputs[1]
    channels = (dims_of(weight) or [None])[0]
    if weight is None or weight.dtype is None or not isinstance(channels, int):
        return None
    if len(conv.inputs) > 2 and conv.inputs[2] is not None:
        return _known(g, conv.inputs[2])
    return torch.zeros(channels, dtype=to_torch_dtype(weight.dtype))


def _of_channels(g: GraphBuilder, conv: ir.Node, value: ir.Value | None) -> ir.Value | None:
    """A value with a number for each channel of a convolution's result, if it is computed from weights."""
    shape, result, dims = (dims_of(v) for v in (conv.inputs[1], conv.outputs[0], value))
    if value is None or not shape or result is None or not dims or len(dims) >= len(result) + 1:
        return None
    places: list[Any] = [1] * len(result)
    places[1] = shape[0]
    if list(dims) != places[len(result) - len(dims) :] or value.dtype != conv.outputs[0].dtype:
        return None
    if len(dims) < len(result) - 1:  # of the last axes alone
        return None
    known = _known(g, value)
    return known if isinstance(known, ir.Value) else None


def _conv(
    g: GraphBuilder, conv: ir.Node, weight: ir.Value | None, bias: ir.Value | None, has_bias: bool = True
) -> ir.Value | None:
    if weight is None or (has_bias and bias is None):
        return None
    inputs = [conv.inputs[0], weight, *([bias] if has_bias else [])]
    result: ir.Value = g.op.Conv(*inputs, **attribute_values(conv))
    return result


def _joined(
    g: GraphBuilder, sources: Sequence[_Known | None], make: Callable[..., torch.Tensor], key: Any
) -> ir.Value | None:
    """An initializer of several weights; a weight comes before the numbers."""
    if any(source is None for source in sources):
        return None
    order = sorted(range(len(sources)), key=lambda place: isinstance(sources[place], torch.Tensor))
    chosen = [source for place in order if (source := sources[place]) is not None]
    if isinstance(chosen[0], torch.Tensor):
        return None

    def ordered(*tensors: torch.Tensor) -> torch.Tensor:
        return make(*(tensor for _, tensor in sorted(zip(order, tensors, strict=True), key=lambda pair: pair[0])))

    return g.weights.joined(chosen, ordered, (make.__qualname__, key, *order), form="folded")


# -- expressions of weights --------------------------------------------------------------------------------------------

_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Sqrt": torch.sqrt,
    "Reciprocal": torch.reciprocal,
}


def _known(g: GraphBuilder, value: ir.Value | None, depth: int = 0) -> _Known | None:
    """A constant's numbers, a weight, or an expression of weights as a single initializer."""
    if value is None:
        return None
    number = g.constant(value)
    if number is not None:
        return torch.from_numpy(number.copy()) if number.dtype.isbuiltin == 1 else None
    if g.is_weight(value):
        return value
    node, sizes = (
        made_by(value, "Reshape", "Unsqueeze", *_TORCH),
        [n for n in dims_of(value) or () if isinstance(n, int)],
    )
    if node is None or depth == _DEEPEST or dims_of(value) != tuple(sizes) or math.prod(sizes) > _LARGEST:
        return None
    if node.op_type not in _TORCH:  # which changes the layout
        return _joined(g, [_known(g, node.inputs[0], depth + 1)], lambda x: x.reshape(sizes), ("reshaped", *sizes))
    sources = [_known(g, source, depth + 1) for source in node.inputs]
    return _joined(g, sources, _TORCH[node.op_type], node.op_type)


REWRITES = [
    Rewrite("pad_of_conv", "Conv", pad_of_conv, when=reads("Pad")),
    Rewrite("same_padding_of_conv", "Conv", same_padding_of_conv, when=reads("Pad")),
    Rewrite("batch_norm_of_conv", "BatchNormalization", batch_norm_of_conv, when=reads("Conv")),
    Rewrite("scale_of_conv", "Mul", scale_of_conv, when=reads("Conv")),
    Rewrite("shift_of_conv", "Add", shift_of_conv, when=reads("Conv")),
]
