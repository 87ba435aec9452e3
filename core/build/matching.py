"""Conditions of patterns: which node makes a value, which reads it, and whether two sizes are known to be equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is one of these operators of ai.onnx."""
    return node is not None and not node.domain and node.op_type in op_types


def made_by(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The node that makes a value, if it is one of these operators of ai.onnx."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type in op_types and not node.domain else None


def reads(*op_types: str) -> Callable[[ir.Node], bool]:
    """A condition: a node reads the result of one of these operators of ai.onnx."""
    wanted = frozenset(op_types)

    def condition(node: ir.Node) -> bool:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.op_type in wanted and not producer.domain:
                return True
        return False

    return condition


def read_by(*op_types: str) -> Callable[[ir.Node], bool]:
    """A condition: one of these operators of ai.onnx reads a node's first result."""
    wanted = frozenset(op_types)

    def condition(node: ir.Node) -> bool:
        return any(use.node.op_type in wanted and not use.node.domain for use in node.outputs[0].uses())

    return condition


def reads_stored(node: ir.Node) -> bool:
    """A condition: a node's first input is made by no node; it is a weight, a constant or an input."""
    value = node.inputs[0]
    return value is not None and value.producer() is None


def used_once(value: ir.Value | None) -> bool:
    """Whether a value has one use, in the graph of its own node and no graph within, and is not an output of the graph."""
    if value is None or value.is_graph_output():
        return False
    readers, producer = [use.node for use in value.uses()], value.producer()
    return len(readers) == 1 and (producer is None or readers[0].graph is producer.graph)


def only_reader(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The only reader of a value, if it is one of these operators of ai.onnx and in the same graph."""
    if not used_once(value) or value.producer() is None:
        return None
    (node,) = value.consumers()
    return node if is_op(node, *op_types) else None


def attribute_values(node: ir.Node) -> dict[str, Any]:
    """A node's attributes by name, to emit another node with them."""
    return {name: attribute.value for name, attribute in node.attributes.items()}


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An attribute's value, or the operator's default."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def same_size(a: Any, b: Any) -> bool:
    """Whether two dimensions are known to be of one size."""
    if isinstance(a, int) or isinstance(b, int):
        return bool(a == b)
    return a is not None and b is not None and a.value is not None and a.value == b.value


def same_sizes(a: Sequence[Any] | ir.Shape, b: Sequence[Any] | ir.Shape) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))
