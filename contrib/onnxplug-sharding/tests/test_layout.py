"""Layouts as sharding specifications and back, against DTensor's own shards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from onnxplug_sharding.layout import Indivisible, Layout, Mesh, Split, assignment, layout_of, specification
from onnxplug_sharding.plans import _layout
from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from onnxplug import UsageError
from tests.support.sharding import held


@contextmanager
def process(rank: int, size: int) -> Iterator[None]:
    """A context that stands for one of several processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _value(shape: tuple[int | str, ...]) -> ir.Value:
    return ir.Value(name="w", shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.FLOAT))


def _proto(spec: ir.ShardingSpec) -> onnx.ShardingSpecProto:
    node = ir.Node("", "Identity", [spec.value], outputs=[ir.Value(name="y")])
    configuration = ir.ModelConfiguration("c", 8)
    node.device_configurations = (ir.NodeDeviceConfiguration(configuration, (spec,)),)
    made: onnx.NodeProto = ir.to_proto(node)
    return made.device_configurations[0].sharding_spec[0]


@st.composite
def placed(draw: Any) -> tuple[tuple[int, ...], Mesh, Layout]:
    """A shape, a mesh of one or two dimensions in any order of ranks, and a layout."""
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    count = math.prod(sizes)
    first = draw(st.integers(0, 3))
    ranks = tuple(draw(st.permutations(range(first, first + count))))
    rank = draw(st.integers(1, 3))
    shape = [draw(st.integers(1, 3)) for _ in range(rank)]
    layout: list[Split | None] = []
    for size in sizes:
        axis = draw(st.none() | st.integers(0, rank - 1))
        split = None if axis is None else Split(axis, draw(st.sampled_from([1, 1, 2])))
        layout.append(split if size > 1 else None)
        if split is not None:
            shape[split.axis] *= size * split.blocks
    return tuple(shape), Mesh(sizes, (), ranks), tuple(layout)


@settings(deadline=None, max_examples=150)
@given(placed())
def test_a_layout_comes_back_from_the_file(case: tuple[tuple[int, ...], Mesh, Layout]) -> None:
    shape, mesh, layout = case
    value = _value(shape)
    try:
        spec = specification(value, layout, mesh)
    except Indivisible:
        assert sum(split is not None for split in layout) == 2
        assert any(split and split.blocks > 1 for split in layout)  # other layouts fit by construction
        return
    found = layout_of(spec, mesh)
    assert found is not None
    again = specification(value, found, mesh)
    assert _proto(again) == _proto(spec)
    if all(split is None or split.blocks == 1 for split in layout):
        assert found == layout
    # a device holds each element, and all devices hold equally many
    whole = torch.arange(math.prod(shape)).reshape(shape).numpy()
    parts = [held(whole, _proto(spec), device) for device in range(math.prod(mesh.shape))]
    assert {part.size for part in parts} == {parts[0].size}
    assert set(itertools.chain.from_iterable(part.reshape(-1).tolist() for part in parts)) == set(range(whole.size))


PLACEMENTS = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((4,), [Shard(-1)]),
    ((4,), [Replicate()]),
    ((4,), [_StridedShard(0, split_factor=2)]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 3), [Shard(1), Shard(0)]),
    ((2, 3), [Shard(0), Shard(0)]),
    ((2, 3), [Replicate(), Shard(0)]),
    ((2, 3), [Shard(1), Replicate()]),
    ((2, 3), [Replicate(), Replicate()]),
    ((2, 3), [_StridedShard(0, split_factor=3), Shard(0)]),  # FSDP over tensor parallelism
    ((2, 3), [Replicate(), _StridedShard(1, split_factor=2)]),
    ((1, 3), [Shard(0), Shard(1)]),
]


@pytest.mark.parametrize(("sizes", "wanted"), PLACEMENTS, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_shards_are_dtensors(sizes: tuple[int, ...], wanted: list[Any], turned: bool) -> None:
    """The part of a device in a file is DTensor's part of its rank."""
    count = math.prod(sizes)
    ranks = torch.arange(count).reshape(sizes)
    ranks = ranks.flip(0) if turned else ranks
    whole = torch.arange(24.0 * 24).reshape(24, 24)
    for rank in range(count):
        with process(rank, count):
            grid = DeviceMesh("cpu", ranks)
            tensor = distribute_tensor(whole, grid, wanted, src_data_rank=None)
            mesh = Mesh.of(grid)
            layout = _layout("w", tensor.placements, 2, mesh)
            spec = specification(_value((24, 24)), layout, mesh)
            number = mesh.group(dict(enumerate((ranks == rank).nonzero()[0].tolist())))[0]
            mine = held(whole.numpy(), _proto(spec), number)
            assert torch.equal(torch.from_numpy(mine), tensor.to_local())
            assert _proto(specification(_value((24, 24)), layout_of(spec, mesh) or (), mesh)) == _proto(spec)


def test_a_specification_is_written_as_the_proposal_has_it() -> None:
    spec = _proto(specification(_value((2, 2)), (Split(0), None), Mesh((2, 2))))
    assert list(spec.device) == [-1, -2]
    assert {entry.key: list(entry.value) for entry in spec.index_to_device_group_map} == {-1: [0, 1], -2: [2, 3]}
    ((dim,),) = [list(spec.sharded_dim)]
    assert (dim.axis, [(s.dim_value, s.num_shards) for s in dim.simple_sharding]) == (0, [(2, 2)])
    whole = _proto(specification(_value((2, 2)), (None, None), Mesh((2, 2))))
    assert list(whole.device) == [-1]
    assert list(whole.index_to_device_group_map[0].value) == [0, 1, 2, 3]
    assert not whole.sharded_dim
    both = _proto(specification(_value((2, 2)), (Split(0), Split(1)), Mesh((2, 2))))
    assert list(both.device) == [0, 1, 2, 3]
    packed = _proto(specification(_value((8, 2)), (Split(0, 2),), Mesh((2,))))
    assert [(s.dim_value, s.num_shards) for s in packed.sharded_dim[0].simple_sharding] == [(2, 1), (4, 2)]
    dynamic = _proto(specification(_value(("batch", 2)), (Split(0),), Mesh((2,))))
    assert [(s.dim_param, s.num_shards) for s in dynamic.sharded_dim[0].simple_sharding] == [("batch", 2)]


def test_other_writers_forms_are_read() -> None:
    """Axes counted from the end, sizes left out, axes in another order, replicas without a group."""
    value, mesh = _value((4, 6)), Mesh((2, 2))
    bare = ir.ShardedDim(-1, (ir.SimpleShardedDim(num_shards=2),))
    rows = ir.ShardedDim(0, (ir.SimpleShardedDim(num_shards=2),))
    assert layout_of(ir.ShardingSpec(value, (0, 2, 1, 3), (), (bare, rows)), mesh) == (Split(0), Split(1))
    assert layout_of(ir.ShardingSpec(value, (0, 1, 2, 3), (), (bare, rows)), mesh) == (Split(1), Split(0))
    assert layout_of(ir.ShardingSpec(value, (0, 1, 2, 3)), mesh) == (None, None)
    assert layout_of(ir.ShardingSpec(value, (0, 1), (), (rows,)), mesh) is None  # two devices have nothing
    assert len(assignment(ir.ShardingSpec(value, (0, 1), (), (rows,)), 2)) == 2


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((), "sizes of at least 1"),
        ((0,), "sizes of at least 1"),
        ((True,), "sizes of at least 1"),
        ("two", "takes a DeviceMesh"),
    ],
)
def test_meshes_are_checked(mesh: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Mesh.of(mesh)


def test_placements_are_checked() -> None:
    mesh = Mesh((2,))
    with pytest.raises(UsageError, match="no partial sums"):
        _layout("w", [Partial()], 2, mesh)
    with pytest.raises(UsageError, match="has 2 dimensions, and is split along 2"):
        _layout("w", [Shard(2)], 2, mesh)
    with pytest.raises(UsageError, match="2 placements on a mesh of 1"):
        _layout("w", [Shard(0), Shard(1)], 2, mesh)
    with pytest.raises(UsageError, match="not a Shard"):
        _layout("w", ["colwise"], 2, mesh)
