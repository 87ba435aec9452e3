"""The types of values in half precision, and the Casts between these and values of float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.stored import META, WeightTensor
from onnxplug_precision.half.bodies import formals_of, joined
from onnxplug_precision.half.masks import filled
from onnxplug_precision.half.types import FLOAT, TYPED_BY_ATTRIBUTE, all_graphs, subgraphs_of
from onnxplug_precision.half.wide import ANY, HEAVY, KEPT, KEPT_NODES, Facts, constant_source, floats

_NUMPY = {ir.DataType.FLOAT16: np.dtype(np.float16), ir.DataType.BFLOAT16: np.dtype(ml_dtypes.bfloat16)}
_TORCH = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
#: Element types whose Cast to float32 a further Cast may skip: it reads the first Cast's operand.
_EXACT = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.BOOL}) | {
    d for d in ir.DataType if d.is_integer()
}


class Conversion:
    """Gives a model's values their types, and inserts Casts where a node takes another type.

    Args:
        facts: The facts of the model, and the nodes that stay in float32.
        keep_io: Whether the model's inputs and outputs stay in float32.
    """

    def __init__(self, facts: Facts, keep_io: bool) -> None:
        self.facts = facts
        self.half = facts.half
        self._keep_io = keep_io
        self._model = facts.model
        self._joined: dict[ir.Value, ir.DataType] = {}
        self._names = {str(v.name) for v in _values(facts.model)}
        for node in facts.imports:
            if self._has_body(node):
                self._join(node)

    # -- types ---------------------------------------------------------------------------------------------------------

    def _has_body(self, node: ir.Node) -> bool:
        return bool(subgraphs_of(node)) or self.facts.is_call(node)

    def _join(self, node: ir.Node) -> None:
        """Decides the types of the operands and results of a subgraph or function."""
        function = self._model.functions.get(node.op_identifier())
        own = {*node.outputs, *formals_of(node, function)}
        for group in joined(node, function):
            if any(value.dtype != FLOAT for value in group):
                continue
            problems = [p for value in group if (p := self.facts.problem(value)) is not None]
            kind = FLOAT if problems else self.half
            for value in own.intersection(group):
                if self._joined.get(value) != FLOAT:  # float32 where any call of a function needs it
                    self._joined[value] = kind
            if kind == FLOAT and problems:
                self.facts.wide.setdefault(node, problems[0])

    def type_of(self, value: ir.Value) -> ir.DataType:
        """The type that the producer gives a value of float32."""
        producer = value.producer()
        if value.is_graph_input() and value.graph is self._model.graph:
            is_fixed = self._keep_io or value.const_value is not None
            return FLOAT if is_fixed or self.facts.problem(value) else self.half
        if value in self._joined and (producer is None or not self.facts.is_call(producer)):
            return self._joined[value]
        if producer is None:
            return FLOAT
        function = self._model.functions.get(producer.op_identifier())
        if function is not None:
            index = next(i for i, out in enumerate(producer.outputs) if out is value)
            return self.result_type(function, index)
        if producer in self.facts.wide:
            return FLOAT
        if producer.op_type in ANY and not producer.domain:
            return self.half
        signature = self.facts.signature(producer)
        index = next(i for i, out in enumerate(producer.outputs) if out is value)
        return self.half if signature is not None and self.half in signature.output(index).allowed else FLOAT

    def result_type(self, function: ir.Function, index: int) -> ir.DataType:
        """The type of a function's result."""
        value = function.outputs[index]
        return self.half if value in self.facts.constants else self.type_of(value)

    def taken(self, node: ir.Node, index: int) -> ir.DataType | None:
        """The type in which a node takes an operand of float32; ``None`` where it takes any type."""
        if self.facts.is_call(node):
            formal = self._model.functions[node.op_identifier()].inputs[index]
            return self._joined.get(formal, FLOAT)
        if subgraphs_of(node):
            return self._taken_by_body(node, index)
        if node.op_type in ANY and not node.domain:
            is_kept = node in self.facts.wide and node.inputs[index] in self.facts.constants
            return FLOAT if is_kept else None
        if node in self.facts.wide or index in KEPT.get((node.domain, node.op_type), ()):
            return FLOAT
        signature = self.facts.signature(node)
        return self.half if signature is not None and self.half in signature.input(index).allowed else FLOAT

    def _taken_by_body(self, node: ir.Node, index: int) -> ir.DataType:
        formals = subgraphs_of(node)[0].inputs
        return self._joined.get(formals[index], FLOAT) if index < len(formals) else FLOAT

    def _demands(self, value: ir.Value) -> set[ir.DataType]:
        """The types in which readers take a value."""
        dtypes = {self.taken(node, index) for node, index in value.uses()}
        dtypes |= {self._type_at(value, place) for place in self._places(value)}
        return {dtype for dtype in dtypes if dtype is not None}

    def _places(self, value: ir.Value) -> list[tuple[Any, int]]:
        """The graphs that have a value as an output, with its places there."""
        return self._outputs.get(value, [])

    def _type_at(self, value: ir.Value, place: tuple[Any, int]) -> ir.DataType:
        """The type of a graph's output."""
        graph, index = place
        if graph is self._model.graph:
            return FLOAT if self._keep_io or self.facts.problem(value) else self.half
        if isinstance(graph, ir.Function):
            return self.result_type(graph, index)
        owner = self._owners[graph]
        outer = index - 1 if owner.op_type == "Loop" else index
        return self._joined.get(owner.outputs[outer], FLOAT)

    # -- the conversion ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Converts the model in place."""
        graphs = [graph for graph, _ in all_graphs(self._model)]
        self._owners = {body: node for node in self.facts.imports for body in subgraphs_of(node)}
        self._outputs: dict[ir.Value, list[tuple[Any, int]]] = {}
        for graph in graphs:
            for index, value in enumerate(graph.outputs):
                self._outputs.setdefault(value, []).append((graph, index))
        self._widen_between()
        values = [value for value in dict.fromkeys(_values(self._model)) if value.dtype == FLOAT and value.name]
        kinds = {value: self.type_of(value) for value in values if value not in self.facts.constants}
        demands = {value: self._wanted(value) for value in values}
        for value in self.facts.fills:
            self.facts.constants[value] = filled(self.facts.constants[value])
        for node in self.facts.imports:
            if node not in self.facts.wide:
                self._retype(node)
        for value in values:
            if value in self.facts.constants:
                self._constant(value, demands[value])
            else:
                self._value(value, kinds[value], demands[value])
        for node in list(self.facts.imports):
            self._drop_idle_cast(node)

    def _wanted(self, value: ir.Value) -> dict[ir.DataType, list[Any]]:
        """The readers of a value by the type they take: pairs of node and place, or of graph and place."""
        readers: dict[ir.DataType, list[Any]] = {}
        for node, index in value.uses():
            dtype = self.taken(node, index)
            if dtype is not None:
                readers.setdefault(dtype, []).append((node, index))
        for place in self._places(value):
            readers.setdefault(self._type_at(value, place), []).append(place)
        return readers

    def _widen_between(self) -> None:
        """Keeps light nodes between nodes of float32 in float32, too, and a Cast that only such nodes read."""
        changed = True
        while changed:
            changed = False
            for node in self.facts.imports:
                if node not in self.facts.wide and not self._has_body(node) and self._is_between(node):
                    self.facts.wide[node] = BETWEEN
                    changed = True

    def _is_between(self, node: ir.Node) -> bool:
        operands = [v for _, v in floats(node.inputs) if v not in self.facts.constants]
        results = [v for _, v in floats(node.outputs) if v.uses() or v.is_graph_output()]
        if (
            node.op_type in HEAVY
            or not results
            or constant_source(node) is not None
            or any(self.type_of(v) != FLOAT for v in operands)
        ):
            return False
        if not operands and node.op_type != "Cast":
            return False
        takers = [node for value in results for node, _ in value.uses()]
        if not any(other in self.facts.wide for other in (*takers, *(v.producer() for v in operands))):
            return False
        return all(self._demands(value) == {FLOAT} for value in results)

    def _retype(self, node: ir.Node) -> None:
        """Writes half precision into the attribute that names the type of a node's result."""
        if node.domain or not any(v.dtype == FLOAT for v in node.outputs) or node.op_type == "ConstantOfShape":
            return
        name = TYPED_BY_ATTRIBUTE.get(node.op_type)
        if name is not None and (name in node.attributes or node.op_type.startswith("Random")):
            node.attributes[name] = ir.AttrInt64(name, int(self.half))
        elif node.op_type in ("RandomNormalLike", "RandomUniformLike", "Bernoulli") and "dtype" in node.attributes:
            node.attributes["dtype"] = ir.AttrInt64("dtype", int(self.half))

    def _constant(self, value: ir.Value, demands: dict[ir.DataType, list[Any]]) -> None:
        array = self.facts.constants[value]
        halves, wide = demands.get(self.half, []), demands.get(FLOAT, [])
        if value in self.facts.fills:
            self._store(value, array)
        if not halves and not (wide and self._may_round(value, wide)):
            return
        target = value
        if wide and self._may_round(value, wide):
            self._redirect(wide, self._cast(value, FLOAT))
        elif wide:
            target = self._copy_of(value)
            self._redirect(halves, target)
        self._store(target, to_half(array, self.half))

    def _may_round(self, value: ir.Value, takers: list[Any]) -> bool:
        """Whether a constant that readers take in float32 is a weight, which may be stored in half precision."""
        is_large = self.facts.constants[value].size > _LARGE and self.facts.problem(value) is None
        return is_large and not any(
            not isinstance(taker, ir.Node)
            or taker in self.facts.exact
            or taker.op_type in KEPT_NODES
            or self._has_body(taker)
            for taker, _ in takers
        )

    def _copy_of(self, value: ir.Value) -> ir.Value:
        """A copy of a constant, for readers that take it in half precision."""
        name = self._name(f"{value.name}_{self.half.name.lower()}")
        producer = value.producer()
        if producer is not None:
            node = ir.Node("", producer.op_type, producer.inputs, list(producer.attributes.values()))
            node.outputs[0].name, node.outputs[0].shape = name, value.shape
            node.metadata_props.update(producer.metadata_props)
            producer.graph.insert_after(producer, node)  # type: ignore[union-attr]
            return node.outputs[0]
        copy = ir.Value(name=name, type=ir.TensorType(FLOAT), shape=value.shape, const_value=value.const_value)
        copy.meta.update(value.meta)
        graph = value.graph
        assert isinstance(graph, ir.Graph)
        graph.register_initializer(copy)
        return copy

    def _store(self, value: ir.Value, array: np.ndarray) -> None:
        producer = value.producer()
        if producer is not None:
            tensor = ir.tensor(array.reshape(1) if producer.op_type == "ConstantOfShape" else array)
            for name in list(producer.attributes):
                del producer.attributes[name]
            producer.attributes["value"] = ir.AttrTensor("value", tensor)
            value.type = ir.TensorType(tensor.dtype)
            return
        origin = value.meta.get(META)
        if array.dtype == np.float32:
            value.const_value = ir.tensor(array, name=value.name)
            value.meta.pop(META, None)
            return
        kind = _TORCH[self.half]
        as_torch = torch.from_numpy(array.view(np.int16).copy()).view(kind)
        value.const_value = WeightTensor(as_torch, name=value.name)
        value.type = ir.TensorType(self.half)
        if origin is not None and value not in self.facts.fills:
            value.meta[META] = origin.then(lambda tensor: _saturated(tensor, kind), ("half", str(kind)))

    def _value(self, value: ir.Value, kind: ir.DataType, demands: dict[ir.DataType, list[Any]]) -> None:
        value.type = ir.TensorType(kind)
        for dtype, takers in demands.items():
            if dtype != kind:
                self._redirect(takers, self._cast(value, dtype))

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """A value in another type, by a Cast right after its producer."""
        producer = value.producer()
        source = value
        is_cast = producer is not None and producer.op_type == "Cast" and not producer.domain
        if is_cast and producer is not None and producer.inputs[0] is not None and producer.inputs[0].dtype in _EXACT:
            source = producer.inputs[0]  # one Cast from integers or bools, not two
        node = ir.Node("", "Cast", [source], [ir.AttrInt64("to", int(dtype))])
        out = node.outputs[0]
        out.name, out.type, out.shape = (
            self._name(f"{value.name}_{dtype.name.lower()}"),
            ir.TensorType(dtype),
            value.shape,
        )
        node.name = out.name
        if producer is not None:
            node.metadata_props.update({k: v for k, v in producer.metadata_props.items() if "fx_node" not in k})
            producer.graph.insert_after(producer, node)  # type: ignore[union-attr]
        else:
            graph: Any = self._graph_of(value)
            graph.insert_before(graph[0], node) if len(graph) else graph.append(node)
        return out

    def _graph_of(self, value: ir.Value) -> Any:
        """The graph or function whose input or initializer a value is."""
        if value.is_initializer():
            return value.graph
        return next(graph for graph, _ in all_graphs(self._model) if any(v is value for v in graph.inputs))

    def _redirect(self, takers: list[Any], value: ir.Value) -> None:
        for taker, index in takers:
            if isinstance(taker, ir.Node):
                taker.replace_input_with(index, value)
                continue
            old = taker.outputs[index]
            taker.outputs[index] = value
            if taker is self._model.graph and not old.is_graph_input() and not old.is_initializer():
                name, other = str(old.name), str(value.name)
                old.name = self._name(f"{name}_before")
                value.name = name
                self._names.discard(other)

    def _drop_idle_cast(self, node: ir.Node) -> None:
        """Removes a Cast to its operand's type, or without readers."""
        if node.op_type != "Cast" or node.domain or node.graph is None:
            return
        source, out = node.inputs[0], node.outputs[0]
        if not out.uses() and not out.is_graph_output():
            node.graph.remove(node, safe=True)
        elif source is not None and source.dtype == out.dtype and not out.is_graph_output():
            out.replace_all_uses_with(source)
            node.graph.remove(node, safe=True)

    def _name(self, name: str) -> str:
        unique, number = name, 1
        while unique in self._names:
            unique, number = f"{name}_{number}", number + 1
        self._names.add(unique)
        return unique


#: The number of elements above which a constant counts as a weight.
_LARGE = 1024
#: The reason of a node that stays in float32 though half precision would hold it.
BETWEEN = "it is between nodes that stay in float32"


def to_half(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Numbers in half precision; finite numbers stay finite."""
    largest = float(ml_dtypes.finfo(_NUMPY[dtype]).max)
    array = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return array.astype(_NUMPY[dtype])


def _saturated(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    largest = torch.finfo(kind).max
    return torch.where(tensor.isfinite(), tensor.clamp(-largest, largest), tensor).to(kind)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    """Every value of a model."""
    for graph, _ in all_graphs(model):
        yield from graph.inputs
        if isinstance(graph, ir.Graph):
            yield from graph.initializers.values()
        for node in graph:
            yield from node.outputs
