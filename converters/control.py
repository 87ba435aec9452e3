"""Higher-order operators: graphs within the graph."""

from __future__ import annotations

from typing import Any

from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule


def inlined(g: GraphBuilder, node: FxNode) -> Any:
    """A region under another gradient or autocast mode: what it does is already in its operators; it is put in place."""
    position = next(i for i, a in enumerate(node.args) if hasattr(a, "graph") and hasattr(a, "code"))
    return node.interpret(node.args[position], node.args[position + 1 :])


def cond(g: GraphBuilder, node: FxNode) -> list[Value]:
    """``torch.cond``: an If; each branch reads what it needs from outside."""
    predicate, true_graph, false_graph, operands = node.args
    if not isinstance(predicate, Value):
        return node.interpret(true_graph if predicate else false_graph, operands)
    branches = [
        g.subgraph(lambda m=module: node.interpret(m, operands), name=name)
        for module, name in ((true_graph, "then"), (false_graph, "else"))
    ]
    count = len(node.outputs)
    if not count:
        raise Unsupported("cond without results")
    results = g.op.If(predicate, then_branch=branches[0], else_branch=branches[1], _outputs=count)
    return [results] if count == 1 else list(results)


RULES: list[Rule] = [
    Rule("wrap_with_set_grad_enabled", inlined),
    Rule("wrap_with_autocast", inlined),
    Rule("cond", cond),
]
