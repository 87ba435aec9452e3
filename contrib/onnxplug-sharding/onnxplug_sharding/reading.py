"""``read_shardings``: the placements that a file states, checked."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxplug import OnnxProgram, UsageError
from onnxplug_sharding.layout import Layout, Mesh, Split, layout_of, shape_of
from onnxplug_sharding.rules import Undefined, step
from onnxplug_sharding.weights import PARAMETERS

#: Metadata of a model: the mesh of a configuration, for which ONNX has only the number of devices.
MESH = "pkg.onnxplug.sharding.mesh."
#: ``Shard(dim)`` and ``Replicate()`` of ``torch.distributed.tensor``; a :class:`Split` where an axis is divided block by block.
Placements = tuple[Any, ...]


@dataclass(frozen=True)
class Shardings:
    """The placements in a file for one configuration of devices, each with an entry for every dimension of the mesh.

    Attributes:
        name: The name of the configuration.
        devices: The names of the devices.
        mesh: The sizes of the mesh.
        names: The names of its dimensions.
        parameters: The placements of parameters by their names in PyTorch, in their own dimensions.
        initializers: The placements of weights by their names in the file, in the file's axes.
        nodes: Node to the placements of its inputs and outputs.
        undefined: The nodes whose parallel form the specification leaves open for these inputs.
        stages: Node to its stage of a pipeline.
    """

    name: str
    devices: tuple[str, ...]
    mesh: tuple[int, ...]
    names: tuple[str, ...]
    parameters: Mapping[str, Placements]
    initializers: Mapping[str, Placements]
    nodes: Mapping[str, Mapping[str, Placements]]
    undefined: tuple[str, ...]
    stages: Mapping[str, int]

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.devices)} devices, a mesh of {list(self.mesh)}"]
        lines += [f"  {name}: {', '.join(map(str, placed))}" for name, placed in self.initializers.items()]
        lines.append(f"  {len(self.nodes)} nodes have specifications; left to the runtime: {len(self.undefined)}")
        return "\n".join(lines)


def read_shardings(model: Any, name: str | None = None, *, mesh: Any = None) -> Shardings:
    """The placements in a file.

    Args:
        model: The path of a file, an ``onnx_ir.Model`` or an ``OnnxProgram``.
        name: The configuration; it may be left out where the file has a single configuration.
        mesh: A mesh in place of the file's; the placements of parameters are left out then. By default the mesh is the
            file's, which only files of :func:`shard` state, or has a single dimension.

    Raises:
        UsageError: The file can't be read, the configuration is unknown, or a specification contradicts the standard,
            its node or the mesh.
    """
    model = _model(model)
    configuration = _configuration(model, name)
    name = configuration.name
    grid = _mesh(model, configuration, mesh)
    nodes: dict[str, dict[ir.Value, Layout]] = {}
    undefined, stages = [], {}
    names = Counter(node.name for node in model.graph.all_nodes())
    for node in model.graph.all_nodes():
        key = (
            node.name
            if node.name and names[node.name] == 1
            else f"{node.name or node.op_type} of {node.outputs[0].name}"
        )
        for entry in node.device_configurations:
            if not any(entry.configuration is declared for declared in model.device_configurations):
                raise UsageError(f"{node.name!r} has a configuration that the model does not declare")
            if entry.configuration is not configuration:
                continue
            if entry.pipeline_stage is not None:
                stages[key] = entry.pipeline_stage
            if entry.sharding_specs:
                nodes[key] = layouts = _layouts(node, entry, configuration, grid)
                if not _is_defined(node, layouts, grid):
                    undefined.append(key)
    weights = [(v, layout) for of in nodes.values() for v, layout in of.items() if v.is_initializer()]
    parameters: dict[str, Placements] = {}
    for value, layout in weights if mesh is None else ():
        parameters |= _parameters(value, layout, name, grid)
    return Shardings(
        name,
        configuration.device_names,
        grid.shape,
        grid.names,
        parameters,
        {str(value.name): placements(layout) for value, layout in weights if any(layout)},
        {node: {str(v.name): placements(layout) for v, layout in of.items()} for node, of in nodes.items()},
        tuple(undefined),
        stages,
    )


def _model(model: Any) -> ir.Model:
    if isinstance(model, OnnxProgram):
        return model.model
    if isinstance(model, ir.Model):
        return model
    if not os.path.isfile(model):
        raise UsageError(f"there is no file {model}")
    try:
        return ir.load(model)
    except Exception as error:  # an error of protobuf, or of onnx_ir's serialisation
        raise UsageError(f"{model} is no ONNX file that can be read: {error}") from error


def _configuration(model: ir.Model, name: str | None) -> ir.ModelConfiguration:
    found = [each for each in model.device_configurations if name in (None, each.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(repr(each.name) for each in model.device_configurations) or "none"
    if name is None and found:
        raise UsageError(f"the model has several device configurations: {names}", hint="Name one of them.")
    raise UsageError(
        "the model has no device configuration" + ("" if name is None else f" {name!r}; it has {names}"),
        hint="onnxplug_sharding.shard writes it, before the program is saved." if name is None else None,
    )


def _parameters(value: ir.Value, layout: Layout, name: str, mesh: Mesh) -> dict[str, Placements]:
    """The placements of an initializer's parameters, which :func:`shard` wrote into its metadata."""
    noted = json.loads(value.metadata_props.get(PARAMETERS + name, "{}"))
    for split, size, *of in zip(layout, mesh.shape, *noted.values(), strict=True) if noted else ():
        if size > 1 and (split is None) == any(each is not None for each in of):
            raise UsageError(f"the specification of {value.name!r} contradicts the placements of {', '.join(noted)}")
    return {
        parameter: placements(tuple(split and Split(*split) for split in splits)) for parameter, splits in noted.items()
    }


def placements(layout: Layout) -> Placements:
    """A layout as DTensor's placements; a split block by block stays a :class:`Split`."""
    from torch.distributed.tensor import Replicate, Shard

    return tuple(
        Replicate() if split is None else Shard(split.axis) if split.blocks == 1 else split for split in layout
    )


def _mesh(model: ir.Model, configuration: ir.ModelConfiguration, mesh: Any) -> Mesh:
    stated = model.metadata_props.get(MESH + configuration.name)
    if mesh is not None:
        grid = Mesh.of(mesh)
    elif stated is not None:
        said = json.loads(stated)
        grid = Mesh(tuple(said["shape"]), tuple(said["names"]), tuple(said["ranks"]))
    else:
        grid = Mesh((configuration.num_devices,))
    if math.prod(grid.shape) != configuration.num_devices:
        raise UsageError(
            f"{configuration.name!r} has {configuration.num_devices} devices, a mesh of {list(grid.shape)} others"
        )
    if configuration.device_names and len(configuration.device_names) != configuration.num_devices:
        raise UsageError(f"{configuration.name!r} has {configuration.num_devices} devices, and other names")
    return grid


def _layouts(
    node: ir.Node, entry: ir.NodeDeviceConfiguration, configuration: ir.ModelConfiguration, mesh: Mesh
) -> dict[ir.Value, Layout]:
    found: dict[ir.Value, Layout] = {}
    for spec in entry.sharding_specs:
        problem = _problem(node, spec, configuration.num_devices)
        value = spec.value
        layout = layout_of(spec, mesh) if problem is None else None
        if problem is None and layout is None:
            problem = f"is that of no placements on a mesh of {list(mesh.shape)}"
        if problem is None and value in found:
            problem = "stands there twice"
        if problem is not None:
            raise UsageError(f"the specification of {value.name if value else None!r} at {node.name!r} {problem}")
        assert value is not None and layout is not None
        found[value] = layout
    return found


def _problem(node: ir.Node, spec: ir.ShardingSpec, devices: int) -> str | None:
    """The fault of a specification by itself, in words; ``None`` without a fault."""
    value = spec.value
    if value is None or value not in {*node.inputs, *node.outputs}:
        return "names no input or output of the node"
    shape = shape_of(value)
    rank = len(shape) if shape is not None else None
    axes = [dim.axis if rank is None else dim.axis % max(rank, 1) for dim in spec.sharded_dims]
    if rank is None and axes:
        return "splits a value of which no shape is known"
    if any(not -(rank or 0) <= dim.axis < (rank or 0) for dim in spec.sharded_dims):
        return f"splits an axis that is not there, of {rank}"
    if len(set(axes)) != len(axes):
        return "splits an axis twice"
    total = 1
    for dim, axis in zip(spec.sharded_dims, axes, strict=True):
        assert shape is not None
        sizes = [simple.dim for simple in dim.simple_shardings]
        for simple in dim.simple_shardings:
            if simple.num_shards < 1:
                return f"divides axis {axis} into {simple.num_shards} shards"
            if isinstance(simple.dim, int) and simple.dim % simple.num_shards:
                return f"divides {simple.dim} into {simple.num_shards} shards, which leaves a remainder"
            total *= simple.num_shards
        if all(isinstance(size, int) for size in (*sizes, shape[axis])) and math.prod(sizes) != shape[axis]:
            return f"divides {'*'.join(map(str, sizes))} on axis {axis}, which has {shape[axis]}"
    groups = {entry.key: entry.value for entry in spec.index_to_device_group_map}
    if total > 1 and len(spec.device) != total:
        return f"has {total} shards, on {len(spec.device)} devices"
    held = [device for key in spec.device for device in groups.get(key, (key,))]
    if outside := [device for device in held if not 0 <= device < devices]:
        return f"names the device {outside[0]}, of {devices}"
    return "names a device twice" if len(set(held)) != len(held) else None


def _is_defined(node: ir.Node, layouts: Mapping[ir.Value, Layout], mesh: Mesh) -> bool:
    """Whether a node has a parallel form for its inputs in their layouts."""
    given = [layouts.get(value) if value is not None else () for value in node.inputs]
    if any(layout is None for layout in given):
        return False
    try:
        for dimension in range(len(mesh.shape)):
            splits = [layout[dimension] if layout else None for layout in given]
            if list(step(node, splits, [split is not None for split in splits]).inputs) != splits:
                return False
    except Undefined:
        return False
    return True
