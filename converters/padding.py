"""Padding in every mode, negative widths included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.promotion import operand
from onnxplug.converters.helpers.runtimes import computed_in
from onnxplug.converters.helpers.slices import slice_axis
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

_MODES = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}


def pad_axes(g: GraphBuilder, x: Value, pads: Sequence[Any], mode: str, value: Any, dtype: ir.DataType) -> Value:
    """``x`` padded; ``pads`` in the order of torch: (before, after) of the last axis, then of the axis before …"""
    rank = rank_of(x)
    if mode == "circular":
        return _circular(g, x, pads)
    before: list[Any] = [0] * rank
    after: list[Any] = [0] * rank
    for number in range(len(pads) // 2):
        before[rank - 1 - number], after[rank - 1 - number] = pads[2 * number], pads[2 * number + 1]
    if mode != "constant" and not all(g.sizes.never_negative(p) for p in (*before, *after)):
        # torch reads from the uncropped tensor, even where cropping leaves it empty.
        return _gathered(g, x, before, after, mode)
    if all(isinstance(p, int) and p == 0 for p in (*before, *after)):
        return x
    inner = computed_in(g, "Pad", dtype)
    fill = operand(g, 0 if value is None else value, inner) if mode == "constant" else None
    padded = g.op.Pad(g.cast(x, inner), g.vector([*before, *after]), fill, mode=_MODES[mode])
    return g.cast(padded, dtype)


def _gathered(g: GraphBuilder, x: Value, before: Sequence[Any], after: Sequence[Any], mode: str) -> Value:
    """Element i of the result is element i - before of the input, clamped to the tensor or reflected at its ends."""
    for axis in range(rank_of(x)):
        low, high = before[axis], after[axis]
        if low == 0 and high == 0:
            continue
        size = g.as_scalar(g.dim(x, axis))
        places = g.op.Sub(_numbered(g, size, low, high), g.as_scalar(low))
        last = g.op.Sub(size, g.const(1))
        if mode == "reflect":
            places = g.op.Sub(last, g.op.Abs(g.op.Sub(last, g.op.Abs(places))))
        else:
            places = g.op.Max(g.op.Min(places, last), g.const(0))
        x = g.op.Gather(x, places, axis=axis)
    return x


def _numbered(g: GraphBuilder, size: Value, low: Any, high: Any) -> Value:
    """0, 1, … up to the size of a padded axis."""
    total = g.op.Add(g.op.Add(size, g.as_scalar(low)), g.as_scalar(high))
    return g.op.Range(g.const(0), total, g.const(1))


def _circular(g: GraphBuilder, x: Value, pads: Sequence[Any]) -> Value:
    """Circular padding, one axis at a time."""
    rank = rank_of(x)
    for number in range(len(pads) // 2):
        axis = rank - 1 - number
        low, high = pads[2 * number], pads[2 * number + 1]
        if not isinstance(low, int) or not isinstance(high, int):
            x = _circular_dynamic(g, x, axis, low, high)
            continue
        # torch crops first and wraps the cropped tensor.
        if low < 0 or high < 0:
            x = slice_axis(g, x, axis, max(-low, 0), high if high < 0 else None)
        pieces = []
        if low > 0:
            pieces.append(slice_axis(g, x, axis, -low, None))
        pieces.append(x)
        if high > 0:
            pieces.append(slice_axis(g, x, axis, 0, high))
        x = g.op.Concat(*pieces, axis=axis) if len(pieces) > 1 else pieces[0]
    return x


def _circular_dynamic(g: GraphBuilder, x: Value, axis: int, low: Any, high: Any) -> Value:
    """Pads one axis by widths that are only known at run time: a Gather of indices modulo the cropped size."""
    size = g.as_scalar(g.dim(x, axis))
    low, high = g.as_scalar(low), g.as_scalar(high)
    cut = g.op.Max(g.op.Neg(low), g.const(0))
    left = g.op.Sub(g.op.Sub(size, cut), g.op.Max(g.op.Neg(high), g.const(0)))
    places = g.op.Sub(_numbered(g, size, low, high), g.op.Max(low, g.const(0)))
    return g.op.Gather(x, g.op.Add(g.op.Mod(places, left), cut), axis=axis)


def pad(g: GraphBuilder, node: FxNode) -> Value:
    """pad(Tensor self, SymInt[] pad, str mode="constant", float? value=None) -> Tensor"""
    x, pads, mode, value = node.args
    if mode not in (*_MODES, "circular"):
        raise Unsupported(f"padding mode {mode!r}")
    return pad_axes(g, x, pads, mode, value, node.dtype)


def constant_pad(g: GraphBuilder, node: FxNode) -> Value:
    """constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor"""
    x, pads, value = node.args
    return pad_axes(g, x, pads, "constant", value, node.dtype)


def pad_sequence(g: GraphBuilder, node: FxNode) -> Value:
    """pad_sequence(Tensor[] sequences, bool batch_first=False, float padding_value=0., str padding_side="right") -> Tensor

    Any of the sequences may be the longest. torch's decomposition pads to the sequence that is longest in the example.
    """
    sequences, batch_first, value, side = node.args
    lengths = [g.dim(x, 0) for x in sequences]
    known = [length for length in lengths if isinstance(length, int)]
    if len(known) == len(lengths):
        longest: Any = max(known)
    else:
        longest = g.op.Max(*(g.as_scalar(length) for length in lengths))
    fill = value if node.dtype.is_floating_point() else int(value)
    rows = []
    for x, length in zip(sequences, lengths, strict=True):
        width = longest - length if isinstance(longest, int) else g.op.Sub(longest, g.as_scalar(length))
        widths = (width, 0) if side == "left" else (0, width)
        pads = [0] * (2 * (rank_of(x) - 1)) + list(widths)
        row = pad_axes(g, g.cast(x, node.dtype), pads, "constant", fill, node.dtype)
        rows.append(g.op.Unsqueeze(row, [0 if batch_first else 1]))
    return g.op.Concat(*rows, axis=0 if batch_first else 1)


def padding(mode: str) -> Converter:
    """reflection_pad1d …, replication_pad3d."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, pads = node.args
        return pad_axes(g, x, pads, mode, None, node.dtype)

    convert.__name__ = convert.__qualname__ = f"{mode}_pad"
    return convert


RULES: list[Rule] = [
    Rule("aten::pad.default", pad),
    Rule("aten::constant_pad_nd.default", constant_pad),
    Rule("aten::pad_sequence.default", pad_sequence),
    *[Rule(f"aten::reflection_pad{n}d.default", padding("reflect")) for n in (1, 2, 3)],
    *[Rule(f"aten::replication_pad{n}d.default", padding("replicate")) for n in (1, 2, 3)],
]
