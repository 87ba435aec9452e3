"""Variance and standard deviation."""

from __future__ import annotations

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.reductions import variance_arguments, variance_of
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def var(g: GraphBuilder, node: FxNode) -> Value:
    """var.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    axes, correction, keepdim = variance_arguments(node)
    return variance_of(g, node.args[0], axes, correction, keepdim, node.dtype)[0]


def std(g: GraphBuilder, node: FxNode) -> Value:
    """std.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> Tensor"""
    return g.op.Sqrt(var(g, node))


def var_mean(g: GraphBuilder, node: FxNode) -> list[Value]:
    """var_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)"""
    axes, correction, keepdim = variance_arguments(node)
    return list(variance_of(g, node.args[0], axes, correction, keepdim, node.dtype))


def std_mean(g: GraphBuilder, node: FxNode) -> list[Value]:
    """std_mean.correction(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> (Tensor, Tensor)"""
    variance, mean = var_mean(g, node)
    return [g.op.Sqrt(variance), mean]


_OVERLOADS = {"var": var, "std": std, "var_mean": var_mean, "std_mean": std_mean}
RULES: list[Rule] = [
    *[
        Rule(f"aten::{name}.{overload}", convert)
        for name, convert in _OVERLOADS.items()
        for overload in ("default", "dim", "correction")
    ],
]
