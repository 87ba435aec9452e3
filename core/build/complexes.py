"""Complex tensors as two real tensors.

ONNX has complex element types, but neither operators nor ONNX Runtime compute with them. Through a whole graph a complex
tensor is a :class:`Complex`, its real and its imaginary part. As an input or output of the model it is one real tensor
with a last axis of size 2, as ``torch.view_as_real`` makes it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

#: Element type of the parts.
PART_DTYPE = {ir.DataType.COMPLEX64: ir.DataType.FLOAT, ir.DataType.COMPLEX128: ir.DataType.DOUBLE}
#: Prefix of the operator's name in rules for complex arguments or results.
COMPLEX_PREFIX = "complex:"


class Complex:
    """A complex tensor.

    Attributes:
        real, imag: Its parts, of one dtype and shape.
    """

    __slots__ = ("imag", "real")

    def __init__(self, real: ir.Value, imag: ir.Value) -> None:
        self.real = real
        self.imag = imag

    @property
    def dtype(self) -> ir.DataType | None:
        """The complex element type."""
        return ir.DataType.COMPLEX128 if self.real.dtype == ir.DataType.DOUBLE else ir.DataType.COMPLEX64

    @property
    def shape(self) -> ir.Shape | None:
        """The shape of either part."""
        return self.real.shape

    def __repr__(self) -> str:
        return f"Complex({self.real!r}, {self.imag!r})"


def from_pairs(g: Any, value: ir.Value) -> Complex:
    """A complex tensor from a real tensor whose last axis holds real and imaginary part."""
    return Complex(g.op.Gather(value, g.const(0), axis=-1), g.op.Gather(value, g.const(1), axis=-1))


def to_pairs(g: Any, value: Complex) -> ir.Value:
    """Both parts on a last axis of size 2."""
    sizes = list(value.real.shape) if value.real.shape is not None else [None]
    if 0 in sizes and all(isinstance(size, int) for size in sizes):
        # ONNX Runtime's Concat skips empty operands, and forgets the axis of two.
        return g.op.Expand(g.const(0, value.real.dtype), g.vector([*sizes, 2]))
    last = g.const([-1])
    return g.op.Concat(g.op.Unsqueeze(value.real, last), g.op.Unsqueeze(value.imag, last), axis=-1)


def complex_constant(g: Any, value: Any, dtype: ir.DataType) -> Complex:
    """A Python number, numpy array or tensor as a complex constant.

    Args:
        g: The builder.
        value: The number or array.
        dtype: Element type of the parts.
    """
    import numpy as np
    import torch

    array = value.detach().cpu().resolve_conj().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    return Complex(g.const(np.array(array.real), dtype), g.const(np.array(array.imag), dtype))


def touches_complex(val: Any, args: Any) -> bool:
    """Whether a node computes with complex numbers: its result (``meta["val"]``) or an argument is complex."""
    values = val if isinstance(val, list | tuple) else (val,)
    if any(getattr(getattr(v, "dtype", None), "is_complex", False) for v in values):
        return True
    return any(
        type(a) in (Complex, complex) or (type(a) in (list, tuple) and any(type(b) in (Complex, complex) for b in a))
        for a in args
    )
