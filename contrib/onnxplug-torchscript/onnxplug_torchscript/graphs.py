"""A script's graphs as steps: the interpreter's copy of torch's own objects, each of which is read once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxplug.torch_private import JitGraph, inline_calls
from onnxplug_torchscript.places import UNKNOWN, Place, place_of


@dataclass(frozen=True, eq=False)
class Step:
    """One node.

    Attributes:
        kind: ``"prim::If"``, ``"aten::add"`` …
        operator: The operator with its overload, ``"aten::add.Tensor"``; the kind for a node without a schema.
    """

    node: Any
    kind: str
    operator: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blocks: tuple[Block, ...]
    place: Place

    def type_of_input(self, index: int = 0) -> str:
        """The name of an input's type; of a module or an object the qualified name of its class."""
        return str(self.node.inputsAt(index).type().annotation_str)


@dataclass(frozen=True, eq=False)
class Block:
    """Steps in their order, with the values that go in and come out."""

    inputs: tuple[int, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    def nested(self) -> Iterator[Step]:
        """Its steps, and the steps of nested blocks."""
        for step in self.steps:
            yield step
            for block in step.blocks:
                yield from block.nested()

    def taken(self) -> Iterator[int]:
        """The values that it uses and that are defined outside of it."""
        defined = set(self.inputs)
        for step in self.steps:
            for value in [*step.inputs, *(v for block in step.blocks for v in block.taken())]:
                if value not in defined:
                    yield value
            defined.update(step.outputs)
        yield from (value for value in self.outputs if value not in defined)

    def raises(self) -> bool:
        """Whether it ends in an error for every input."""
        return any(step.kind == "prim::RaiseException" for step in self.steps)


@dataclass(eq=False)
class ScriptGraph:
    """A graph of torch, which keeps the nodes alive, and its steps."""

    graph: Any
    body: Block = field(init=False)

    def __post_init__(self) -> None:
        self.body = _block(self.graph, list(self.graph.inputs()), list(self.graph.outputs()))


def _block(block: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> Block:
    steps: list[Step] = []
    for node in block.nodes():
        place = place_of(node)
        if place == UNKNOWN and steps:
            place = steps[-1].place  # saving drops the places of some nodes
        steps.append(_step(node, place))
    return Block(tuple(v.unique() for v in inputs), tuple(steps), tuple(v.unique() for v in outputs))


def _step(node: Any, place: Place) -> Step:
    schema = node.schema()
    return Step(
        node,
        node.kind(),
        schema.partition("(")[0] or node.kind(),
        tuple(v.unique() for v in node.inputs()),
        tuple(v.unique() for v in node.outputs()),
        tuple(_block(b, list(b.inputs()), list(b.outputs())) for b in node.blocks()),
        place,
    )


def body_of_call(node: Any) -> ScriptGraph:
    """The graph of the function or method that a ``prim::CallFunction``, or a ``prim::CallMethod`` on an object, calls.

    torch names no function of a saved script, but writes its body in the place of a call of it.

    Returns:
        A graph with the inputs of the call, without the function.
    """
    graph = JitGraph()
    inputs: dict[int, Any] = {}
    for value in node.inputs():
        if value.type().kind() == "FunctionType":
            constant = graph.insertNode(graph.createClone(value.node(), lambda v: v))
            inputs[value.unique()] = constant.output()
        else:
            argument = graph.addInput()
            argument.setType(value.type())
            inputs[value.unique()] = argument
    call = graph.insertNode(graph.createClone(node, lambda v: inputs[v.unique()]))
    for output in call.outputs():
        graph.registerOutput(output)
    inline_calls(graph)
    return ScriptGraph(graph)
