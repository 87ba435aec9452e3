"""Integers of four bits, two in a byte, which ai.onnx has since opset 21."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build import dtypes
from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import UsageError

_BOUNDS = {ir.DataType.INT4: (-8, 7), ir.DataType.UINT4: (0, 15)}
#: The opset since which there are such dtypes, and DequantizeLinear takes scales by block.
SINCE = dtypes.SINCE[ir.DataType.INT4]


def nibble_dtype(low: object, high: object) -> ir.DataType | None:
    """The 4-bit dtype that holds a range, ``None`` where there is none."""
    if not isinstance(low, int) or not isinstance(high, int):
        return None
    return next((d for d, (least, most) in _BOUNDS.items() if least <= low and high <= most), None)


def fits(tensor: torch.Tensor | None, dtype: ir.DataType) -> bool:
    """Whether a 4-bit dtype holds every number of an integer tensor."""
    if tensor is None or tensor.is_floating_point() or tensor.is_complex():
        return False
    low, high = _BOUNDS[dtype]
    return not tensor.numel() or (int(tensor.min()) >= low and int(tensor.max()) <= high)


def pack(tensor: torch.Tensor, dtype: ir.DataType) -> ir.PackedTensor[np.ndarray]:
    """An integer tensor in four bits an element, the first of two in the low half of a byte.

    Raises:
        UsageError: It has numbers that four bits don't hold.
    """
    if not fits(tensor, dtype):
        low, high = _BOUNDS[dtype]
        raise UsageError(
            f"the model stores this weight in 4 bits, {low} to {high}; the new one is {tensor.dtype} or goes beyond",
            hint="Export the model again, with the new weights.",
        )
    flat = tensor.detach().reshape(-1).to(torch.uint8) & 15
    if flat.numel() % 2:
        flat = torch.cat([flat, flat.new_zeros(1)])
    packed = flat[0::2] | (flat[1::2] << 4)
    return ir.PackedTensor(packed.cpu().numpy(), dtype, shape=tuple(tensor.shape))


def as_nibbles(
    g: GraphBuilder,
    x: Value,
    dtype: ir.DataType,
    arrange: Callable[[torch.Tensor], torch.Tensor],
    key: str,
) -> Value | None:
    """A stored integer tensor in four bits, ``arrange``d before; ``None`` where it isn't known or doesn't fit."""
    tensor = g.stored(x)
    if tensor is None or not fits(tensor, dtype):
        return None
    return g.derive(x, lambda t: pack(arrange(t), dtype), (key, dtype), form="packed")
