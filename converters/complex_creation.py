"""Complex tensors made from sizes and numbers."""

from __future__ import annotations

import math
from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.complexes import Complex
from onnxplug.converters.helpers.complex_pairs import as_complex, part_dtype
from onnxplug.converters.helpers.fill import filled as fill
from onnxplug.converters.helpers.randomness import normal_like
from onnxplug.converters.helpers.tables import complex_rule
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def full(g: GraphBuilder, node: FxNode) -> Complex:
    """full(SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _filled(g, node, node.args[1])


def new_full(g: GraphBuilder, node: FxNode) -> Complex:
    """new_full(Tensor self, SymInt[] size, Scalar fill_value, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return _filled(g, node, node.args[2])


def zeros(g: GraphBuilder, node: FxNode) -> Complex:
    """zeros(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""
    return _filled(g, node, 0)


def ones(g: GraphBuilder, node: FxNode) -> Complex:
    """ones(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""
    return _filled(g, node, 1)


def _filled(g: GraphBuilder, node: FxNode, value: Any) -> Complex:
    """A number, or a tensor of one element, in every element of the result."""
    dtype = part_dtype(node)
    sizes: list[Any] = [g.size(d) for d in node.shape]
    if isinstance(value, Value | Complex):
        pair = as_complex(g, value, dtype)
        return Complex(fill(g, pair.real, sizes, dtype), fill(g, pair.imag, sizes, dtype))
    number = complex(value)
    return Complex(fill(g, number.real, sizes, dtype), fill(g, number.imag, sizes, dtype))


def random_normal(g: GraphBuilder, node: FxNode) -> Complex:
    """randn(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor

    Each part has variance 1/2.
    """
    dtype = part_dtype(node)
    shape = _filled(g, node, 0).real
    half = g.const(math.sqrt(0.5), dtype)
    return Complex(*(g.op.Mul(normal_like(g, shape, dtype), half) for _ in range(2)))


def scalar_tensor(g: GraphBuilder, node: FxNode) -> Complex:
    """scalar_tensor(Scalar s, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None) -> Tensor"""  # noqa: E501
    return as_complex(g, node.args[0], part_dtype(node))


RULES: list[Rule] = [
    *[complex_rule(name, full) for name in ("full", "full_like", "fill")],
    complex_rule("new_full", new_full),
    *[complex_rule(name, zeros) for name in ("zeros", "zeros_like", "new_zeros", "zero")],
    *[complex_rule(name, ones) for name in ("ones", "ones_like", "new_ones")],
    # Memory that torch leaves uninitialised is zero here.
    *[complex_rule(name, zeros) for name in ("empty", "empty_like", "new_empty", "empty_strided")],
    *[complex_rule(name, zeros) for name in ("new_empty_strided", "empty_permuted")],
    *[complex_rule(name, random_normal) for name in ("randn", "randn_like")],
    complex_rule("scalar_tensor", scalar_tensor),
]
