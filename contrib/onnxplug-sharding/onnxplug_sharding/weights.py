"""From the PyTorch model's parameters to the initializers that store them: the axis in the file of each dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch

from onnxplug import OnnxProgram, UsageError
from onnxplug.build.stored import META, Origin
from onnxplug_sharding.layout import Layout, Mesh, Split

#: Key of a placed initializer's metadata, which the name of the configuration follows: the layouts of its parameters in
#: their own dimensions, an axis and a number of blocks for each dimension of the mesh.
PARAMETERS = "pkg.onnxplug.sharding.parameters."


def origins(program: OnnxProgram) -> dict[ir.Value, Origin]:
    """The initializers that store tensors of the PyTorch model, or are computed from them."""
    values = program.model.graph.initializers.values()
    return {value: origin for value in values if (origin := value.meta.get(META)) is not None}


def parts_of(origin: Origin) -> tuple[Origin, ...]:
    """The tensors from which an initializer is made."""
    return origin.parts or (origin,)


def _order(origin: Origin) -> tuple[int, ...] | None:
    """For each axis of an initializer its parameter's dimension; ``None`` where it is more than a permutation of it."""
    order = tuple(range(len(origin.shape)))
    for key in origin.keys:
        kind, *rest = key if isinstance(key, tuple) else (key,)
        if kind == "permuted":
            order = tuple(order[axis] for axis in rest[0])
        elif kind != "half":  # the cast of dtype="float16"
            return None
    return order if not origin.parts else None


def stored_layout(value: ir.Value, origin: Origin, layouts: Mapping[str, Layout], mesh: Mesh) -> Layout | None:
    """The layout of an initializer, from its parameters' layouts; ``None`` where no parameter is placed.

    Raises:
        UsageError: A shard of a parameter is no shard of the initializer, or two parameters are placed differently.
    """
    result: list[Split | None] = [None] * len(mesh.shape)
    placed = False
    for number, part in enumerate(parts_of(origin)):
        layout = agreed(part, layouts)
        if layout is None:
            continue
        placed = True
        order = _order(origin)
        for dimension, split in enumerate(layout):
            if split is None:
                continue
            shards = mesh.shape[dimension]
            found = (
                replace(split, axis=order.index(split.axis))
                if order is not None
                else _probed(value, origin, number, split, shards)
            )
            if result[dimension] not in (None, found):
                raise UsageError(
                    f"{value.name!r} is made of parameters that are placed differently: {', '.join(_names(origin))}",
                    hint="Place them alike, or export with optimize=False, which leaves them apart.",
                )
            result[dimension] = found
    return tuple(result) if placed else None


def _names(origin: Origin) -> list[str]:
    return [part.targets[0] for part in parts_of(origin)]


def agreed(part: Origin, layouts: Mapping[str, Layout]) -> Layout | None:
    """The layout of a parameter, which may have several names; ``None`` where it is not placed.

    Raises:
        UsageError: Two names have different layouts.
    """
    found = {name: layouts[name] for name in part.targets if name in layouts}
    if len(set(found.values())) > 1:
        raise UsageError(f"{', '.join(map(repr, found))} are one tied parameter, which has two placements")
    return next(iter(found.values()), None)


def _probed(value: ir.Value, origin: Origin, number: int, split: Split, shards: int) -> Split:
    """The split of an initializer that is computed from parameters, by marking each shard of a parameter with NaN.

    Raises:
        UsageError: The shards of the parameter are no shards of the initializer.
    """
    parts = parts_of(origin)
    if parts[number].dtype.is_floating_point:
        marked = [_computed(origin, number, _shard_mask(parts[number].shape, split, shards, i)) for i in range(shards)]
        shape = marked[0].shape
        for blocks in {split.blocks, 1}:
            for axis, size in enumerate(shape):
                found = Split(axis, blocks)
                if size % (shards * blocks) == 0 and all(
                    bool((mask == _shard_mask(shape, found, shards, i)).all()) for i, mask in enumerate(marked)
                ):
                    return found
    raise UsageError(
        f"the parameter {parts[number].targets[0]!r} is stored as {value.name!r} in a form in which its shards are no slices",
        hint="Export with optimize=False, or leave this parameter out of the plan.",
    )


def _shard_mask(shape: Any, split: Split, shards: int, index: int) -> torch.Tensor:
    size = shape[split.axis]
    if size % (split.blocks * shards):
        raise UsageError(f"a dimension of {size} can't be divided into {split.blocks * shards} equal shards")
    place = torch.arange(size) % (size // split.blocks) // (size // split.blocks // shards) == index
    return place.reshape([-1 if axis == split.axis else 1 for axis in range(len(shape))]).expand(tuple(shape))


def _computed(origin: Origin, number: int, mask: torch.Tensor) -> torch.Tensor:
    """The mask of an initializer's elements that depend on the marked elements of a part."""
    tensors = [torch.ones(part.shape, dtype=part.dtype) for part in parts_of(origin)]
    tensors[number] = tensors[number].masked_fill(mask, float("nan"))
    made = origin.make(*[p.make(t) for p, t in zip(origin.parts, tensors, strict=True)] if origin.parts else tensors)
    if not isinstance(made, torch.Tensor) or not made.is_floating_point():
        raise UsageError(
            f"the parameter {parts_of(origin)[number].targets[0]!r} is stored as packed numbers, not as its shards"
        )
    return made.isnan()
