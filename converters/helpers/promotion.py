"""Type promotion: operands brought to the dtype in which torch computes."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import TORCH_TO_ONNX, to_onnx_dtype
from onnxplug.converters.helpers.dtypes import FLOAT, HALVES
from onnxplug.interpret.node import FxNode


def operand(g: GraphBuilder, x: Any, dtype: torch.dtype | ir.DataType) -> Value:
    """An operand in ``dtype``: a Value is cast, a Python number becomes a shared constant."""
    # Numbers first: to ask them whether they are a Value takes longer than the rest.
    return g.const(x, dtype) if isinstance(x, int | float) or not isinstance(x, Value) else g.cast(x, dtype)


def operands(g: GraphBuilder, *args: Any, dtype: torch.dtype | ir.DataType) -> tuple[Value, ...]:
    """Several operands in one dtype."""
    wanted = to_onnx_dtype(dtype)
    return tuple([operand(g, x, wanted) for x in args])


def operands_in(g: GraphBuilder, *args: Any, dtype: ir.DataType, inner: ir.DataType) -> tuple[Value, ...]:
    """Several operands, converted to ``dtype`` first, as torch does, and then to ``inner``, in which a runtime computes.

    The first conversion wraps integers and rounds floats: -1 becomes 255 in uint8, and 0.1 becomes 0.09998 in float16.
    """
    promoted = operands(g, *args, dtype=dtype)
    return promoted if dtype == inner else operands(g, *promoted, dtype=inner)


def common_dtype(node: FxNode, *positions: int) -> ir.DataType:
    """The dtype to which torch promotes the arguments at these positions, scalars and 0-dim tensors by their category.

    Comparisons need it, because their result's dtype is bool whatever was compared.
    """
    first, *rest = (node.args[p] for p in positions)
    if isinstance(first, Value) and all(isinstance(x, Value) and x.dtype == first.dtype for x in rest):
        assert first.dtype is not None
        return first.dtype
    metas = [_number(node.meta(p)) for p in positions]
    result = metas[0]
    dtype: torch.dtype | None = None
    for other in metas[1:]:
        dtype = torch.result_type(result, other)
        result = other
    if len(metas) > 2:
        tensors = [m for m in metas if isinstance(m, torch.Tensor)]
        for tensor in tensors:
            dtype = torch.promote_types(dtype, tensor.dtype) if dtype is not None else tensor.dtype
    if dtype is None:
        dtype = result.dtype if isinstance(result, torch.Tensor) else torch.get_default_dtype()
    return TORCH_TO_ONNX[dtype]


def _number(value: Any) -> Any:
    """A number of the same category as a symbolic number; promotion depends only on the category."""
    if isinstance(value, torch.SymInt):
        return 1
    if isinstance(value, torch.SymFloat):
        return 1.0
    if isinstance(value, torch.SymBool):
        return True
    return value


def wide(dtype: ir.DataType) -> ir.DataType:
    """The dtype to compute in: float32 for 16-bit floats."""
    return FLOAT if dtype in HALVES else dtype
