"""Differences between two models: nodes aligned by module and operator, attributes and types, weights by their values.

Nodes are aligned graph by graph and module by module, by the order of their operators; if one of the files names no
modules, the models are aligned as a whole. Names and metadata of nodes are no difference. An attribute at the
operator's default is the same as an absent attribute.
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxplug.build.scope import graphs_of
from onnxplug_tools.inspection.attributes import default_of, effective_attributes
from onnxplug_tools.inspection.numbers import Difference, difference_of, digests_of
from onnxplug_tools.inspection.view import ModelView, NodeView, ValueView, WeightView, view_with_model
from onnxplug_tools.inspection.words import attribute_text, text_of

#: Sequences whose lengths have a larger product are aligned by a rule that takes linear time.
_LARGEST_PRODUCT = 1_000_000
#: Weights of fewer elements may be equal by chance.
_FEWEST_ELEMENTS = 16
#: Operators of two inputs that may change places.
_COMMUTATIVE = frozenset({"Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum", "Mean"})


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node that is in both models and differs.

    Attributes:
        what: The differences in words: ``"attribute epsilon: 1e-05, then 1e-06"``.
    """

    before: NodeView
    after: NodeView
    what: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModuleDiff:
    """The differences in a module.

    Attributes:
        path: The module; empty for the model itself, or where nodes were aligned without regard to modules.
        graph: The graph, as :class:`~onnxplug_tools.inspection.view.NodeView` names it.
    """

    path: str
    graph: str
    same: int
    changed: tuple[NodeChange, ...]
    removed: tuple[NodeView, ...]
    added: tuple[NodeView, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.changed or self.removed or self.added)


@dataclass(frozen=True, slots=True)
class ValueChange:
    """An input or output that differs; ``None`` where a model lacks it."""

    before: ValueView | None
    after: ValueView | None


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A weight that differs.

    Attributes:
        before, after: The weight; ``None`` where a model has no corresponding weight.
        difference: The difference of the values; ``None`` where one weight is absent, the shapes differ, or only one
            weight holds text.
        transposed: Whether the second model has it transposed; the values are compared accordingly.
    """

    before: WeightView | None
    after: WeightView | None
    difference: Difference | None = None
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ModelDiff:
    """The differences between two models.

    Attributes:
        opsets: Domain to its version in each model, where they differ; ``None`` where a model does not import it.
        connections: Outputs of graphs that are the results of other nodes, and another order of the inputs, in words.
        operators: Operator to its number of nodes in each model, where they differ.
        functions: Model-local functions of one model alone, each to whether the second model has it.
        signatures: What differs in functions beside their nodes: the function with the difference in words (its opsets, the
            number of its inputs and outputs, the defaults of its attributes), and the value in each model.
    """

    before: ModelView
    after: ModelView
    opsets: dict[str, tuple[int | None, int | None]]
    inputs: tuple[ValueChange, ...]
    outputs: tuple[ValueChange, ...]
    connections: tuple[str, ...]
    modules: tuple[ModuleDiff, ...]
    same_nodes: int
    operators: dict[str, tuple[int, int]]
    functions: dict[str, bool]
    signatures: tuple[tuple[str, str, str], ...]
    weights: tuple[WeightChange, ...]
    same_weights: int

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.opsets
            or self.inputs
            or self.outputs
            or self.connections
            or self.modules
            or self.functions
            or self.signatures
            or self.weights
        )


def diff(before: ir.Model, after: ir.Model) -> ModelDiff:
    """The differences between two models; weights are read one by one.

    Args:
        before, after: The models; they are not changed.
    """
    return _Differ(before, after).diff()


def corresponding(before: ir.Model, after: ir.Model) -> dict[ir.Value, ir.Value]:
    """The values of the main graph's nodes, each to the corresponding value of the other model.

    Models of one producer use the same names for most values, so that equal names decide first there, if the module is
    the same too (a Gelu and the nodes that an older opset has for it). Otherwise nodes are aligned as by :func:`diff`,
    and aligned nodes correspond if they read corresponding values and equal constants: exporters may use the same
    operators in another order.
    """
    differ = _Differ(before, after)
    differ.align_all()
    matches: dict[ir.Value, ir.Value] = {}
    taken: set[ir.Value] = set()
    if before.producer_name == after.producer_name:
        named = {value.name: value for node in after.graph for value in node.outputs if value.name}
        for node in before.graph:
            for value in node.outputs:
                other = named.get(value.name) if value.name else None
                if other is not None and differ.alike(value, other):
                    matches[value] = other
                    taken.add(other)
    for node in before.graph:
        pairs = [
            (value, differ.pairs[value]) for value in node.outputs if value in differ.pairs and value not in matches
        ]
        pairs = [(value, other) for value, other in pairs if value.name and other.name and other not in taken]
        if pairs and differ.reads_alike(node, pairs[0][1].producer(), matches, taken):
            matches.update(pairs)
            taken.update(other for _, other in pairs)
    return {value: matches[value] for node in before.graph for value in node.outputs if value in matches}


class _Differ:
    def __init__(self, before: ir.Model, after: ir.Model) -> None:
        self._models = before, after
        self._before, self._after = view_with_model(before), view_with_model(after)
        self._by_module = bool(self._before.view.root.children and self._after.view.root.children)
        #: Each value of the first model to the corresponding value of the second; ``_paired`` is the reverse.
        self.pairs: dict[ir.Value, ir.Value] = {}
        self._paired: dict[ir.Value, ir.Value] = {}
        self._graphs: list[tuple[str, ir.Graph, ir.Graph]] = []
        self._sorted: dict[tuple[str, str], _Sorted] = {}

    def diff(self) -> ModelDiff:
        before, after = self._models
        functions = self.align_all()
        self._compare_nodes()
        modules = [sorted_nodes.finished(*key) for key, sorted_nodes in self._sorted.items()]
        weights, same_weights = self._compare_weights()
        seen, other = self._before.view, self._after.view
        return ModelDiff(
            before=seen,
            after=other,
            opsets=_both(before.opset_imports, after.opset_imports, None),
            inputs=_changed_values(seen.inputs, other.inputs),
            outputs=_changed_values(seen.outputs, other.outputs),
            connections=tuple(self._connections()),
            modules=tuple(module for module in modules if not module.equal),
            same_nodes=sum(module.same for module in modules),
            operators=_both(seen.operators, other.operators, 0),
            functions=functions,
            signatures=tuple(self._signatures()),
            weights=tuple(weights),
            same_weights=same_weights,
        )

    def alike(self, value: ir.Value, other: ir.Value) -> bool:
        """Whether two results are of one module (else one operator) and one dtype, and of one rank if it is known."""
        ours, theirs = value.producer(), other.producer()
        if ours is None or theirs is None or value.dtype != other.dtype:
            return False
        if value.shape is not None and other.shape is not None and len(value.shape) != len(other.shape):
            return False
        before, after = self._before.nodes[ours], self._after.nodes[theirs]
        return before.module == after.module if self._by_module else before.operator == after.operator

    def reads_alike(
        self,
        ours: ir.Node,
        theirs: ir.Node | None,
        pairs: Mapping[ir.Value, ir.Value],
        taken: Collection[ir.Value],
    ) -> bool:
        """Whether two nodes read equal constants, and values that correspond to each other or both to no value."""
        if theirs is None or len(ours.inputs) != len(theirs.inputs):
            return False
        orders = [theirs.inputs]
        if ours.op_type in _COMMUTATIVE:
            orders.append(theirs.inputs[::-1])
        return any(
            all(self._read_alike(value, other, pairs, taken) for value, other in zip(ours.inputs, inputs, strict=True))
            for inputs in orders
        )

    def _read_alike(
        self,
        value: ir.Value | None,
        other: ir.Value | None,
        pairs: Mapping[ir.Value, ir.Value],
        taken: Collection[ir.Value],
    ) -> bool:
        if value is None or other is None:
            return value is other
        weight, other_weight = self._before.weights.get(value), self._after.weights.get(other)
        if weight is not None and other_weight is not None:
            if "." in weight[0].name and weight[0].name == other_weight[0].name:
                return True  # a parameter, which may differ
            difference, _ = difference_of(weight[1], other_weight[1])
            return difference is not None and difference.equal
        if weight is not None or other_weight is not None:
            return False
        if value.producer() is None or other.producer() is None:
            return self.pairs.get(value) is other
        return pairs[value] is other if value in pairs else other not in taken

    # -- correspondence ------------------------------------------------------------------------------------------------

    def align_all(self) -> dict[str, bool]:
        """Pairs the values that correspond, and returns the functions of one model alone."""
        before, after = self._models
        self._pair_values(before.graph.inputs, after.graph.inputs, by_name=True)
        self._pair_weights_by_name(
            lambda name: "." in name
        )  # parameters have a dot in their names, constants named by an exporter have none
        self._align("", before.graph, after.graph)
        alone: dict[str, bool] = {}
        for identifier in dict.fromkeys((*before.functions, *after.functions)):
            label = "::".join(map(text_of, identifier[:2]))
            ours, theirs = before.functions.get(identifier), after.functions.get(identifier)
            if ours is not None and theirs is not None:
                self._pair_values(ours.inputs, theirs.inputs, by_name=False)
                self._align(label, ours.graph, theirs.graph)
            else:
                alone[label] = ours is None
        self._pair_weights_by_use()
        self._pair_weights_by_name(lambda name: True)
        self._pair_weights_by_content()
        return alone

    def _pair(self, ours: ir.Value | None, theirs: ir.Value | None) -> None:
        if ours is not None and theirs is not None and ours not in self.pairs and theirs not in self._paired:
            self.pairs[ours] = theirs
            self._paired[theirs] = ours

    def _pair_values(self, ours: Sequence[ir.Value], theirs: Sequence[ir.Value], *, by_name: bool) -> None:
        """Pairs inputs by name, with ``by_name``, and the others by their order."""
        if by_name:
            named = {value.name: value for value in theirs}
            for value in ours:
                self._pair(value, named.get(value.name))
        left = [value for value in ours if value not in self.pairs]
        for value, other in zip(left, [value for value in theirs if value not in self._paired], strict=False):
            self._pair(value, other)

    def _pair_weights_by_name(self, counts: Callable[[str], bool]) -> None:
        """Pairs weights of equal names; where a name occurs in several graphs, in the order of the graphs."""
        named: dict[str, list[ir.Value]] = defaultdict(list)
        for value, (weight, _) in self._after.weights.items():
            if value not in self._paired and counts(weight.name):
                named[weight.name].append(value)
        for value, (weight, _) in self._before.weights.items():
            if value not in self.pairs and named.get(weight.name):
                self._pair(value, named[weight.name].pop(0))

    def _pair_weights_by_use(self) -> None:
        """Pairs weights that aligned nodes read at the same position, if they have the same sizes in any order."""
        for sorted_nodes in self._sorted.values():
            for ours, theirs in sorted_nodes.aligned:
                for value, other in zip(ours.inputs, theirs.inputs, strict=False):
                    if value in self._before.weights and other in self._after.weights:
                        shapes = [
                            sorted(map(str, seen.weights[weight][1].shape))
                            for seen, weight in ((self._before, value), (self._after, other))
                        ]
                        if shapes[0] == shapes[1]:
                            self._pair(value, other)

    def _pair_weights_by_content(self) -> None:
        """Pairs the other weights of equal numbers; a matrix may be transposed, as exporters differ in products."""
        known: dict[bytes, ir.Value] = {}
        for value, (weight, tensor) in self._after.weights.items():
            if value not in self._paired and weight.elements >= _FEWEST_ELEMENTS:
                known.setdefault(digests_of(tensor)[0], value)
        if not known:
            return
        for value, (weight, tensor) in self._before.weights.items():
            if value not in self.pairs and weight.elements >= _FEWEST_ELEMENTS:
                match = next((known[digest] for digest in digests_of(tensor) if digest in known), None)
                self._pair(value, match)

    def _align(self, label: str, ours: ir.Graph, theirs: ir.Graph) -> None:
        """Aligns the nodes of two graphs, and of the bodies of nodes that correspond."""
        pending = [(label, ours, theirs)]
        while pending:
            label, ours, theirs = pending.pop()
            self._graphs.append((label, ours, theirs))
            groups: dict[str, tuple[list[ir.Node], list[ir.Node]]] = {}
            for side, (graph, seen) in enumerate(((ours, self._before), (theirs, self._after))):
                for node in graph:
                    if node.outputs and node.outputs[0] in seen.weights:
                        continue  # a Constant is compared as a weight
                    module = seen.nodes[node].module if self._by_module else ""
                    groups.setdefault(module, ([], []))[side].append(node)
            for module, (before, after) in groups.items():
                sorted_nodes = self._sorted.setdefault((module, label), _Sorted())
                keys = [self._before.nodes[node].operator for node in before]
                others = [self._after.nodes[node].operator for node in after]
                kept: set[ir.Node] = set()
                for i, j in aligned(keys, others):
                    kept |= {before[i], after[j]}
                    sorted_nodes.aligned.append((before[i], after[j]))
                    for value, other in zip(before[i].outputs, after[j].outputs, strict=False):
                        self._pair(value, other)
                    pending += self._bodies(label, before[i], after[j])
                sorted_nodes.removed += [self._before.nodes[node] for node in before if node not in kept]
                sorted_nodes.added += [self._after.nodes[node] for node in after if node not in kept]

    def _bodies(self, label: str, ours: ir.Node, theirs: ir.Node) -> Iterator[tuple[str, ir.Graph, ir.Graph]]:
        if not graphs_of(ours):
            return
        for name, attribute in ours.attributes.items():
            other = theirs.attributes.get(name)
            if other is None or attribute.type != other.type or attribute.is_ref() or other.is_ref():
                continue
            if attribute.type == ir.AttributeType.GRAPH:
                pairs = [(attribute.as_graph(), other.as_graph())]
            elif attribute.type == ir.AttributeType.GRAPHS:
                pairs = list(zip(attribute.as_graphs(), other.as_graphs(), strict=False))
            else:
                continue
            place = f"{text_of(ours.name or ours.op_type)}/{text_of(name)}"
            for body, body_of_other in pairs:
                self._pair_values(body.inputs, body_of_other.inputs, by_name=False)
                yield f"{label}/{place}" if label else place, body, body_of_other

    # -- differences ---------------------------------------------------------------------------------------------------

    def _compare_nodes(self) -> None:
        for sorted_nodes in self._sorted.values():
            for ours, theirs in sorted_nodes.aligned:
                before, after = self._before.nodes[ours], self._after.nodes[theirs]
                what = (*self._attributes(ours, theirs), *self._inputs(ours, theirs), *_types(before, after))
                if what:
                    sorted_nodes.changed.append(NodeChange(before, after, what))
                else:
                    sorted_nodes.same += 1

    def _attributes(self, ours: ir.Node, theirs: ir.Node) -> Iterator[str]:
        before = effective_attributes(ours, self._models[0].opset_imports)
        after = effective_attributes(theirs, self._models[1].opset_imports)
        for name in dict.fromkeys((*before, *after)):
            if before.get(name) != after.get(name):
                texts = [
                    seen.attributes.get(name, "not given")
                    for seen in (self._before.nodes[ours], self._after.nodes[theirs])
                ]
                yield f"attribute {name}: {texts[0]}, then {texts[1]}" if texts[0] != texts[1] else f"attribute {name}"

    def _inputs(self, ours: ir.Node, theirs: ir.Node) -> Iterator[str]:
        before, after = list(ours.inputs), list(theirs.inputs)
        for inputs in (before, after):
            while inputs and inputs[-1] is None:
                inputs.pop()
        if len(before) != len(after):
            yield f"{len(before)} inputs, then {len(after)}"
            return
        if ours.op_type in _COMMUTATIVE and not ours.domain and not any(map(self._crosses, before, reversed(after))):
            return
        for position, (value, other) in enumerate(zip(before, after, strict=True)):
            if value is None or other is None:
                if value is not other:
                    names = ["absent" if v is None else v.name for v in (value, other)]
                    yield f"input {position}: {names[0]}, then {names[1]}"
            elif self._crosses(value, other):
                yield f"input {position}: {value.name}, then {other.name}, which was {self._paired[other].name}"

    def _crosses(self, value: ir.Value | None, other: ir.Value | None) -> bool:
        """Whether two values correspond to other values than each other.

        Values that correspond to no value don't count: their nodes, or the weights, are reported as in one model alone.
        """
        if value is None or other is None:
            return value is not other
        return self.pairs.get(value) is not other and value in self.pairs and other in self._paired

    def _connections(self) -> Iterator[str]:
        """Outputs of graphs that are the results of other nodes, and another order of the inputs."""
        before, after = (model.graph.inputs for model in self._models)
        orders = [value for value in before if value in self.pairs], [value for value in after if value in self._paired]
        if [self.pairs[value] for value in orders[0]] != orders[1]:
            texts = [", ".join(str(value.name) for value in order) for order in orders]
            yield f"order of inputs: {texts[0]}, then {texts[1]}"
        for label, ours, theirs in self._graphs:
            place = f" of {label}" if label else ""
            for position, (value, other) in enumerate(zip(ours.outputs, theirs.outputs, strict=False)):
                if self._crosses(value, other):
                    was = self._paired[other].name
                    yield f"output {position}{place}: {value.name}, then {other.name}, which was {was}"

    def _signatures(self) -> Iterator[tuple[str, str, str]]:
        before, after = self._models
        for identifier, ours in before.functions.items():
            theirs = after.functions.get(identifier)
            if theirs is None:
                continue
            label = "::".join(map(text_of, identifier[:2]))
            for domain, (version, other) in _both(ours.opset_imports, theirs.opset_imports, "none").items():
                yield f"{label}: opset of {text_of(domain) or 'ai.onnx'}", str(version), str(other)
            for kind in ("inputs", "outputs"):
                count, other = len(getattr(ours, kind)), len(getattr(theirs, kind))
                if count != other:
                    yield f"{label}: {kind}", str(count), str(other)
            for name in dict.fromkeys((*ours.attributes, *theirs.attributes)):
                one, another = ours.attributes.get(name), theirs.attributes.get(name)
                if default_of(one) != default_of(another):
                    yield f"{label}: attribute {text_of(name)}", _default_text(one), _default_text(another)

    def _compare_weights(self) -> tuple[list[WeightChange], int]:
        changes: list[WeightChange] = []
        same = 0
        for value, (before, tensor) in self._before.weights.items():
            weight = self._after.weights.get(self.pairs[value]) if value in self.pairs else None
            if weight is None:
                changes.append(WeightChange(before, None))
                continue
            after, other = weight
            difference, transposed = difference_of(tensor, other)
            if difference is not None and difference.equal and not transposed and before.dtype == after.dtype:
                same += 1
            else:
                changes.append(WeightChange(before, after, difference, transposed))
        for value, (after, _) in self._after.weights.items():
            if self._paired.get(value) not in self._before.weights:
                changes.append(WeightChange(None, after))
        return changes, same


class _Sorted:
    """The nodes of a module in one graph, by the outcome of their comparison."""

    def __init__(self) -> None:
        self.aligned: list[tuple[ir.Node, ir.Node]] = []
        self.same = 0
        self.changed: list[NodeChange] = []
        self.removed: list[NodeView] = []
        self.added: list[NodeView] = []

    def finished(self, path: str, graph: str) -> ModuleDiff:
        return ModuleDiff(path, graph, self.same, tuple(self.changed), tuple(self.removed), tuple(self.added))


def aligned(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The positions at which two sequences correspond, equal items in the same order.

    Long sequences with many differences are aligned by counting: the first occurrence of an item with the first, the
    second with the second. That takes linear time, and pairs may cross.
    """
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    end = 0
    while end < min(len(before), len(after)) - start and before[-1 - end] == after[-1 - end]:
        end += 1
    pairs = [(i, i) for i in range(start)]
    middle, other = before[start : len(before) - end], after[start : len(after) - end]
    if len(middle) * len(other) <= _LARGEST_PRODUCT:
        for i, j, size in difflib.SequenceMatcher(None, middle, other, autojunk=False).get_matching_blocks():
            pairs += [(start + i + k, start + j + k) for k in range(size)]
    else:
        places: dict[Hashable, list[int]] = defaultdict(list)
        for j, item in enumerate(other):
            places[item].append(j)
        taken: Counter[Hashable] = Counter()
        for i, item in enumerate(middle):
            if taken[item] < len(places[item]):
                pairs.append((start + i, start + places[item][taken[item]]))
                taken[item] += 1
    pairs += [(len(before) - k, len(after) - k) for k in range(end, 0, -1)]
    return pairs


def _changed_values(before: Sequence[ValueView], after: Sequence[ValueView]) -> tuple[ValueChange, ...]:
    """Inputs or outputs that differ; they are compared by name, the rest by their order."""
    named = {value.name: value for value in after}
    known = {value.name for value in before}
    new = [value for value in after if value.name not in known]
    changes = []
    for value in before:
        other = named.get(value.name)
        if other is None and new:
            other = new.pop(0)
        if value != other:
            changes.append(ValueChange(value, other))
    return (*changes, *(ValueChange(None, value) for value in new))


def _both(before: Mapping[str, int], after: Mapping[str, int], absent: Any) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ between two tables, with both values; ``absent`` is the value of a missing key."""
    pairs = {name: (before.get(name, absent), after.get(name, absent)) for name in dict.fromkeys((*before, *after))}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _default_text(attribute: ir.Attr | None) -> str:
    if attribute is None:
        return "none"
    return "without a default" if attribute.value is None else attribute_text(attribute)


def _types(before: NodeView, after: NodeView) -> Iterator[str]:
    """Results whose dtype, rank or static sizes differ; names of dynamic sizes, and unknown types, don't count."""
    if len(before.outputs) != len(after.outputs):
        yield f"{len(before.outputs)} outputs, then {len(after.outputs)}"
    for position, (value, other) in enumerate(zip(before.outputs, after.outputs, strict=False)):
        if (value.dtype and other.dtype and value.dtype != other.dtype) or not _alike(value.shape, other.shape):
            yield f"output {position}: {value.type}, then {other.type}"


def _alike(shape: tuple[Any, ...] | None, other: tuple[Any, ...] | None) -> bool:
    if shape is None or other is None:
        return True
    if len(shape) != len(other):
        return False
    pairs = zip(shape, other, strict=True)
    return all(a is None or b is None or a == b or (isinstance(a, str) and isinstance(b, str)) for a, b in pairs)
