"""Plans of tensor parallelism, and modules with DTensors, as layouts of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch

from onnxplug import UsageError
from onnxplug.text import did_you_mean
from onnxplug_sharding.layout import Layout, Mesh, Split


@dataclass(frozen=True)
class Style:
    """The division of a module along one dimension of the mesh.

    Attributes:
        by: ``"columns"`` (a linear layer's outputs), ``"rows"`` (its inputs), or ``""`` for replicated parameters.
        blocks: As :attr:`Split.blocks`.
        moved: Whether the module's result gets the layout of ``output``.
        output: The result's split.
        embedding: Whether the style is for embeddings, by rows or columns of the table; ``None`` for any module.
    """

    by: str = ""
    blocks: int = 1
    moved: bool = False
    output: Split | None = None
    embedding: bool | None = None


#: transformers' names of styles. ``all_reduce`` and the like only describe what a process does with its part of a
#: result.
STYLES = {
    "colwise": Style("columns", embedding=False),
    "colwise_rep": Style("columns", moved=True, embedding=False),
    "colwise_gather_output": Style("columns", moved=True, embedding=False),
    "rowwise": Style("rows", embedding=False),
    "rowwise_rep": Style("rows", embedding=False),
    "rowwise_split_input": Style("rows", embedding=False),
    "packed_colwise": Style("columns", blocks=2, embedding=False),
    "packed_rowwise": Style("rows", blocks=2, embedding=False),
    "embedding_rowwise": Style("rows", embedding=True),
    "embedding_colwise": Style("columns", moved=True, embedding=True),
    "sequence_parallel": Style(moved=True, output=Split(1)),
    **dict.fromkeys(
        ("replicate", "replicated_with_grad_allreduce", "all_reduce", "mla_kv_a_proj", "moe_tp_experts"), Style()
    ),
    **dict.fromkeys(("moe_identity_expert", "local_params"), Style()),
}


@dataclass
class Plan:
    """A plan with resolved patterns.

    Attributes:
        mesh: The devices.
        along: The dimension of the mesh that styles divide along.
        layouts: The layouts of parameters by name, in their own dimensions.
        results: Module to its style, where its result gets another layout.
        unused: The patterns of the model's own plan without a match.
    """

    mesh: Mesh
    along: int = 0
    layouts: dict[str, Layout] = field(default_factory=dict)
    results: dict[str, Style] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def resolve(plan: Any, mesh: Any, parameters: Mapping[str, int], embeddings: Mapping[str, bool]) -> Plan:
    """The layouts of a plan.

    Args:
        plan: A mapping of patterns to styles or placements, or a module.
        mesh: The mesh; ``None`` for the DTensors' mesh.
        parameters: The parameters of the program, with their numbers of dimensions.
        embeddings: By parameter name, whether a weight is looked up, and no factor of a product.

    Raises:
        UsageError: The plan doesn't fit.
    """
    if isinstance(plan, torch.nn.Module):
        tensors = {name: p for name, p in _tensors(plan).items() if hasattr(p, "placements")}
        if tensors:
            return _of_tensors(tensors, mesh, parameters)
        patterns = getattr(plan, "tp_plan", None)
        if not patterns:
            raise UsageError(
                "the model has neither DTensors nor a tp_plan",
                hint="Give a plan: shard(program, {'up': 'colwise'}, mesh=2).",
            )
        return _of_patterns(patterns, mesh, parameters, embeddings, strict=False)
    if not isinstance(plan, Mapping):
        raise UsageError(f"plan= takes a mapping or a module, got {type(plan).__name__}")
    return _of_patterns(plan, mesh, parameters, embeddings, strict=True)


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _of_tensors(tensors: Mapping[str, Any], mesh: Any, parameters: Mapping[str, int]) -> Plan:
    meshes = [tensor.device_mesh for tensor in tensors.values()]
    if any(other != meshes[0] for other in meshes):
        raise UsageError("the DTensors lie on several meshes", hint="A configuration of ONNX has a single one.")
    if mesh is not None and Mesh.of(mesh).shape != Mesh.of(meshes[0]).shape:
        raise UsageError(f"the DTensors lie on a mesh of {list(Mesh.of(meshes[0]).shape)}, which mesh= contradicts")
    plan = Plan(Mesh.of(meshes[0]))
    for name, tensor in tensors.items():
        layout = _layout(name, tensor.placements, tensor.dim(), plan.mesh)
        if name in parameters:
            plan.layouts[name] = layout
        elif any(layout):
            raise _unknown(name, parameters)
    return plan


def _of_patterns(
    patterns: Mapping[Any, Any],
    mesh: Any,
    parameters: Mapping[str, int],
    embeddings: Mapping[str, bool],
    *,
    strict: bool,
) -> Plan:
    if mesh is None:
        raise UsageError("a plan needs mesh=: a DeviceMesh, its sizes or a number of devices")
    plan = Plan(Mesh.of(mesh))
    plan.along = plan.mesh.names.index("tp") if "tp" in plan.mesh.names else len(plan.mesh.shape) - 1
    of_modules: dict[str, Layout] = {}
    for pattern, entry in patterns.items():
        style = None if isinstance(entry, Sequence) and not isinstance(entry, str) else _style(pattern, entry)
        names = [name for name in parameters if _matches(name, pattern)]
        placed = plan.layouts if names else of_modules
        names = names or [name for name in parameters if _matches(name.rpartition(".")[0], pattern)]
        if not names and not (style == Style() and any(_matches(name, pattern, within=True) for name in parameters)):
            if strict:
                raise _unknown(pattern, parameters)
            plan.unused.append(pattern)
        for name in names:
            if style is None:
                layout = _layout(name, entry, parameters[name], plan.mesh)
            else:
                split = _split(style, parameters[name], embeddings.get(name, False))
                layout = tuple(split if d == plan.along else None for d in range(len(plan.mesh.shape)))
                if style.moved:
                    plan.results[name.rpartition(".")[0]] = style
            if placed.setdefault(name, layout) != layout:
                raise UsageError(f"two entries of the plan place {name!r} differently")
    plan.layouts = {**of_modules, **plan.layouts}  # entries of a parameter precede entries of its module
    return plan


def _matches(name: str, pattern: Any, *, within: bool = False) -> bool:
    """Whether a name, or with ``within`` its beginning, matches a pattern; ``*`` stands for a word or a part of it."""
    if not isinstance(pattern, str):
        raise UsageError(f"a plan's patterns are names of modules and parameters, got {pattern!r}")
    words, wanted = name.split("."), pattern.split(".")
    if len(words) != len(wanted) and not (within and len(words) > len(wanted)):
        return False
    return all(fnmatchcase(word, other) for word, other in zip(words, wanted, strict=False))


def _unknown(name: str, parameters: Mapping[str, int]) -> UsageError:
    modules = {parameter.rpartition(".")[0] for parameter in parameters}
    return UsageError(
        f"the plan names {name!r}, which is no parameter of the program and no module with parameters",
        hint=did_you_mean(name, [*modules, *parameters]),
    )


def _style(pattern: str, entry: Any) -> Style:
    if isinstance(entry, str):
        if entry not in STYLES:
            raise UsageError(
                f"the plan's style {entry!r} of {pattern!r} is unknown, or one of expert parallelism",
                hint=did_you_mean(entry, STYLES),
            )
        return STYLES[entry]
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    if isinstance(entry, ColwiseParallel):
        (output,) = _layout(pattern, entry.output_layouts, None, None)
        return Style("columns", moved=output != Split(-1), output=output)
    if isinstance(entry, RowwiseParallel):
        (output,) = _layout(pattern, entry.output_layouts, None, None)
        return Style("rows", moved=output is not None, output=output)
    if isinstance(entry, SequenceParallel):
        return Style(moved=True, output=_layout(pattern, entry.sequence_sharding, None, None)[0])
    raise UsageError(
        f"the plan's style {type(entry).__name__} of {pattern!r} is none that ONNX's nodes can have",
        hint="Styles are ColwiseParallel, RowwiseParallel, SequenceParallel, transformers' names, and lists of placements.",
    )


def _split(style: Style, rank: int, is_embedding: bool) -> Split | None:
    """The split of a module's parameter by a style."""
    if not style.by or rank == 0:
        return None
    if style.embedding if style.embedding is not None else is_embedding:
        return Split(0 if style.by == "rows" else rank - 1, style.blocks)
    if rank == 1:  # a bias
        return Split(0, style.blocks) if style.by == "columns" else None
    return Split(rank - 2 if style.by == "columns" else rank - 1, style.blocks)


def _layout(name: str, placements: Sequence[Any], rank: int | None, mesh: Mesh | None) -> Layout:
    """DTensor's placements as a layout; negative dimensions stay negative where the rank isn't known."""
    if mesh is not None and len(placements) != len(mesh.shape):
        raise UsageError(f"{name!r} has {len(placements)} placements on a mesh of {len(mesh.shape)} dimensions")
    layout: list[Split | None] = []
    for placement in placements:
        if placement is None or isinstance(placement, Split):
            split = placement
        elif not hasattr(placement, "is_partial"):
            raise UsageError(f"the placement of {name!r} is {placement!r}, not a Shard, Replicate or Split")
        elif placement.is_partial():
            raise UsageError(
                f"{name!r} is {placement}: ONNX's sharding specifications have no partial sums",
                hint="Redistribute it first.",
            )
        else:
            # ``is_shard`` is false for the strided shards of FSDP over tensor parallelism and of packed weights.
            split = None if placement.is_replicate() else Split(placement.dim, getattr(placement, "split_factor", 1))
        if split is not None and rank is not None:
            if not -rank <= split.axis < rank:
                raise UsageError(f"{name!r} has {rank} dimensions, and is split along {split.axis}")
            split = Split(split.axis % rank, split.blocks)
        layout.append(split)
    return tuple(layout)
