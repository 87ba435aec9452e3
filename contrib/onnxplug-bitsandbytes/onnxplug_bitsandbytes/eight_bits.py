"""LLM.int8(): converters.

A row of activations is quantised by its largest magnitude ``a``, ``q = round(127 x / a)``, and so is a row of the weight: the
product of the bytes is exact, and is multiplied by both factors. Columns that hold outliers are multiplied in floating point.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxplug import Unsupported
from onnxplug.registry.target import is_onnxruntime_cpu

_FLOAT = ir.DataType.FLOAT
#: bitsandbytes' own roundings of 1 / 127 and of its square.
_INVERSE, _SQUARE = 7.874015718698502e-3, 6.200124e-05


def int8_vectorwise_quant(g: Any, node: Any) -> Any:
    """int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)

    The rows in bytes, their largest magnitudes without outliers, and the indices of the columns with outliers, whose
    bytes are 0. A quotient that is NaN gives 0, too: in a row of zeros, of infinity.
    """
    x, threshold = node.args
    wide, columns = g.cast(x, _FLOAT), None
    if threshold:
        is_outlier = g.op.GreaterOrEqual(g.op.Abs(wide), g.cast(g.const(threshold, x.dtype), _FLOAT))
        counts = _reduced(g, "ReduceSum", g.cast(is_outlier, _FLOAT), 0)
        in_column = g.op.Greater(counts, g.const(0.0, _FLOAT))
        columns = g.op.Reshape(g.op.NonZero(in_column), g.const([-1]))
        wide = g.op.Where(is_outlier, g.const(0.0, _FLOAT), wide)
    largest = _reduced(g, "ReduceMax", g.op.Abs(wide), 1)
    if g.exact:  # ONNX Runtime's maximum skips NaN
        some_nan = g.op.Greater(_reduced(g, "ReduceSum", g.cast(g.op.IsNaN(wide), _FLOAT), 1), g.const(0.0, _FLOAT))
        largest = g.op.Where(some_nan, g.const(float("nan"), _FLOAT), largest)
    factors = g.op.Unsqueeze(largest, g.const([1]))
    # 127.0 / x is the reciprocal times 127 in PyTorch: two roundings, which decide levels near a half.
    levels = g.op.Round(g.op.Mul(wide, g.op.Mul(g.op.Reciprocal(factors), g.const(127.0, _FLOAT))))
    keep = g.op.LessOrEqual(g.op.Abs(levels), g.const(127.0, _FLOAT))  # NaN, as in rows of zeros, gives 0
    if threshold:
        keep = g.op.And(keep, g.op.Not(in_column))
    return g.cast(g.op.Where(keep, levels, g.const(0.0, _FLOAT)), ir.DataType.INT8), largest, columns


def int8_vectorwise_dequant(g: Any, node: Any) -> Any:
    """int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor"""
    levels, largest = node.args
    return _restored(g, g.cast(levels, _FLOAT), g.op.Reshape(largest, g.const([-1, 1])))


def int8_linear_matmul(g: Any, node: Any) -> Any:
    """int8_linear_matmul(Tensor A, Tensor B) -> Tensor"""
    levels, weight = node.args
    return _product(g, levels, weight)


def int8_mm_dequant(g: Any, node: Any) -> Any:
    """int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None) -> Tensor"""
    product, rows, columns, _, bias = node.args
    return g.cast(_dequantised(g, product, rows, columns, bias), node.dtype)


def int8_scaled_mm(g: Any, node: Any) -> Any:
    """int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None, ScalarType? dtype=None) -> Tensor"""  # noqa: E501
    levels, weight, rows, columns, bias, _ = node.args
    return g.cast(_dequantised(g, _product(g, levels, weight), rows, columns, bias), node.dtype)


def int8_mixed_scaled_mm(g: Any, node: Any) -> Any:
    """int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, Tensor? bias=None) -> (Tensor, Tensor?)

    The columns of the weight are restored where A has outliers. The second result, the columns of A with outliers, is
    for gradients. bitsandbytes declares it as int64 [n], which it isn't: a tensor of that dtype and rank stands for it,
    as nothing reads it.
    """  # noqa: E501
    x, levels, weight, rows, columns, outliers, bias = node.args
    if _reads_second(node.fx):
        raise Unsupported("the columns of outliers, which bitsandbytes keeps for gradients, are read")
    dtype = node.outputs[0].dtype
    result = g.cast(_dequantised(g, _product(g, levels, weight), rows, columns, bias), dtype)
    if outliers is None:
        return result, g.const([], ir.DataType.INT64)
    taken = g.op.Gather(x, outliers, axis=1)
    chosen = g.cast(g.op.Gather(_transposed(g, weight), outliers, axis=0), _FLOAT)
    if _is_unsigned(g):
        chosen = g.op.Sub(chosen, g.const(128.0, _FLOAT))
    restored = g.cast(_restored(g, chosen, g.op.Reshape(columns, g.const([1, -1]))), dtype)
    more = g.op.MatMul(g.cast(taken, _FLOAT), g.cast(restored, _FLOAT))
    return g.cast(g.op.Add(g.cast(result, _FLOAT), more), dtype), outliers


def _reads_second(fx: torch.fx.Node) -> bool:
    """Whether the second result is read for more than its size, which torch.export checks."""
    readers = [reader for result in fx.users if result.args[1:] == (1,) for reader in result.users]
    return any(reader.op == "output" or isinstance(reader.meta.get("val"), torch.Tensor) for reader in readers)


def _product(g: Any, levels: Any, weight: Any) -> Any:
    """The product with the rows of the weight, in integers."""
    if not _is_unsigned(g):
        return g.op.MatMulInteger(levels, _transposed(g, weight))
    zero = g.const(128, ir.DataType.UINT8)
    return g.op.MatMulInteger(_unsigned(g, levels), _transposed(g, weight), zero, zero)


def _is_unsigned(g: Any) -> bool:
    """Whether bytes are stored unsigned, with a zero point of 128.

    ONNX Runtime's sums of products with signed bytes saturate on x86 processors without VNNI.
    """
    return is_onnxruntime_cpu(g.runtime)


def _unsigned(g: Any, levels: Any) -> Any:
    producer = levels.producer()
    if producer is not None and producer.op_type == "Cast" and producer.inputs[0].dtype == _FLOAT:
        numbers = producer.inputs[0]
    else:
        numbers = g.cast(levels, _FLOAT)
    return g.cast(g.op.Add(numbers, g.const(128.0, _FLOAT)), ir.DataType.UINT8)


def _transposed(g: Any, weight: Any) -> Any:
    """The transposed weight, [in, out]; a weight of the model is stored so."""
    if not g.is_weight(weight):
        columns = g.op.Transpose(weight, perm=[1, 0])
        return _unsigned(g, columns) if _is_unsigned(g) else columns
    if _is_unsigned(g):
        return g.derive(weight, _unsigned_columns, "unsigned columns", form="transposed")
    return g.derive(weight, lambda t: t.t().contiguous(), "columns", form="transposed")


def _unsigned_columns(weight: torch.Tensor) -> torch.Tensor:
    return (weight.t().to(torch.int16) + 128).to(torch.uint8)


def _dequantised(g: Any, product: Any, rows: Any, columns: Any, bias: Any) -> Any:
    """The product in float, multiplied by its factors in bitsandbytes' order."""
    factors = g.op.Mul(g.op.Reshape(rows, g.const([-1, 1])), g.op.Reshape(columns, g.const([1, -1])))
    result = g.op.Mul(g.op.Mul(g.cast(product, _FLOAT), factors), g.const(_SQUARE, _FLOAT))
    return result if bias is None else g.op.Add(result, g.cast(bias, _FLOAT))


def _restored(g: Any, levels: Any, factors: Any) -> Any:
    return g.op.Mul(g.op.Mul(levels, factors), g.const(_INVERSE, _FLOAT))


def _reduced(g: Any, name: str, x: Any, axis: int) -> Any:
    """A reduction along an axis, which is removed; ReduceMax takes the axis as an attribute before opset 18."""
    if name == "ReduceMax" and g.opset < 18:
        return g.op.ReduceMax(x, axes=[axis], keepdims=0)
    return getattr(g.op, name)(x, g.const([axis]), keepdims=0)
