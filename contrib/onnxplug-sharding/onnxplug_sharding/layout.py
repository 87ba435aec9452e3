"""Meshes of devices, placements on them, and ONNX's sharding specification of a placed tensor.

A *layout* has an entry for each dimension of the mesh, as DTensor's placements do: a :class:`Split` of an axis of the
tensor, or ``None`` for a replica. ONNX has an entry for each axis of the tensor instead, and lists devices by shards.
For example, axis 0 of 12 rows on the mesh ``[[0, 1], [2, 3]]``: ``(Split(0), None)`` is ``num_shards=2`` with the
groups of devices ``[0, 1]`` and ``[2, 3]``; ``(Split(0), Split(0))`` is ``num_shards=4`` with the devices 0, 1, 2, 3.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxplug import UsageError


@dataclass(frozen=True)
class Split:
    """An axis of a tensor, divided between the devices along a dimension of a mesh.

    Attributes:
        axis: The axis.
        blocks: The number of equal blocks along the axis, each of which is divided separately: 2 for a weight that
            packs a gate and a projection.
    """

    axis: int
    blocks: int = 1


#: For each dimension of the mesh, the axis that is divided along it; ``None`` for a replica.
Layout = tuple[Split | None, ...]


class Indivisible(ValueError):
    """An axis can't be divided into equal shards."""


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid, as ``torch.distributed.DeviceMesh``.

    Attributes:
        shape: Its sizes.
        names: The names of its dimensions; empty where they have none.
        ranks: The ranks of the devices, row by row.
        kind: The type of the devices, for their names.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    kind: str = "device"

    def __post_init__(self) -> None:
        if not self.shape or any(
            not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in self.shape
        ):
            raise UsageError(f"a mesh has sizes of at least 1, got {list(self.shape)}")
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(math.prod(self.shape))))
        if len(set(self.ranks)) != len(self.ranks) or len(self.ranks) != math.prod(self.shape):
            raise UsageError(
                f"a mesh of {list(self.shape)} has {math.prod(self.shape)} devices, got {list(self.ranks)}"
            )
        if self.names and len(set(self.names)) != len(self.shape):
            raise UsageError(f"a mesh of {list(self.shape)} has as many names, got {list(self.names)}")

    @classmethod
    def of(cls, mesh: Any) -> Mesh:
        """The mesh of an argument: a number of devices, sizes, or a ``DeviceMesh``.

        Raises:
            UsageError: The argument is of another kind.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, int):
            return cls((mesh,))
        if isinstance(mesh, Sequence) and not isinstance(mesh, str):
            return cls(tuple(mesh))
        if hasattr(mesh, "mesh_dim_names"):
            ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
            return cls(tuple(mesh.mesh.shape), tuple(mesh.mesh_dim_names or ()), ranks, mesh.device_type)
        raise UsageError(f"mesh= takes a DeviceMesh, its sizes or a number of devices, got {mesh!r}")

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, in the order of their numbers in a file."""
        return tuple(f"{self.kind}:{rank}" for rank in sorted(self.ranks))

    def group(self, fixed: dict[int, int]) -> tuple[int, ...]:
        """The devices at the given coordinates, by their numbers in a file."""
        number = {rank: index for index, rank in enumerate(sorted(self.ranks))}
        coordinates = itertools.product(*map(range, self.shape))
        return tuple(
            number[rank]
            for rank, place in zip(self.ranks, coordinates, strict=True)
            if all(place[dimension] == index for dimension, index in fixed.items())
        )


def shape_of(value: ir.Value) -> ir.Shape | None:
    """The shape of a value, or of its constant where a file states no shape."""
    if value.shape is None and value.const_value is not None:
        return ir.Shape(value.const_value.shape.numpy())
    return value.shape


def divided(size: int | None, axis: int, layout: Layout, mesh: Mesh) -> list[tuple[int | None, int | None]]:
    """An axis as a product of factors, the outermost first, each with the dimension of the mesh that divides it, or ``None``.

    Args:
        size: The size of the axis; ``None`` where it is known at run time only.

    Raises:
        Indivisible: The shards would have different sizes.
    """
    factors: list[tuple[int | None, int | None]] = [(size, None)]
    for dimension, split in enumerate(layout):
        if split is None or split.axis != axis or mesh.shape[dimension] == 1:
            continue
        shards, blocks, done = mesh.shape[dimension], split.blocks, False
        new: list[tuple[int | None, int | None]] = []
        for factor, owner in factors:
            if owner is not None or done:
                new.append((factor, owner))
            elif factor is not None and blocks > 1 and blocks % factor == 0:
                new.append((factor, None))
                blocks //= factor
            else:
                if factor is None:
                    if blocks > 1:
                        raise Indivisible("blocks of an axis whose size is known at run time only")
                    new += [(shards, dimension), (None, None)]
                elif factor % (blocks * shards):
                    parts = f"{blocks} blocks of {shards}" if blocks > 1 else f"{shards}"
                    raise Indivisible(f"{factor} can't be divided into {parts} equal shards")
                else:
                    new += [(blocks, None), (shards, dimension), (factor // (blocks * shards), None)]
                done = True
        if not done:
            raise Indivisible(f"{size} can't be divided so often")
        factors = [(factor, owner) for factor, owner in new if factor != 1]
    return factors


def specification(value: ir.Value, layout: Layout, mesh: Mesh) -> ir.ShardingSpec:
    """The sharding specification of a value with a known shape.

    Raises:
        Indivisible: The shards would have different sizes.
    """
    dims: list[ir.ShardedDim] = []
    shape = shape_of(value) or ()
    owners: list[int] = []
    for axis in sorted({split.axis for split in layout if split is not None}):
        dim = shape[axis]
        size = dim if isinstance(dim, int) else None
        simple: list[ir.SimpleShardedDim] = []
        block, shards, inner = 1, 1, False
        factors = divided(size, axis, layout, mesh)
        for index, (factor, owner) in enumerate(factors):
            owners += [] if owner is None else [owner]
            block, shards = block * (factor or 1), shards * (1 if owner is None else factor or 1)
            inner = owner is None
            if inner or index == len(factors) - 1:
                simple.append(ir.SimpleShardedDim(block if size is not None else dim, shards))
                block, shards = 1, 1
        if any(owner is not None for _, owner in factors):
            dims.append(ir.ShardedDim(axis, tuple(simple)))
    devices: list[int] = []
    groups: list[ir.IndexToDeviceGroupMapEntry] = []
    for place in itertools.product(*(range(mesh.shape[owner]) for owner in owners)):
        group = mesh.group(dict(zip(owners, place, strict=True)))
        if len(group) == 1:
            devices += group
        else:
            groups.append(ir.IndexToDeviceGroupMapEntry(-len(groups) - 1, group))
            devices.append(groups[-1].key)
    return ir.ShardingSpec(value, tuple(devices), tuple(groups), tuple(dims))


#: The devices that hold each shard, by the places of the shard: triples of an axis, one of its divisions, and the index
#: in it.
Assignment = dict[frozenset[tuple[int, int, int]], frozenset[int]]


def assignment(spec: ir.ShardingSpec, rank: int) -> Assignment:
    """The devices that hold each shard, equal for any two equivalent specifications."""
    divisions = [
        (dim.axis % rank, number, simple.num_shards)
        for dim in spec.sharded_dims
        for number, simple in enumerate(dim.simple_shardings)
    ]
    groups = {entry.key: frozenset(entry.value) for entry in spec.index_to_device_group_map}
    if not any(shards > 1 for *_, shards in divisions):
        return {frozenset(): frozenset().union(*(groups.get(device, frozenset([device])) for device in spec.device))}
    held: Assignment = {}
    places = itertools.product(*(range(shards) for *_, shards in divisions))
    for device, place in zip(spec.device, places, strict=True):
        shard = {(a, n, at) for (a, n, shards), at in zip(divisions, place, strict=True) if shards > 1}
        held[frozenset(shard)] = groups.get(device, frozenset([device]))
    return held


def layout_of(spec: ir.ShardingSpec, mesh: Mesh) -> Layout | None:
    """The layout of a specification; ``None`` where no layout on this mesh gives it."""
    assert spec.value is not None
    rank = len(shape_of(spec.value) or ())
    wanted = assignment(spec, max(rank, 1)), _sizes(spec, rank)
    for layout in _candidates(spec, rank, mesh):
        try:
            made = specification(spec.value, layout, mesh)
        except Indivisible:
            continue
        if (assignment(made, max(rank, 1)), _sizes(made, rank)) == wanted:
            return layout
    return None


def _sizes(spec: ir.ShardingSpec, rank: int) -> set[tuple[int, tuple[Any, ...]]]:
    """The blocks and shards of each divided axis. A single division needs no size, which is the axis's."""
    return {
        (
            dim.axis % rank,
            tuple(
                (s.dim, s.num_shards) if len(dim.simple_shardings) > 1 else s.num_shards for s in dim.simple_shardings
            ),
        )
        for dim in spec.sharded_dims
        if any(simple.num_shards > 1 for simple in dim.simple_shardings)
    }


def _candidates(spec: ir.ShardingSpec, rank: int, mesh: Mesh) -> Iterator[Layout]:
    axes = sorted({dim.axis % rank for dim in spec.sharded_dims}) if rank else []
    outer = {simple.dim for dim in spec.sharded_dims for simple in dim.simple_shardings if isinstance(simple.dim, int)}
    blocks = [1, *sorted({*outer, *mesh.shape} - {1})]
    splits = [None, *(Split(axis, number) for number in blocks for axis in axes)]
    return itertools.product(*(splits if size > 1 else [None] for size in mesh.shape))
