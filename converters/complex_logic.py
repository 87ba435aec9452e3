"""Complex tensors: equality, tests of elements, logic."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import PART_DTYPE, Complex
from onnxplug.converters.helpers.complex_pairs import as_complex, nonzero
from onnxplug.converters.helpers.dtypes import BOOL
from onnxplug.converters.helpers.promotion import common_dtype
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def equality(negate: bool) -> Converter:
    """eq, ne: of both parts."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        dtype = PART_DTYPE[common_dtype(node, 0, 1)]
        x, y = (as_complex(g, a, dtype) for a in node.args)
        same = g.op.And(g.op.Equal(x.real, y.real), g.op.Equal(x.imag, y.imag))
        return g.op.Not(same) if negate else same

    convert.__name__ = convert.__qualname__ = "ne" if negate else "eq"
    return convert


def test_parts(op_type: str, every: bool = False) -> Converter:
    """isnan, isinf: of either part; isfinite: of both."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        x = node.args[0]
        if every:
            bad = [g.op.Or(g.op.IsNaN(p), g.op.IsInf(p)) for p in (x.real, x.imag)]
            return g.op.Not(g.op.Or(*bad))
        result = g.op.Or(getattr(g.op, op_type)(x.real), getattr(g.op, op_type)(x.imag))
        return result

    convert.__name__ = convert.__qualname__ = "isfinite" if every else op_type.lower()
    return convert


def logical(op_type: str) -> Converter:
    """logical_and, logical_or, logical_xor, logical_not of complex numbers: every number other than 0 is true."""

    def convert(g: GraphBuilder, node: FxNode) -> Value:
        truths = [nonzero(g, a) if isinstance(a, Complex) else g.cast(a, BOOL) for a in node.args]
        return getattr(g.op, op_type)(*truths)

    convert.__name__ = convert.__qualname__ = f"logical_{op_type.lower()}"
    return convert


RULES: list[Rule] = [
    complex_rule("eq", equality(negate=False)),
    complex_rule("ne", equality(negate=True)),
    complex_rule("isnan", test_parts("IsNaN")),
    complex_rule("isinf", test_parts("IsInf")),
    complex_rule("isfinite", test_parts("", every=True)),
    *[complex_rule(f"logical_{op.lower()}", logical(op)) for op in ("And", "Or", "Xor", "Not")],
]
