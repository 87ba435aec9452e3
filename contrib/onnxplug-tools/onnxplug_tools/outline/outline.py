"""Makes functions of a model's modules: modules of the same nodes become calls of one function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from onnxplug.build.names import Names
from onnxplug.build.provenance import CLASS, MODULE_CALL
from onnxplug.build.scope import detach, graphs_of, nodes_of, used_by
from onnxplug_tools.outline.bodies import Body, shared_types
from onnxplug_tools.outline.calls import ModuleCall, ModuleCalls
from onnxplug_tools.outline.canonical import Canonical, canonical, is_constant
from onnxplug_tools.outline.regions import Region, Regions
from onnxplug_tools.outline.request import Functions
from onnxplug_tools.outline.terms import of_call, unnumbered, within

#: Modules of fewer nodes stay as they are unless their class is asked for: a call is no simpler than such a module.
MIN_NODES = 3
#: The first ONNX IR that describes the values within functions.
_DESCRIBES_VALUES = 10
_OF_TORCH = "torch.nn."


def outline(
    model: ir.Model, calls: ModuleCalls, wanted: Functions, version: int = 1, *, full: bool | None = False
) -> dict[str, int]:
    """Makes functions of modules, in place.

    A call of a module becomes a call of a function. Modules of a class share a function where their nodes are the
    same: operators, attributes, constants and wiring; their weights are inputs of the function. Takes time linear in
    the nodes and in the depth of modules.

    Args:
        version: The domain's version, unless the model has it already.
        full: Whether calls have full or short metadata about their origin; ``None`` for none.

    Returns:
        Function to the number of calls of modules that it stands for; functions that it calls go before it.
    """
    regions = Regions(model.graph, calls)
    for node in nodes_of(model.graph):  # the nodes of branches and bodies
        node.metadata_props.pop(MODULE_CALL, None)
    _keep_classes(regions, wanted)
    regions.give_back_shared()
    nodes = regions.by_call()
    results = {call: regions.outputs_of(members) for call, members in nodes.items()}
    forms = {call: canonical(members, results[call]) for call, members in nodes.items() if results[call]}
    if wanted.classes is None:
        forms = _repeated(forms, {call: _size(members) for call, members in nodes.items()})
    regions.keep(forms)
    run = _Outline(model, regions, forms, wanted.domain, version, full)
    counts = run.run() if forms else {}
    wanted.warn_of_unused(run.class_names())
    return counts


def _keep_classes(regions: Regions, wanted: Functions) -> None:
    """Keeps only the calls of modules that may become functions, by their class."""
    calls = list(dict.fromkeys(call for chain in regions.chains.values() for call in chain))
    if wanted.classes is not None:
        regions.keep(call for call in calls if wanted.names(call.class_name))
        return
    counts = Counter(call.class_name for call in calls)
    regions.keep(call for call in calls if counts[call.class_name] > 1)


def _key(call: ModuleCall, form: Canonical) -> Hashable:
    """A key that is equal for calls of one function."""
    return call.class_name, form.key


def _repeated(forms: Mapping[ModuleCall, Canonical], sizes: Mapping[ModuleCall, int]) -> dict[ModuleCall, Canonical]:
    """The calls that other calls repeat, without small calls, and only one of two nested calls of the same nodes."""
    counts = Counter(_key(call, form) for call, form in forms.items())
    kept = {c: form for c, form in forms.items() if counts[_key(c, form)] > 1 and sizes[c] >= MIN_NODES}
    for call in list(kept):
        around = call.around
        while around is not None and around not in kept:
            around = around.around
        if around is not None and sizes[around] == sizes[call]:
            # One of the two calls is superfluous: a container of torch, else the inner call.
            is_container = around.class_name.startswith(_OF_TORCH) and not call.class_name.startswith(_OF_TORCH)
            del kept[around if is_container else call]
    return kept


def _size(nodes: Sequence[ir.Node]) -> int:
    """The number of nodes, those of branches and bodies included."""
    return len(nodes) + sum(1 for node in nodes for graph in graphs_of(node) for _ in nodes_of(graph))


class _Made(NamedTuple):
    """A function of the model.

    Attributes:
        order: For each of its inputs, the position of that input in the canonical form.
        inner: The functions that it calls, by their keys, each to the number of calls.
    """

    function: ir.Function
    class_name: str
    order: Sequence[int]
    inner: Counter[Hashable]


class _Outline:
    """One run over a model; the given regions and forms are those of the calls that become calls of functions."""

    def __init__(
        self,
        model: ir.Model,
        regions: Regions,
        forms: Mapping[ModuleCall, Canonical],
        domain: str,
        version: int,
        full: bool | None,
    ) -> None:
        self.model = model
        self.regions = regions
        self.forms = forms
        self.domain = domain
        self.full = full
        #: The version of the domain: the model's, where rules have called functions in the domain already.
        self.version = model.opset_imports.get(domain, version)
        self._alike: dict[Hashable, list[ModuleCall]] = {}
        for call, form in forms.items():
            self._alike.setdefault(_key(call, form), []).append(call)
        self._made: dict[Hashable, _Made] = {}
        self._names = Names()
        self._names.take(f.name for f in model.functions.values() if f.domain == domain)
        for body in (model.graph, *(f.graph for f in model.functions.values())):
            self._names.take(node.op_type for node in nodes_of(body) if node.domain == domain)
        self._describes_values = model.ir_version >= _DESCRIBES_VALUES

    def class_names(self) -> set[str]:
        """The classes of modules of which functions were made."""
        return {made.class_name for made in self._made.values()}

    def run(self) -> dict[str, int]:
        """Makes the functions, and the calls in the graph."""
        graph = self.model.graph
        items = self.regions.arranged(self.regions.nodes, {})
        taken = [item for item in items if isinstance(item, Region)]
        names = Names()
        names.take(node.name for node in graph)
        called: Counter[Hashable] = Counter()
        calls = {region: self._call(region, called, names) for region in taken}
        replaced: dict[ir.Value, ir.Value] = {}
        for region, node in calls.items():
            for old, new in zip(self.forms[region.call].outputs, node.outputs, strict=True):
                new.name, new.type, new.shape = old.name, old.type, old.shape
                if old.metadata_props:
                    new.metadata_props.update(old.metadata_props)
                replaced[old] = new
        constants = self._remove(taken)
        for old, new in replaced.items():
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        graph.remove(list(graph))
        graph.extend(calls[item] if isinstance(item, Region) else item for item in items)
        for value in constants:
            if not value.uses() and value.name is not None:
                del graph.initializers[value.name]
        for made in self._made.values():
            self.model.functions[made.function.identifier()] = made.function
        if taken:
            graph.opset_imports[self.domain] = self.version
        return self._standing_for(called)

    def _remove(self, taken: Iterable[Region]) -> list[ir.Value]:
        """Detaches the nodes of regions from the values that they read; returns the constants among these values."""
        constants: dict[ir.Value, None] = {}
        for region in taken:
            for node in region.nodes:
                constants.update((v, None) for v in used_by(node) if v.is_initializer() and is_constant(v))
                detach(node)
                for graph in graphs_of(node):
                    for inner in nodes_of(graph):
                        detach(inner)
        return list(constants)

    def _standing_for(self, called: Counter[Hashable]) -> dict[str, int]:
        """The number of calls of modules that each function stands for; ``called`` counts the calls in the graph."""
        totals = Counter(called)
        for key, made in reversed(self._made.items()):  # a function comes after the functions that it calls
            for inner, count in made.inner.items():
                totals[inner] += totals[key] * count
        return {made.function.name: totals[key] for key, made in self._made.items()}

    # -- functions -----------------------------------------------------------------------------------------------------

    def _call(self, region: Region, called: Counter[Hashable], names: Names, body: Body | None = None) -> ir.Node:
        """The call that stands for a region.

        Args:
            called: Counts the calls of each function.
            body: The function that the call is part of; ``None`` for the model's graph.
        """
        call = region.call
        form = self.forms[call]
        key = _key(call, form)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._define(region)
        called[key] += 1
        inputs = [form.inputs[position] for position in made.order]
        path = call.path if body is None else within(call.path, body.path)
        return ir.Node(
            self.domain,
            made.function.name,
            inputs if body is None else [body.read(value) for value in inputs],
            outputs=[ir.Value() for _ in form.outputs],
            version=self.version,
            name=names.unique(f"{path.replace('.', '/')}/{made.function.name}" if path else made.function.name),
            metadata_props=of_call(call, "" if body is None else body.path, self.full),
        )

    def _define(self, region: Region) -> _Made:
        """A function with the nodes of a region as its body."""
        call = region.call
        form = self.forms[call]
        alike = [call, *(c for c in self._alike[_key(call, form)] if c is not call)]
        described = shared_types([(*f.inputs, *f.made) for f in (self.forms[c] for c in alike)])
        body = Body(call.path, described if self._describes_values else _undescribed, self.full)
        order = sorted(range(len(form.inputs)), key=lambda position: form.inputs[position].is_initializer())
        formals = [
            body.add_input(form.inputs[i], _input_name([(self.forms[c].inputs[i], c.path) for c in alike]))
            for i in order
        ]
        names = Names()
        called: Counter[Hashable] = Counter()
        depth = {node: self.regions.chains[node].index(call) + 1 for node in region.nodes}
        for item in self.regions.arranged(region.nodes, depth):
            if isinstance(item, Region):
                body.call(self._call(item, called, names, body), self.forms[item.call].outputs)
            else:
                body.copy(item)
        outputs = [body.values[value] for value in form.outputs]
        name = self._names.unique(call.short_name)
        metadata = {} if self.full is None else {CLASS: call.class_name}
        graph = ir.Graph(formals, outputs, nodes=body.nodes, name=name, metadata_props=metadata)
        versions = {**self.model.opset_imports, self.domain: self.version}
        graph.opset_imports.update({d: versions[d] for d in ("", *(node.domain for node in nodes_of(graph)))})
        return _Made(ir.Function(self.domain, name, graph=graph, attributes=()), call.class_name, order, called)


def _undescribed(value: ir.Value, copy: ir.Value) -> None:
    """Leaves a copy without type and shape."""


def _input_name(values: Sequence[tuple[ir.Value, str]]) -> str:
    """The name of a function's input: the name of the values that its calls pass, where it is the same in all calls.

    Args:
        values: For each call the value that it passes, and the path of the module called.
    """
    (first, _), *_ = values
    if first.is_initializer():
        inner = {within(str(value.name), path) for value, path in values}
        names = inner if len(inner) == 1 else {str(value.name).rpartition(".")[2] for value, _ in values}
    else:
        names = {unnumbered(str(value.name)) for value, _ in values}
    return names.pop() if len(names) == 1 else "weight" if first.is_initializer() else "x"
