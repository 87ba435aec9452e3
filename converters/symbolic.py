"""Arithmetic on sizes: Python's functions on symbolic ints, floats and bools, as the FX graph calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.dtypes import to_onnx_dtype
from onnxplug.converters.helpers.axes import rank_of
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, INT64
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def _number(g: GraphBuilder, x: Any, dtype: ir.DataType) -> Value:
    return g.cast(x, dtype) if isinstance(x, Value) else g.const(x, dtype)


def _is_float(*args: Any) -> bool:
    return any(a.dtype == DOUBLE if isinstance(a, Value) else isinstance(a, float) for a in args)


def arithmetic(op_type: str) -> Converter:
    """``+``, ``-``, ``*``, ``max``, ``min`` on ints, or on floats where one side is a float."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = DOUBLE if _is_float(*node.args) else INT64
        emit = getattr(g.op, op_type)
        result = _number(g, node.args[0], dtype)
        for other in node.args[1:]:
            result = emit(result, _number(g, other, dtype))
        return result

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def floordiv(g: GraphBuilder, node: FxNode) -> Value:
    """Python's ``//``: rounded down, where ONNX's Div of integers rounds towards zero."""
    x, y = node.args
    if _is_float(x, y):
        # As Python: 1.0 // 0.1 is 9.0, though 1.0 / 0.1 is 10.0. Without the remainder the quotient is whole but for its rounding.
        return g.op.Round(g.op.Div(g.op.Sub(_number(g, x, DOUBLE), mod(g, node)), _number(g, y, DOUBLE)))
    a, b = _number(g, x, INT64), _number(g, y, INT64)
    # a - a mod b divides evenly; ONNX's Mod has the divisor's sign, as Python's. A quotient of a non-negative and a

    # positive number needs no correction.
    if _sign(node, 0, x, "is_nonnegative") and _sign(node, 1, y, "is_positive"):
        result = g.op.Div(a, b)
        return result
    result = g.op.Div(g.op.Sub(a, g.op.Mod(a, b)), b)
    return result


def _sign(node: FxNode, position: int, x: Any, question: str) -> bool:
    """Whether an argument is surely not negative (``is_nonnegative``) or positive (``is_positive``)."""
    if isinstance(x, int):
        return x > 0 or (x == 0 and question == "is_nonnegative")
    expr = getattr(getattr(node.meta(position), "node", None), "expr", None)
    return expr is not None and bool(getattr(expr, question))


def truediv(g: GraphBuilder, node: FxNode) -> Value:
    """Python's ``/``."""
    x, y = node.args
    return g.op.Div(_number(g, x, DOUBLE), _number(g, y, DOUBLE))


def mod(g: GraphBuilder, node: FxNode) -> Value:
    """Python's ``%``: the remainder has the divisor's sign, as that of ONNX's Mod of ints."""
    x, y = node.args
    if not _is_float(x, y):
        return g.op.Mod(_number(g, x, INT64), _number(g, y, INT64))
    divisor, zero = _number(g, y, DOUBLE), g.const(0.0, DOUBLE)
    rest = g.op.Mod(_number(g, x, DOUBLE), divisor, fmod=1)
    other_sign = g.op.Less(g.op.Mul(g.op.Sign(rest), g.op.Sign(divisor)), zero)
    return g.op.Where(other_sign, g.op.Add(rest, divisor), rest)


def pow_(g: GraphBuilder, node: FxNode) -> Value:
    """Python's ``**``."""
    x, y = node.args
    dtype = DOUBLE if _is_float(x, y) or (isinstance(y, int) and y < 0) else INT64
    if dtype == INT64 and isinstance(y, int) and 0 < y <= 8:
        base = _number(g, x, INT64)
        result = base
        for _ in range(y - 1):
            result = g.op.Mul(result, base)
        return result
    result = g.op.Pow(_number(g, x, dtype), _number(g, y, dtype))
    return result


def neg(g: GraphBuilder, node: FxNode) -> Value:
    """Unary minus."""
    return g.op.Neg(node.args[0])


def pos(g: GraphBuilder, node: FxNode) -> Value:
    """Unary plus."""
    return node.args[0]


def absolute(g: GraphBuilder, node: FxNode) -> Value:
    """``abs`` of an int or a float."""
    return g.op.Abs(node.args[0])


def shift(left: bool) -> Converter:
    """``<<`` and ``>>`` of ints: a product with a power of two, and a quotient rounded down."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, by = (_number(g, a, INT64) for a in node.args)
        power = g.op.Pow(g.const(2), by)
        return g.op.Mul(x, power) if left else g.op.Div(g.op.Sub(x, g.op.Mod(x, power)), power)

    convert.__name__ = convert.__qualname__ = "lshift" if left else "rshift"
    return convert


def compare(op_type: str, *, negate: bool = False) -> Converter:
    """``==``, ``<`` and the like."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args
        dtype = DOUBLE if _is_float(x, y) else INT64
        result: Value = getattr(g.op, op_type)(_number(g, x, dtype), _number(g, y, dtype))
        return g.op.Not(result) if negate else result

    convert.__name__ = convert.__qualname__ = ("not_" if negate else "") + op_type.lower()
    return convert


def logic(op_type: str) -> Converter:
    """``&``, ``|`` of symbolic bools, or bitwise of ints."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x, y = node.args
        if any(a.dtype == BOOL if isinstance(a, Value) else isinstance(a, bool) for a in (x, y)):
            return getattr(g.op, op_type)(_number(g, x, BOOL), _number(g, y, BOOL))
        if g.opset < 18:
            raise Unsupported("bitwise operators on sizes before opset 18", hint="Export with a newer opset.")
        return getattr(g.op, f"Bitwise{op_type}")(_number(g, x, INT64), _number(g, y, INT64))

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def not_(g: GraphBuilder, node: FxNode) -> Value:
    """``not`` of a symbolic bool."""
    return g.op.Not(_number(g, node.args[0], BOOL))


def to_float(g: GraphBuilder, node: FxNode) -> Value:
    """A size as a float."""
    return _number(g, node.args[0], DOUBLE)


def rounded(op_type: str) -> Converter:
    """``math.floor``, ``math.ceil``, ``int()``: a float to an int."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = node.args[0]
        if not _is_float(x):
            return _number(g, x, INT64)
        value = _number(g, x, DOUBLE)
        return g.cast(getattr(g.op, op_type)(value) if op_type != "Cast" else value, INT64)

    convert.__name__ = convert.__qualname__ = op_type.lower()
    return convert


def round_(g: GraphBuilder, node: FxNode) -> Value:
    """``round``: halves to even."""
    if len(node.args) > 1 and node.args[1] is not None:
        raise Unsupported(
            "round of a size to a number of digits", hint="Round to a whole number, or the result of tensors."
        )
    return rounded("Round")(g, node)


def sqrt(g: GraphBuilder, node: FxNode) -> Value:
    """``math.sqrt``."""
    return g.op.Sqrt(_number(g, node.args[0], DOUBLE))


def ite(g: GraphBuilder, node: FxNode) -> Value:
    """One of two sizes by a symbolic bool."""
    condition, x, y = node.args
    dtype = DOUBLE if _is_float(x, y) else INT64
    return g.op.Where(_number(g, condition, BOOL), _number(g, x, dtype), _number(g, y, dtype))


def sym_sum(g: GraphBuilder, node: FxNode) -> Value:
    """The sum of a list of sizes."""
    items = list(node.args[0])
    result = _number(g, items[0], INT64)
    for item in items[1:]:
        result = g.op.Add(result, _number(g, item, INT64))
    return result


def sym_size(g: GraphBuilder, node: FxNode) -> Value | int:
    """sym_size.int(Tensor self, int dim) -> SymInt"""
    x, axis = node.args
    return g.dim(x, axis)


def sym_numel(g: GraphBuilder, node: FxNode) -> Value:
    """sym_numel(Tensor self) -> SymInt"""
    return g.op.Size(node.args[0])


def of_memory(schema: str) -> Callable[[GraphBuilder, FxNode], Any]:
    """The converter for a number about a tensor's layout in memory: its value in torch's trace."""

    def convert(g: GraphBuilder, node: FxNode) -> Any:
        return g.size(g.interpreter.dim(node.fx.meta["val"]))

    convert.__doc__ = schema
    return convert


def item(g: GraphBuilder, node: FxNode) -> Value:
    """item(Tensor self) -> Scalar"""
    x = node.args[0]
    scalar = g.reshape(x, []) if rank_of(x) else x
    spec = node.outputs[0]
    return g.cast(scalar, spec.dtype if spec is not None else to_onnx_dtype(x.dtype))


_ARITHMETIC = {"add": "Add", "sub": "Sub", "mul": "Mul"}
_COMPARE = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}


RULES: list[Rule] = [
    Rule("aten::sym_storage_offset.default", of_memory("sym_storage_offset(Tensor self) -> SymInt")),
    *[Rule(f"_operator::{name}", arithmetic(op)) for name, op in _ARITHMETIC.items()],
    Rule("_operator::floordiv", floordiv),
    Rule("_operator::truediv", truediv),
    Rule("_operator::mod", mod),
    Rule("_operator::pow", pow_),
    Rule("_operator::neg", neg),
    Rule("_operator::pos", pos),
    Rule("_operator::abs", absolute),
    Rule("_operator::lshift", shift(True)),
    Rule("_operator::rshift", shift(False)),
    *[Rule(f"_operator::{name}", compare(op)) for name, op in _COMPARE.items()],
    Rule("_operator::ne", compare("Equal", negate=True)),
    Rule("_operator::and_", logic("And")),
    Rule("_operator::or_", logic("Or")),
    Rule("_operator::not_", not_),
    Rule("torch::sym_not", not_),
    Rule("torch::sym_float", to_float),
    Rule("torch::sym_int", rounded("Cast")),
    Rule("torch::sym_max", arithmetic("Max")),
    Rule("torch::sym_min", arithmetic("Min")),
    Rule("torch::sym_sum", sym_sum),
    Rule("torch::sym_ite", ite),
    Rule("math::floor", rounded("Floor")),
    Rule("math::ceil", rounded("Ceil")),
    Rule("math::trunc", rounded("Cast")),
    Rule("builtins::round", round_),
    Rule("math::sqrt", sqrt),
    Rule("torch::_sym_sqrt", sqrt),
    Rule("aten::sym_size.int", sym_size),
    Rule("aten::sym_numel.default", sym_numel),
    Rule("aten::sym_stride.int", of_memory("sym_stride.int(Tensor self, int dim) -> SymInt")),
    Rule("aten::item.default", item),
    Rule("aten::_local_scalar_dense.default", item),
]
