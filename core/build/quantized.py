"""Quantised tensors of torch (``quint8``, ``qint8``, ``qint32``) as integers with a scale and a zero point.

ONNX has no such element types, and torch.export records these tensors as float32. Through a graph each is a :class:`Quantized`.
Rules for them have a prefix before the operator's name, so that no rule for ordinary tensors reads the integers.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

#: Prefix of the operator's name in rules for quantised arguments.
QUANTIZED_PREFIX = "quantized:"
#: On a restored value (``onnx_ir.Value.meta``) whose integers have 7 bits by the range that it was quantised for.
REDUCED = "onnxplug.reduced"


class Quantized:
    """A quantised tensor: its numbers are ``(integers - zero_point) * scale``.

    Attributes:
        integers: Integers of 8 or 32 bits, of the tensor's shape.
        scale: Float32, 0-dim.
        zero_point: Of the integers' dtype, 0-dim.
    """

    __slots__ = ("integers", "scale", "zero_point")

    def __init__(self, integers: ir.Value, scale: ir.Value, zero_point: ir.Value) -> None:
        self.integers = integers
        self.scale = scale
        self.zero_point = zero_point

    @property
    def shape(self) -> ir.Shape | None:
        """The tensor's shape."""
        return self.integers.shape

    def with_integers(self, integers: ir.Value) -> Quantized:
        """Other integers under the same scale and zero point."""
        return Quantized(integers, self.scale, self.zero_point)

    def __repr__(self) -> str:
        return f"Quantized({self.integers!r}, scale={self.scale!r}, zero_point={self.zero_point!r})"


def is_quantized(argument: Any) -> bool:
    """Whether an argument is a quantised tensor, or a list that holds one."""
    if isinstance(argument, list | tuple):
        return any(map(is_quantized, argument))
    return isinstance(argument, Quantized)
