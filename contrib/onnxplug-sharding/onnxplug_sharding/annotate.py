"""``shard``: the placements of a plan, written into a program."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from onnxplug import OnnxProgram, UsageError
from onnxplug.build.stored import Origin
from onnxplug_sharding.layout import Indivisible, Layout, Mesh, Split, shape_of, specification
from onnxplug_sharding.plans import Plan, resolve
from onnxplug_sharding.reading import MESH, Shardings, read_shardings
from onnxplug_sharding.rules import Step, Undefined, step
from onnxplug_sharding.stages import assign_stages
from onnxplug_sharding.weights import PARAMETERS, agreed, origins, parts_of, stored_layout

#: The version of ONNX's intermediate representation that has device configurations.
IR_VERSION = 11
#: Operators whose result is the weight that they read.
_WEIGHT = ("Cast", "Identity", "Transpose")


def shard(
    program: OnnxProgram,
    plan: Any,
    *,
    mesh: Any = None,
    name: str = "tensor_parallel",
    stages: Mapping[str, int] | None = None,
) -> Shardings:
    """Writes the placements of a program's parameters into it: ONNX's device configuration and sharding specifications.

    The program computes the same results; its IR version becomes 11 where it was lower. Shard it last: later changes of
    the graph may drop the specifications.

    Args:
        program: An exported program.
        plan: A module whose parameters are DTensors; a model of transformers, whose ``tp_plan`` is taken; or a mapping of names of
            modules and parameters, in which ``*`` stands for a word, to styles (``"colwise"``, ``ColwiseParallel()``) or, for
            parameters, lists of placements.
        mesh: A ``DeviceMesh``, its sizes, or a number of devices. Styles divide along its dimension ``"tp"``, else along the last.
        name: The name of the configuration; an existing configuration of this name is replaced.
        stages: Names of modules to their stages of a pipeline; any other node is in the latest stage of the nodes whose
            results it or a node of its subgraphs reads.

    Returns:
        The placements, as :func:`read_shardings` reads them.

    Raises:
        UsageError: The plan or the mesh doesn't fit the program.
    """
    if program.unquantised is not None:
        raise UsageError(
            "the weights of a quantised program are packed, and not shards of its parameters",
            hint="Export without quantize=, and shard that program.",
        )
    known = origins(program)
    parameters = {
        target: len(part.shape) for origin in known.values() for part in parts_of(origin) for target in part.targets
    }
    state = program.exported_program.state_dict if program.folded and program.exported_program is not None else {}
    folded = {target: state[target].dim() for target in program.folded if target in state}
    resolved = resolve(plan, mesh, {**folded, **parameters}, _embeddings(program, known))
    for parameter in sorted(program.folded & resolved.layouts.keys()):
        if any(resolved.layouts[parameter]):
            raise UsageError(
                f"{parameter!r} has been computed with by optimize()", hint="Shard the program, and leave it as it is."
            )
    layouts: dict[ir.Value, Layout] = {}
    for value, origin in known.items():
        layout = stored_layout(value, origin, resolved.layouts, resolved.mesh)
        if layout is not None and any(layout):
            layouts[value] = tuple(s if n > 1 else None for s, n in zip(layout, resolved.mesh.shape, strict=True))
            _checked(value, origin.targets[0] if origin.targets else value.name, layouts[value], resolved.mesh)
    model = program.model
    with _all_or_nothing(model):
        configuration = _configuration(model, name, resolved.mesh)
        for value in layouts:
            placed = [(target, agreed(p, resolved.layouts)) for p in parts_of(known[value]) for target in p.targets]
            noted = {
                target: [each and (each.axis, each.blocks) for each in layout] for target, layout in placed if layout
            }
            value.metadata_props[PARAMETERS + name] = json.dumps(noted)
        _Writer(model, resolved, configuration, layouts, known).write()
        if stages:
            assign_stages(model, configuration, stages)
        return read_shardings(model, name)


@contextmanager
def _all_or_nothing(model: ir.Model) -> Iterator[None]:
    """A context that restores the model after an error."""
    version, configurations, noted = model.ir_version, model.device_configurations, dict(model.metadata_props)
    of_nodes = [(node, node.device_configurations) for node in model.graph.all_nodes()]
    of_weights = [(value, dict(value.metadata_props)) for value in model.graph.initializers.values()]
    try:
        yield
    except BaseException:
        model.ir_version, model.device_configurations = version, configurations
        for node, entries in of_nodes:
            node.device_configurations = entries
        model.metadata_props.clear()
        model.metadata_props.update(noted)
        for value, properties in of_weights:
            value.metadata_props.clear()
            value.metadata_props.update(properties)
        raise


def _configuration(model: ir.Model, name: str, mesh: Mesh) -> ir.ModelConfiguration:
    if not name or not isinstance(name, str):
        raise UsageError(f"name= is the name of a configuration, got {name!r}")
    if any(configuration.name == name for configuration in model.device_configurations):
        model.remove_device_configuration(name, cascade=True)
        for value in model.graph.initializers.values():
            value.metadata_props.pop(PARAMETERS + name, None)
    model.ir_version = max(model.ir_version, IR_VERSION)
    model.metadata_props[MESH + name] = json.dumps({"shape": mesh.shape, "names": mesh.names, "ranks": mesh.ranks})
    return model.add_device_configuration(name, device_names=mesh.devices)


def _checked(value: ir.Value, name: Any, layout: Layout, mesh: Mesh) -> None:
    try:
        specification(value, layout, mesh)
    except Indivisible as error:
        raise UsageError(
            f"{name!r} can't be split on a mesh of {list(mesh.shape)}: {error}",
            hint="ONNX leaves it to each runtime how it divides what has a remainder.",
        ) from error


def _embeddings(program: OnnxProgram, known: Mapping[ir.Value, Any]) -> dict[str, bool]:
    """By parameter name, whether a weight is looked up; for a name of a tied weight the nodes of its module decide."""
    found = {}
    for value, origin in known.items():
        for target in origin.targets:
            found[target] = any(node.op_type == "Gather" for node in _readers(value, target.rpartition(".")[0]))
    return found


def _readers(value: ir.Value, module: str) -> list[ir.Node]:
    """The nodes that compute with a weight; only nodes of the module where it has any."""
    readers: list[ir.Node] = []
    for node in value.consumers():
        readers += _readers(node.outputs[0], "") if node.op_type in _WEIGHT and node.outputs else [node]
    path = module.replace(".", "/") + "/"
    return [node for node in readers if module and (node.name or "").startswith(path)] or readers


class _Writer:
    """Writes the specifications of one configuration, from first node to last, each by the splits of its inputs."""

    def __init__(
        self,
        model: ir.Model,
        plan: Plan,
        configuration: ir.ModelConfiguration,
        layouts: Mapping[ir.Value, Layout],
        known: Mapping[ir.Value, Origin],
    ) -> None:
        self._model = model
        self._plan = plan
        self._configuration = configuration
        self._whole: Layout = (None,) * len(plan.mesh.shape)
        self._known = known
        #: The layouts of all split values; weights have the plan's layouts, and are whole by default.
        self._layouts = dict(layouts)
        self._fixed = set(known)
        self._moved = self._results()

    def write(self) -> None:
        """Writes the specifications of all nodes."""
        for node in self._model.graph:
            self._node(node)
        main = set(self._model.graph)
        for node in self._model.graph.all_nodes():
            if node not in main:
                self._annotate(node, self._placed(node))

    def _of(self, value: ir.Value | None) -> Layout:
        return self._layouts.get(value, self._whole) if value is not None else self._whole

    def _node(self, node: ir.Node) -> None:
        lying = [self._of(value) for value in node.inputs]
        fixed = [value in self._fixed for value in node.inputs]
        try:
            steps = [step(node, [layout[d] for layout in lying], fixed) for d in range(len(self._whole))]
            specs = self._specs(node, steps) if any(map(any, lying)) else {}
        except Undefined:
            # The node's parallel form is left to the runtime: only the plan's placements are written.
            specs = self._placed(node)
            if node not in self._moved:
                return self._annotate(node, specs)
        output = node.outputs[0] if node.outputs else None
        if output is not None and node in self._moved:
            before = specs.get(output, self._whole)
            moved = tuple(self._moved[node] if d == self._plan.along else split for d, split in enumerate(before))
            if any(moved) or specs:
                inputs = {value: self._of(value) for value in node.inputs if value is not None}
                specs = {**inputs, **specs, output: moved}
        if output is not None and any(specs.get(output, ())):
            self._layouts[output] = specs[output]
        if output is not None and node.op_type in _WEIGHT and node.inputs[0] in self._fixed:
            self._fixed.add(output)
        self._annotate(node, specs)

    def _specs(self, node: ir.Node, steps: Sequence[Step]) -> dict[ir.Value, Layout]:
        """The layouts of all inputs and outputs of a node.

        Raises:
            Undefined: The node takes a value in two layouts.
        """
        specs: dict[ir.Value, Layout] = {}
        for index, value in enumerate(node.inputs):
            if value is None:
                continue
            layout = tuple(each.inputs[index] for each in steps)
            if specs.setdefault(value, layout) != layout:
                raise Undefined  # one value in two layouts
        return {**specs, **{value: tuple(each.output for each in steps) for value in node.outputs}}

    def _placed(self, node: ir.Node) -> dict[ir.Value, Layout]:
        """The layouts of the split weights that a node reads."""
        return {value: self._of(value) for value in node.inputs if value in self._fixed and any(self._of(value))}

    def _annotate(self, node: ir.Node, specs: Mapping[ir.Value, Layout]) -> None:
        if not specs:
            return
        try:
            made = [specification(value, layout, self._plan.mesh) for value, layout in specs.items()]
        except Indivisible as error:
            raise UsageError(f"the result of {node.name!r} can't be split as the plan wants: {error}") from error
        entry = ir.NodeDeviceConfiguration(self._configuration, tuple(made))
        node.device_configurations = (*node.device_configurations, entry)

    def _results(self) -> dict[ir.Node, Split | None]:
        """The nodes whose results the plan gives another layout, with their splits."""
        moved: dict[ir.Node, Split | None] = {}
        for value, names in self._named().items():
            for module in names:
                style = self._plan.results.get(module)
                if style is not None:
                    for node in _readers(value, module):
                        end = self._end(node, module) if style.by == "columns" else node
                        moved[end] = _placed(style.output, end)
        return moved

    def _named(self) -> dict[ir.Value, list[str]]:
        """The initializers of parameters other than biases, with the names of their modules."""
        found: dict[ir.Value, list[str]] = {}
        for value in self._model.graph.initializers.values():
            origin = self._known.get(value)
            for part in parts_of(origin) if origin is not None else ():
                found.setdefault(value, []).extend(
                    target.rpartition(".")[0] for target in part.targets if _is_weight(target)
                )
        return found

    def _end(self, node: ir.Node, module: str) -> ir.Node:
        """The node of a linear layer's result: the node that adds the bias, where there is one."""
        consumers = node.outputs[0].consumers() if node.outputs else ()
        if len(consumers) == 1 and consumers[0].op_type == "Add":
            read = [self._known[value] for value in consumers[0].inputs if value is not None and value in self._known]
            if any(f"{module}.bias" in origin.targets for origin in read):
                return consumers[0]
        return node


def _is_weight(target: str) -> bool:
    return target.rpartition(".")[2] != "bias"


def _placed(split: Split | None, node: ir.Node) -> Split | None:
    """The split of a node's result, with its axis counted from the front."""
    shape = shape_of(node.outputs[0])
    if split is None:
        return None
    if shape is None or not -len(shape) <= split.axis < len(shape):
        raise UsageError(f"the result of {node.name!r} has no axis {split.axis}, along which the plan splits it")
    return Split(split.axis % len(shape), split.blocks)
