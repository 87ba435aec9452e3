"""Estimated operations of nodes, with the branches, bodies of loops and functions that they run."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
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
#: A loop that ends by its condition alone has a limit that no loop reaches: the largest int64 or int32.
_NO_LIMIT = 2**31 - 1


class Bound(NamedTuple):
    """The function that is called, as one call has it.

    Attributes:
        shapes: The shapes of its inputs.
        attributes: The values of its attributes.
    """

    shapes: Mapping[ir.Value, Shape | None]
    attributes: Mapping[str, ir.Attr]


_UNBOUND = Bound({}, {})


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
        self._calls: dict[Hashable, Cost] = {}

    def of(self, node: ir.Node) -> Cost:
        """The operations of a node, and of the nodes that it runs.

        An ``If`` counts its larger branch, and the nodes without an estimate of the branch that has more of them; a loop its
        body as often as it runs at most; a call its function.
        """
        return self._cost(node, _UNBOUND, 0)

    def _cost(self, node: ir.Node, bound: Bound, depth: int) -> Cost:
        if bound is _UNBOUND and node in self._nodes:
            return self._nodes[node]
        bodies = graphs_of(node)
        identifier = node.op_identifier()
        if depth > _DEEPEST:
            cost = _UNKNOWN
        elif bodies:
            cost = self._with_bodies(node, bodies, bound, depth)
        elif identifier in self._functions:
            cost = self._called(node, bound, depth)
        else:
            domain = "" if node.domain == "ai.onnx" else node.domain
            call = Call(
                node.op_type,
                [self._shape(value, bound) for value in node.inputs],
                [self._shape(value, bound) for value in node.outputs],
                _attributes(node, bound),
            )
            flops = estimated(call, domain)
            cost = _UNKNOWN if flops is None else Cost(flops, 0)
        if bound is _UNBOUND:
            self._nodes[node] = cost
        return cost

    def _shape(self, value: ir.Value | None, bound: Bound) -> Shape | None:
        if value is None:
            return None
        if value in bound.shapes:
            return bound.shapes[value]
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
            known = [cost.flops for cost in costs if cost.flops is not None]
            return Cost(max(known, default=None), max(cost.missing for cost in costs))
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
            if tensor is None or isinstance(tensor, ir.ExternalTensor):
                return None
            if tensor.size != 1 or tensor.dtype != ir.DataType.INT64:
                return None
            trips = int(tensor.numpy().item())
            return max(0, trips) if trips < _NO_LIMIT else None
        if node.op_type == "Scan":
            count = node.attributes.get_int("num_scan_inputs", 0) or 0
            axes = node.attributes.get_ints("scan_input_axes", None)
            shape = self._shape(node.inputs[-count], bound) if 0 < count <= len(node.inputs) else None
            axis = axes[0] if axes else 0
            return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        return None

    def _called(self, node: ir.Node, bound: Bound, depth: int) -> Cost:
        identifier = node.op_identifier()
        function = self._functions[identifier]
        shapes = tuple([self._shape(value, bound) for value in node.inputs])
        defaults = {name: each for name, each in function.attributes.items() if each.value is not None}
        given = {name: each for name, each in _attributes(node, bound).items() if name in function.attributes}
        attributes = {**defaults, **given}
        key = (identifier, shapes, tuple((name, _identity(each)) for name, each in attributes.items()))
        known = self._calls.get(key)
        if known is None:
            self._calls[key] = _UNKNOWN  # for a function that calls itself
            operands = (*shapes, *[None] * (len(function.inputs) - len(shapes)))
            inner = Bound(dict(zip(function.inputs, operands, strict=False)), attributes)
            # The shapes of values within a function, where the file has them, hold for every call.
            known = self._calls[key] = self._sum(function, inner, depth + 1)
        return known


def _attributes(node: ir.Node, bound: Bound) -> Mapping[str, ir.Attr]:
    """The attributes of a node; an attribute that refers to one of the called function has the value of the call."""
    if bound is _UNBOUND:
        return node.attributes
    attributes = {}
    for name, attribute in node.attributes.items():
        known = bound.attributes.get(attribute.ref_attr_name or "") if attribute.is_ref() else attribute
        if known is not None:  # without a value, the operator's default holds
            attributes[name] = known
    return attributes


def _identity(attribute: ir.Attr) -> Hashable:
    """Equal for equal numbers and texts, and for the same tensor or graph."""
    value = attribute.value
    return value if isinstance(value, int | float | str | tuple) else id(value)
