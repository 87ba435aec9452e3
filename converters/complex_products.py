"""Products of complex matrices."""

from __future__ import annotations

from functools import partial

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.converters.helpers.complex_pairs import bilinear, both, c_add, c_conj, c_div, c_mul, c_times
from onnxplug.converters.helpers.products import product
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule


def matmul(g: GraphBuilder, node: FxNode) -> Complex:
    """matmul(Tensor self, Tensor other) -> Tensor

    And mm, bmm, mv, dot: four products of real matrices.
    """
    return _product(g, *both(g, node, 0, 1))


def _product(g: GraphBuilder, a: Complex, b: Complex) -> Complex:
    return bilinear(g, partial(product, g), a, b)


def vdot(g: GraphBuilder, node: FxNode) -> Complex:
    """vdot(Tensor self, Tensor other) -> Tensor"""
    x, y = both(g, node, 0, 1)
    return _product(g, c_conj(g, x), y)


def addmm(g: GraphBuilder, node: FxNode) -> Complex:
    """addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    bias, a, b = both(g, node, 0, 1, 2)
    return _combined(g, node, bias, _product(g, a, b))


def _combined(g: GraphBuilder, node: FxNode, bias: Complex, multiplied: Complex) -> Complex:
    """``beta * bias + alpha * product``; a beta of zero drops the bias, also its NaN."""
    beta, alpha = node.args[3:5]
    multiplied = c_times(g, multiplied, alpha)
    return multiplied if not isinstance(beta, Value) and beta == 0 else c_add(g, c_times(g, bias, beta), multiplied)


def add_scaled_product(divide: bool) -> Converter:
    """addcmul, addcdiv."""

    def convert(g: GraphBuilder, node: FxNode) -> Complex:
        x, a, b = both(g, node, 0, 1, 2)
        return c_add(g, x, c_times(g, c_div(g, a, b) if divide else c_mul(g, a, b), node.args[3]))

    convert.__name__ = convert.__qualname__ = "addcdiv" if divide else "addcmul"
    return convert


def addbmm(g: GraphBuilder, node: FxNode) -> Complex:
    """addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor"""
    bias, a, b = both(g, node, 0, 1, 2)
    products = _product(g, a, b)
    total = Complex(*(reduce(g, "ReduceSum", part, [0], False) for part in (products.real, products.imag)))
    return _combined(g, node, bias, total)


RULES: list[Rule] = [
    *[complex_rule(name, matmul) for name in ("matmul", "mm", "bmm", "mv", "dot")],
    complex_rule("vdot", vdot),
    complex_rule("addmm", addmm),
    complex_rule("addcmul", add_scaled_product(divide=False)),
    complex_rule("addcdiv", add_scaled_product(divide=True)),
    complex_rule("addbmm", addbmm),
]
