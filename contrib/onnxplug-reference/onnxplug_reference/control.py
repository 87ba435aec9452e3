"""Control flow: the operators that run subgraphs.

Each is a generator, so that a run in steps goes through subgraphs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx

from onnxplug.errors import EvaluationError
from onnxplug_reference.engine import Engine, Frame, Steps
from onnxplug_reference.graphs import ReadyGraph, ReadyNode


def attribute(node: ReadyNode, name: str, default: Any = None) -> Any:
    """The value of a node's attribute."""
    for attribute_ in node.proto.attribute:
        if attribute_.name == name:
            return onnx.helper.get_attribute_value(attribute_)
    return default


def _truth(value: Any, what: str) -> bool:
    if value is None:
        raise EvaluationError(f"{what} is absent")
    count = 1
    for size in value.shape:
        count *= int(size)
    if count != 1:
        raise EvaluationError(f"{what} is one element, got the shape {list(value.shape)}")
    return bool(value.reshape(()))


def if_(engine: Engine, node: ReadyNode, inputs: Sequence[Any], frame: Frame) -> Steps:
    """If: one of two subgraphs without inputs."""
    branch = "then_branch" if _truth(inputs[0], "the condition") else "else_branch"
    return (yield from engine.subgraph(node, branch, [], frame))


def loop(engine: Engine, node: ReadyNode, inputs: Sequence[Any], frame: Frame) -> Steps:
    """Loop: a subgraph of (iteration, condition, carried…) to (condition, carried…, scanned…), run until either ends it."""
    body = node.graphs["body"]
    trips, going, *carried = [*inputs, None, None][: max(len(inputs), 2)]
    limit = None if trips is None else int(trips.reshape(()))
    alive = True if going is None else _truth(going, "the condition")
    count = len(body.inputs) - 2
    carried = [*carried, *([None] * count)][:count]  # absent values at the end may be left out
    scanned: list[list[Any]] = [[] for _ in body.outputs[1 + count :]]
    iteration = 0
    while alive and (limit is None or iteration < limit):
        arguments = [engine.arrays.number(iteration), engine.arrays.number(alive), *carried]
        place = f"body, iteration {iteration}"
        condition, *results = yield from engine.subgraph(node, "body", arguments, frame, place)
        alive = _truth(condition, f"the condition that iteration {iteration} gives")
        carried = results[:count]
        for values, value in zip(scanned, results[count:], strict=True):
            values.append(value)
        iteration += 1
    names = body.outputs[1 + count :]
    return [*carried, *(_stacked(engine, body, n, v, 0) for n, v in zip(names, scanned, strict=True))]


def _stacked(engine: Engine, body: ReadyGraph, name: str, values: list[Any], axis: int) -> Any:
    """A scan output of all iterations; without iterations it is empty, of the type that the body declares."""
    if values:
        return engine.arrays.stack(values, axis)
    declared = body.types.get(name)
    tensor = declared.tensor_type if declared is not None else None
    if tensor is None or not tensor.elem_type:
        raise EvaluationError(
            f"the body ran no time, and declares no type of {name!r}, so its empty result has none",
            hint="onnx.shape_inference.infer_shapes(model) declares the types.",
        )
    shape = [d.dim_value if d.HasField("dim_value") else 0 for d in tensor.shape.dim]
    shape.insert(axis % (len(shape) + 1), 0)
    return engine.arrays.empty(tensor.elem_type, shape)


def scan(engine: Engine, node: ReadyNode, inputs: Sequence[Any], frame: Frame) -> Steps:
    """Scan: a subgraph of (state…, slices…) to (state…, slices…), run over the slices of the scanned inputs."""
    if node.version < 9:
        return (yield from _scan_8(engine, node, inputs, frame))
    return (yield from _scan(engine, node, inputs, frame, _Axes.of(node, len(inputs))))


class _Axes:
    """The axes and directions of a Scan's scanned inputs and outputs."""

    def __init__(self, node: ReadyNode, states: int, count: int) -> None:
        body = node.graphs["body"]
        results = len(body.outputs) - states
        self.states = states
        self.input_axes = attribute(node, "scan_input_axes") or [0] * count
        self.output_axes = attribute(node, "scan_output_axes") or [0] * results
        self.inputs_reversed = attribute(node, "scan_input_directions") or [0] * count
        self.outputs_reversed = attribute(node, "scan_output_directions") or [0] * results

    @classmethod
    def of(cls, node: ReadyNode, inputs: int) -> _Axes:
        count = attribute(node, "num_scan_inputs")
        return cls(node, inputs - count, count)


def _scan(engine: Engine, node: ReadyNode, inputs: Sequence[Any], frame: Frame, axes: _Axes) -> Steps:
    body = node.graphs["body"]
    states, sources = list(inputs[: axes.states]), inputs[axes.states :]
    lengths = {int(value.shape[axis]) for value, axis in zip(sources, axes.input_axes, strict=True)}
    if len(lengths) != 1:
        raise EvaluationError(f"the scanned inputs have different lengths: {sorted(lengths)}")
    length = lengths.pop()
    scanned: list[list[Any]] = [[] for _ in body.outputs[axes.states :]]
    for iteration in range(length):
        slices = [
            engine.arrays.at(value, axis, length - 1 - iteration if backwards else iteration)
            for value, axis, backwards in zip(sources, axes.input_axes, axes.inputs_reversed, strict=True)
        ]
        results = yield from engine.subgraph(node, "body", [*states, *slices], frame, f"body, iteration {iteration}")
        states = results[: axes.states]
        for values, value in zip(scanned, results[axes.states :], strict=True):
            values.append(value)
    ends = []
    rows = zip(body.outputs[axes.states :], scanned, axes.output_axes, axes.outputs_reversed, strict=True)
    for name, values, axis, backwards in rows:
        ends.append(_stacked(engine, body, name, values[::-1] if backwards else values, axis))
    return [*states, *ends]


def _scan_8(engine: Engine, node: ReadyNode, inputs: Sequence[Any], frame: Frame) -> Steps:
    """Scan of opset 8: a batch axis before all others, and the lengths of the sequences as the first input."""
    lengths, *values = inputs
    body, count = node.graphs["body"], attribute(node, "num_scan_inputs")
    states = len(values) - count
    axes = _Axes(node, states, count)
    axes.inputs_reversed = attribute(node, "directions") or [0] * count
    batch, longest = map(int, values[states].shape[:2])
    counts = [longest] * batch if lengths is None else [int(length) for length in lengths]
    if len(counts) != batch or any(not 0 <= length <= longest for length in counts):
        raise EvaluationError(
            f"the lengths of the sequences are {counts}, and there are {batch} sequences of {longest} rows"
        )
    ends: list[list[Any]] = [[] for _ in body.outputs]
    for row, length in enumerate(counts):
        taken = [engine.arrays.at(value, 0, row) for value in values]
        taken[states:] = [value[:length] for value in taken[states:]]
        results = (yield from _scan(engine, node, taken, frame, axes)) if length else taken[:states]
        for end, result in zip(ends, results, strict=False):  # a sequence without rows has states alone
            end.append(result)
    stacked = [engine.arrays.stack(end, 0) if end else values[index] for index, end in enumerate(ends[:states])]
    for name, end in zip(body.outputs[states:], ends[states:], strict=True):
        like = end[0] if end else _stacked(engine, body, name, [], 0)
        padded = engine.arrays.zeros(like, (batch, longest, *like.shape[1:]))
        for row, result in zip((row for row, length in enumerate(counts) if length), end, strict=True):
            padded[row, : counts[row]] = result
        stacked.append(padded)
    return stacked


def sequence_map(engine: Engine, node: ReadyNode, inputs: Sequence[Any], frame: Frame) -> Steps:
    """SequenceMap: a subgraph over the elements of sequences of one length; each call takes tensors unchanged."""
    first = inputs[0]
    if any(isinstance(value, list) and len(value) != len(first) for value in inputs):
        raise EvaluationError(f"the sequences have {[len(v) for v in inputs if isinstance(v, list)]} elements")
    results: list[list[Any]] = [[] for _ in node.graphs["body"].outputs]
    for index in range(len(first)):
        arguments = [value[index] if isinstance(value, list) else value for value in inputs]
        outputs = yield from engine.subgraph(node, "body", arguments, frame, f"body, element {index}")
        for values, value in zip(results, outputs, strict=True):
            values.append(value)
    return list(results)


#: The operators of ai.onnx whose subgraphs the engine runs.
CONTROL: Mapping[str, Callable[[Engine, ReadyNode, Sequence[Any], Frame], Steps]] = {
    "If": if_,
    "Loop": loop,
    "Scan": scan,
    "SequenceMap": sequence_map,
}
