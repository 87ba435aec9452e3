"""Estimated operations of nodes, with the branches, bodies of loops and functions that they run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import onnx_ir as ir

from onnxplug.build.scope import graphs_of
from onnxplug_tools.inspection.dims import shape_of
from onnxplug_tools.inspection.flops import Call, Shape, estimated

#: The deepest nesting of functions and bodies; nodes of deeper ones have no estimate.
_DEEPEST = 50


class Cost(NamedTuple):
    """The operations of a node.

    Attributes:
        flops: Operations, as far as there are estimates; ``None`` where there is none.
        missing: Number of nodes without an estimate: the node itself, or nodes that it runs.
    """

    flops: int | None
    missing: int


_UNKNOWN = Cost(None, 1)
#: The shapes of the inputs of the function that is called.
Bound = Mapping[ir.Value, Shape | None]
_UNBOUND: Bound = {}


class Costs:
    """Estimates for the nodes of one model.

    Args:
        sizes: Sizes of dynamic dimensions by name.
    """

    def __init__(self, model: ir.Model, sizes: Mapping[str, int]) -> None:
        self._functions = model.functions
        self._sizes = sizes
        self._shapes: dict[ir.Value, Shape | None] = {}
        self._nodes: dict[ir.Node, Cost] = {}
        self._calls: dict[tuple[ir.OperatorIdentifier, tuple[Shape | None, ...]], Cost] = {}

    def of(self, node: ir.Node) -> Cost:
        """The operations of a node, and of the nodes that it runs.

        An ``If`` counts its larger branch, a loop its body as often as it runs at most, a call its function.
        """
        return self._cost(node, _UNBOUND, 0)

    def _cost(self, node: ir.Node, bound: Bound, depth: int) -> Cost:
        if not bound and node in self._nodes:
            return self._nodes[node]
        bodies = graphs_of(node)
        identifier = node.op_identifier()
        if depth > _DEEPEST:
            cost = _UNKNOWN
        elif bodies:
            cost = self._with_bodies(node, bodies, bound, depth)
        elif identifier in self._functions:
            cost = self._called(identifier, tuple([self._shape(v, bound) for v in node.inputs]), depth)
        else:
            domain = "" if node.domain == "ai.onnx" else node.domain
            call = Call(
                node.op_type,
                [self._shape(value, bound) for value in node.inputs],
                [self._shape(value, bound) for value in node.outputs],
                node.attributes,
            )
            flops = estimated(call, domain)
            cost = _UNKNOWN if flops is None else Cost(flops, 0)
        if not bound:
            self._nodes[node] = cost
        return cost

    def _shape(self, value: ir.Value | None, bound: Bound) -> Shape | None:
        if value is None:
            return None
        if value in bound:
            return bound[value]
        if value not in self._shapes:
            shape = value.shape
            dims = None if shape is None else [d if isinstance(d, int) else d.value for d in shape]
            self._shapes[value] = shape_of(dims, self._sizes)
        return self._shapes[value]

    def _sum(self, nodes: Iterable[ir.Node], bound: Bound, depth: int) -> Cost:
        flops, missing, known = 0, 0, False
        for node in nodes:
            cost = self._cost(node, bound, depth)
            missing += cost.missing
            if cost.flops is not None:
                flops, known = flops + cost.flops, True
        return Cost(flops if known or not missing else None, missing)

    def _with_bodies(self, node: ir.Node, bodies: Iterable[ir.Graph], bound: Bound, depth: int) -> Cost:
        costs = [self._sum(body, bound, depth + 1) for body in bodies]
        if node.op_type == "If" and not node.domain:
            return max(costs, key=lambda cost: (cost.flops or 0, cost.missing))
        runs = self._runs(node, bound)
        if runs is None or len(costs) != 1:
            return _UNKNOWN
        cost = costs[0]
        return Cost(None if cost.flops is None else runs * cost.flops, cost.missing)

    def _runs(self, node: ir.Node, bound: Bound) -> int | None:
        """How often the body of a loop runs, at most; ``None`` where it is not known."""
        if node.domain or not node.inputs:
            return None
        if node.op_type == "Loop":
            limit = node.inputs[0]
            tensor = None if limit is None else ir.convenience.get_const_tensor(limit)
            if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.size != 1:
                return None
            return max(0, int(tensor.numpy().item()))
        if node.op_type == "Scan":
            count = node.attributes.get_int("num_scan_inputs", 0) or 0
            axes = node.attributes.get_ints("scan_input_axes", None)
            shape = self._shape(node.inputs[-count], bound) if 0 < count <= len(node.inputs) else None
            axis = axes[0] if axes else 0
            return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        return None

    def _called(self, identifier: ir.OperatorIdentifier, shapes: tuple[Shape | None, ...], depth: int) -> Cost:
        key = (identifier, shapes)
        known = self._calls.get(key)
        if known is None:
            self._calls[key] = _UNKNOWN  # for a function that calls itself
            function = self._functions[identifier]
            operands = (*shapes, *[None] * (len(function.inputs) - len(shapes)))
            bound = dict(zip(function.inputs, operands, strict=False))
            # The shapes of values within a function, where the file has them, hold for every call.
            known = self._calls[key] = self._sum(function, bound, depth + 1)
        return known
