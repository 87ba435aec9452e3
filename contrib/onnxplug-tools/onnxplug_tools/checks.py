"""``checks=True``: ranges of sizes, relations between them, and assertions on data as nodes that fail when the model runs.

ONNX has no operator that asserts. A Reshape of an input to the shape that it must have does the same: it costs nothing,
and the error of a runtime that can't do it has the node's name, which states the condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.expressions import SizeComputer
from onnxplug.build.provenance import Named, Provenance
from onnxplug.capture.dimensions import in_names
from onnxplug.capture.signature import Captured, InputKind, InputSlot
from onnxplug.errors import Unsupported, UsageError
from onnxplug.interpret.ranges import is_at_least_two, ranges

#: A size that no input has. A negative size would do for ONNX Runtime, but NumPy takes it for a size to infer.
_IMPOSSIBLE = 2**40


#: Where the nodes of checks come from.
_CHECK = Provenance("onnxplug", "check", place="checks")


def insert(
    graph: ir.Graph,
    builder: GraphBuilder,
    captured: Captured,
    slots: Sequence[InputSlot],
    messages: Sequence[str],
) -> None:
    """Puts all checks into a finished graph; the parameters are those of :func:`insert_checks` and :func:`insert_assertions`."""
    insert_assertions(graph, builder, messages)
    insert_checks(graph, builder, captured, slots)


def insert_checks(graph: ir.Graph, builder: GraphBuilder, captured: Captured, slots: Sequence[InputSlot]) -> None:
    """Puts the checks between the inputs of a finished graph and the nodes that read them.

    Args:
        graph: The graph; it is changed. It comes here after the rewrites, which would remove a Reshape that changes nothing.
        captured: The capture, with ranges, names and conditions.
    """
    checks = _Checks(graph, builder, captured, slots)
    for value, slot in checks.tensors():
        readers = list(value.uses())
        checked = checks.check(value, slot)
        for node, position in readers if checked is not value else ():
            node.replace_input_with(position, checked)
    checks.insert()


def insert_assertions(graph: ir.Graph, builder: GraphBuilder, messages: Sequence[str]) -> None:
    """Makes the last outputs of a finished graph, conditions on data, checks of its first output.

    Args:
        messages: For each condition, the message for where it does not hold.
    """
    if not messages:
        return
    conditions = [graph.outputs.pop() for _ in messages][::-1]
    if not graph.outputs:
        return
    result = graph.outputs[0]
    g = GraphBuilder(builder.opsets, optimize=False, runtime=builder.runtime, operators=builder.operators)
    name, kind, shape = result.name, result.type, result.shape
    result.name = builder.names.unique(f"{name}_unchecked")
    value = result
    named: dict[int, str] = {}
    for condition, message in zip(conditions, messages, strict=True):
        holds = g.op.Reshape(condition, g.const(np.ones(1, np.int64)))
        if shape is not None and not len(shape):
            # At opset 13, ONNX Runtime removes the Reshape of a scalar: here an index out of range is the check.
            missing = g.op.Cast(g.op.Not(g.op.Squeeze(holds, [0])), to=ir.DataType.INT64)
            value = g.op.Gather(g.op.Unsqueeze(value, [0]), missing)
        else:
            impossible = g.const([_IMPOSSIBLE, *[1] * (len(shape) - 1 if shape is not None else 0)])
            # Abs as for the sizes: ONNX Runtime must not see how the shape is computed.
            expected = g.op.Abs(g.op.Where(holds, g.op.Shape(value), impossible))
            value = g.op.Reshape(value, expected, allowzero=_allowzero(g))
        named[id(value)] = f"check: {message}"
    nodes = g.scope.live([value])
    _name(nodes, builder, named)
    value.name, value.type, value.shape = name, kind, shape
    graph.extend(nodes)
    graph.outputs[0] = value


def _allowzero(g: GraphBuilder) -> int | None:
    return 1 if g.opset >= 14 else None


def _name(nodes: Sequence[ir.Node], builder: GraphBuilder, words: Mapping[int, str]) -> None:
    """Names the nodes of checks; ``words`` has the names of the nodes that fail."""
    for node in nodes:
        for value in node.outputs:
            value.name = builder.names.unique(f"check_{node.op_type.lower()}")
        name = words.get(id(node.outputs[0]))
        builder.provenance.of[node] = _CHECK if name is None else Named(_CHECK, name)


class _Checks:
    def __init__(self, graph: ir.Graph, builder: GraphBuilder, captured: Captured, slots: Sequence[InputSlot]) -> None:
        self._graph, self._builder = graph, builder
        self._dim_names = captured.dim_names
        self._ranges = ranges(captured)
        self._conditions = [c for c in captured.conditions if not is_at_least_two(c)]
        by_name = {value.name: value for value in graph.inputs}
        users = [slot for slot in slots if slot.kind is InputKind.USER]
        self._inputs = [(by_name[slot.name], slot) for slot in users]
        self._g = GraphBuilder(
            builder.opsets,
            optimize=False,
            runtime=builder.runtime,
            expressions=builder.sizes.expressions,
            operators=builder.operators,
        )
        #: The input and the axis from which each named size is read; other axes of that name are compared with it.
        self._first: dict[str, tuple[ir.Value, int]] = {}
        self._made: list[tuple[ir.Value, str]] = []
        for value, slot in self._inputs:
            val = slot.node.meta["val"]
            if isinstance(val, torch.SymInt):
                self._g.sizes.add(str(self._expr(val)), value)
            for axis, dim in enumerate(value.shape or ()):
                if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                    self._g.sizes.add_source(dim, value, axis)
                    self._first.setdefault(dim.value, (value, axis))

    def tensors(self) -> Iterator[tuple[ir.Value, InputSlot]]:
        """The tensors among the inputs, each with its slot."""
        yield from ((value, slot) for value, slot in self._inputs if isinstance(slot.node.meta["val"], torch.Tensor))

    def check(self, value: ir.Value, slot: InputSlot) -> ir.Value:
        """An input after its checks; the input itself where it has none."""
        sizes: list[Any] = []
        facts: list[str] = []
        for axis, size in enumerate(slot.node.meta["val"].shape):
            expected, words = self._size(value, axis, size)
            sizes.append(expected)
            facts += [f"axis {axis} is {words}"] if words else []
        dims = list(value.shape or ())
        sizes += dims[len(sizes) :]  # the parts of a complex tensor
        if facts:
            value = self._reshaped(value, sizes, f"check of the input {slot.name!r}: {', '.join(facts)}")
        while self._conditions and sizes:
            condition = self._conditions.pop()
            place = f" ({condition.place})" if condition.place else ""
            text = f"check: the model is right only where {condition.text(self._dim_names)}{place}"
            holds = self._stated(condition.text(self._dim_names), condition.named(self._dim_names), "value")
            first = self._g.dim(value, 0)
            impossible = self._g.op.Where(holds, self._g.as_scalar(first), self._g.const(_IMPOSSIBLE))
            value = self._reshaped(value, [impossible, *sizes[1:]], text)
        return value

    def _size(self, value: ir.Value, axis: int, size: Any) -> tuple[Any, str]:
        """The size that an axis must have, and its description; the description is empty where nothing is checked."""
        if isinstance(size, int):
            return size, ""
        expr = self._expr(size)
        name = str(expr)
        actual = self._g.op.Squeeze(self._g.op.Gather(self._g.op.Shape(value), [axis]), [0])
        if expr.is_Symbol and self._first.get(name) != (value, axis):
            return self._g.sizes.require(name), name
        if not expr.is_Symbol:
            return self._stated(name, expr, "size"), name
        limits = self._ranges.get(name)
        if limits is None:
            return actual, ""
        holds = self._g.op.GreaterOrEqual(actual, self._g.const(limits.low))
        if limits.high is not None:
            holds = self._g.op.And(holds, self._g.op.LessOrEqual(actual, self._g.const(limits.high)))
        return self._g.op.Where(holds, actual, self._g.const(_IMPOSSIBLE)), f"{name}, {limits.text()}"

    def _expr(self, size: torch.SymInt) -> Any:
        return in_names(self._dim_names, size.node.expr)

    def _stated(self, text: str, expr: Any, kind: str) -> ir.Value:
        try:
            value: ir.Value = getattr(SizeComputer(self._g, self._g.sizes.require), kind)(expr)
        except Unsupported as error:
            raise UsageError(
                f"checks=True can't state {text} in ONNX: {error.message}", hint="Export without checks."
            ) from error
        return value

    def _reshaped(self, value: ir.Value, sizes: Sequence[Any], name: str) -> ir.Value:
        # Abs hides the Concat: ONNX Runtime would infer the sizes in it that it does not know, and drop the check.
        shape = self._g.op.Abs(self._g.vector(sizes))
        result: ir.Value = self._g.op.Reshape(value, shape, allowzero=_allowzero(self._g))
        result.shape, result.type = value.shape.copy() if value.shape is not None else None, value.type
        self._made.append((result, name))
        return result

    def insert(self) -> None:
        """Puts the nodes that the checks need before all others."""
        nodes = self._g.scope.live([value for value, _ in self._made])
        _name(nodes, self._builder, {id(value): name for value, name in self._made})
        if len(self._graph):
            self._graph.insert_before(self._graph[0], nodes)
