"""Runs a graph node by node: hooks, steps, subgraphs and functions, and memory freed after the last use.

The engine doesn't know the class of tensors: NumPy's evaluator and PyTorch's share it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx

from onnxplug.errors import EvaluationError, OnnxplugError, UsageError
from onnxplug.text import counted
from onnxplug_reference.arrays import Arrays
from onnxplug_reference.graphs import ReadyGraph, ReadyNode
from onnxplug_reference.trace import Trace, short


@dataclass
class Step:
    """A node while it runs: the argument of hooks, and the item of a run in steps.

    Attributes:
        node: The node.
        index: Its place among the nodes of its graph.
        path: The subgraphs and functions around it, outermost first: ``("Loop 'steps' body, iteration 2",)``.
        inputs: Its inputs, ``None`` for an absent input. A hook before it may replace them.
        outputs: Its outputs, once it has run.
    """

    node: onnx.NodeProto
    index: int
    path: tuple[str, ...]
    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)

    @property
    def op_type(self) -> str:
        """The operator."""
        return self.node.op_type

    @property
    def name(self) -> str:
        """The node's name, or the name of its first output where it has none."""
        return self.node.name or next((name for name in self.node.output if name), "")

    def named_inputs(self) -> dict[str, Any]:
        """The present inputs by name."""
        return {name: value for name, value in zip(self.node.input, self.inputs, strict=False) if name}

    def named_outputs(self) -> dict[str, Any]:
        """The outputs by name, without outputs that have no name."""
        return {name: value for name, value in zip(self.node.output, self.outputs, strict=False) if name}

    def __str__(self) -> str:
        inside = "".join(f"{part} > " for part in self.path)
        return f"{inside}{self.node.op_type}({', '.join(self.node.input)}) -> {', '.join(self.node.output)}"


#: A function that is called before or after each node. A returned list replaces the inputs, or the outputs.
Hook = Callable[[Step], Sequence[Any] | None]
Steps = Generator[Step, None, list[Any]]


class Frame:
    """The values of a graph while it runs, and the frame of the graph around it.

    Args:
        values: The first values: inputs by name.
        parent: The frame from which a subgraph reads captured values.
        keep: Names whose values are never freed; ``None`` keeps all.
    """

    __slots__ = ("graph", "keep", "parent", "path", "values")

    def __init__(
        self,
        graph: ReadyGraph,
        values: dict[str, Any],
        parent: Frame | None = None,
        path: tuple[str, ...] = (),
        keep: frozenset[str] | None = frozenset(),
    ) -> None:
        self.graph = graph
        self.values = values
        self.parent = parent
        self.path = path
        self.keep = keep

    def __getitem__(self, name: str) -> Any:
        frame: Frame | None = self
        while frame is not None:
            if name in frame.values:
                return frame.values[name]
            if name in frame.graph.initializers:
                return frame.graph.initializers[name]
            frame = frame.parent
        raise KeyError(name)

    def visible(self) -> dict[str, Any]:
        """Every value that a subgraph may read, by name."""
        outer = self.parent.visible() if self.parent is not None else {}
        return {**outer, **self.graph.initializers, **self.values}


#: A function that runs a node with subgraphs, of the engine, the node, its inputs and its frame.
Control = Callable[["Engine", ReadyNode, Sequence[Any], Frame], Steps]


class Engine:
    """Runs graphs.

    Args:
        control: The functions that run the operators with subgraphs, by operator.
    """

    def __init__(
        self,
        arrays: Arrays,
        control: Mapping[str, Control],
        before: Hook | None = None,
        after: Hook | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.arrays = arrays
        self.control = control
        self.before = before
        self.after = after
        self.trace = trace if trace is not None else Trace(0)

    def run(self, frame: Frame) -> Steps:
        """Runs the nodes of a frame's graph; yields each node after its run."""
        graph = frame.graph
        for index, node in enumerate(graph.nodes):
            step = Step(node.proto, index, frame.path, self._inputs(node, frame, index))
            yield from self._node(node, step, frame)
            for name in node.last_uses:
                if frame.keep is not None and name not in frame.keep:
                    frame.values.pop(name, None)
        return [self._output(name, frame) for name in graph.outputs]

    def _output(self, name: str, frame: Frame) -> Any:
        try:
            return frame[name]
        except KeyError:
            raise EvaluationError(f"nothing in the graph makes its output {name!r}{_inside(frame.path)}") from None

    def _inputs(self, node: ReadyNode, frame: Frame, index: int) -> list[Any]:
        try:
            return [frame[name] if name else None for name in node.proto.input]
        except KeyError as error:
            raise EvaluationError(
                f"the node {node.text} (number {index}{_inside(frame.path)}) reads {error.args[0]!r}, which nothing made "
                "before it",
                hint="onnx.checker.check_model(model) says whether the nodes are in order.",
            ) from None

    def _node(self, node: ReadyNode, step: Step, frame: Frame) -> Generator[Step, None, None]:
        self.trace.node(step)
        step.inputs = _replaced(self.before, step, step.inputs, "inputs")
        try:
            if node.body is not None:
                outputs = yield from self._call(node, step.inputs, frame)
            elif node.compute is None:
                outputs = yield from self.control[node.proto.op_type](self, node, step.inputs, frame)
            else:
                with self.trace.captured(frame if node.proto.attribute else None):
                    outputs = list(node.compute(step.inputs))
        except OnnxplugError as error:
            if not error.located:
                error.add_place(_place(node, step))
            raise
        except Exception as error:
            if getattr(error, _OF_HOOK, False):
                raise
            failure = EvaluationError(f"{type(error).__name__}: {error}", hint=_HINT)
            failure.add_place(_place(node, step))
            raise failure from error
        needed = max((i + 1 for i, name in enumerate(node.proto.output) if name), default=0)
        if len(outputs) < needed:
            raise EvaluationError(
                f"{_place(node, step)}: its kernel computes {counted(len(outputs), 'output')}, and the node has {needed}"
            )
        step.outputs = outputs[: len(node.proto.output)]
        step.outputs = _replaced(self.after, step, step.outputs, "outputs")
        for name, value in zip(node.proto.output, step.outputs, strict=False):
            if name:
                frame.values[name] = value
                self.trace.result(step, name, value)
        yield step

    def _call(self, node: ReadyNode, inputs: Sequence[Any], frame: Frame) -> Steps:
        """Runs the function that a node calls. Inputs that the node omits are absent."""
        body = node.body
        assert body is not None
        if len(inputs) > len(body.inputs):
            raise EvaluationError(
                f"the function takes {counted(len(body.inputs), 'input')}, and the node gives {len(inputs)}"
            )
        values = dict.fromkeys(body.inputs) | dict(zip(body.inputs, inputs, strict=False))
        return (yield from self.run(Frame(body, values, path=(*frame.path, f"function {node.text}"))))

    def subgraph(
        self, node: ReadyNode, attribute: str, inputs: Sequence[Any], frame: Frame, place: str | None = None
    ) -> Steps:
        """Runs a subgraph of a node.

        Args:
            place: The description of this run of the subgraph, for messages.
        """
        graph = node.graphs[attribute]
        path = (*frame.path, f"{node.text} {place if place is not None else attribute}")
        return (yield from self.run(Frame(graph, dict(zip(graph.inputs, inputs, strict=True)), frame, path)))


#: The attribute of an error that a hook raised: it reaches the caller as it is, out of subgraphs and functions too.
_OF_HOOK = "_onnxplug_of_hook"


def _replaced(hook: Hook | None, step: Step, values: list[Any], what: str) -> list[Any]:
    """A node's inputs or outputs after a hook.

    Raises:
        UsageError: The hook returned something else than ``None``, or as many values.
    """
    try:
        replaced = hook(step) if hook is not None else None
    except Exception as error:
        setattr(error, _OF_HOOK, True)
        raise
    if replaced is None:
        return values
    if not isinstance(replaced, list | tuple) or len(replaced) != len(values):
        raise UsageError(
            f"a hook of the node {step} returned {short(replaced)}; it returns a list of the node's "
            f"{counted(len(values), what[:-1])}, or None"
        )
    return list(replaced)


_HINT = "A hook before the node, or verbose=2, shows what it gets; please report a kernel that is wrong."


def _inside(path: Sequence[str]) -> str:
    return f" in {' > '.join(path)}" if path else ""


def _place(node: ReadyNode, step: Step) -> str:
    """The place of an error, for messages: the node, its number, and its inputs."""
    got = ", ".join(f"{name}={short(value)}" for name, value in step.named_inputs().items())
    return f"the node {node.text} (number {step.index}{_inside(step.path)}) on {got or 'no inputs'}"


def drain(steps: Steps) -> list[Any]:
    """Runs all steps; returns the outputs."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)
