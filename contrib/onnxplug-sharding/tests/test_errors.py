"""Plans, programs, and files of other writers that don't fit give one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.distributed as dist
from onnxplug_sharding import Split, read_shardings, shard
from torch import nn
from torch.distributed.tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

import onnxplug
from onnxplug.cli.app import app
from tests.support.sharding import prove


class Two(nn.Module):
    """Two linear layers of one kind, and a third that is tied to the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 12), nn.Linear(12, 6)])
        self.again = nn.Linear(12, 6, bias=False)
        self.again.weight = self.layers[1].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One result."""
        hidden = torch.relu(self.layers[0](x))
        return self.layers[1](hidden) + self.again(hidden)


def export(**options: Any) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(Two().eval(), (torch.randn(2, 3, 6),), **options)


@pytest.mark.parametrize(
    ("plan", "mesh", "message"),
    [
        ({"layers.2": "colwise"}, 2, "names 'layers.2', which is no parameter"),
        ({"layers.0.wieght": [Shard(0)]}, 2, "names 'layers.0.wieght'"),
        ({"layers.0": "colwize"}, 2, "style 'colwize' of 'layers.0' is unknown"),
        ({"layers.0": "ep_dispatch_experts"}, 2, "expert parallelism"),
        (
            {"layers.0": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Shard(1))},
            2,
            "PrepareModuleInput",
        ),
        ({"layers.0": 3}, 2, "style int"),
        ({3: "colwise"}, 2, "names of modules and parameters"),
        ({"layers.0": "colwise"}, None, "needs mesh="),
        ({"layers.0": "colwise"}, 5, "12 can't be divided into 5 equal shards"),
        ({"layers.0": "packed_colwise"}, 4, "12 can't be divided into 2 blocks of 4 equal shards"),
        ({"layers.0.weight": [Shard(2)]}, 2, "has 2 dimensions, and is split along 2"),
        ({"layers.0.weight": [Partial()]}, 2, "no partial sums"),
        ({"layers.0.weight": [Shard(0)]}, (2, 2), "1 placements on a mesh of 2"),
        (
            {"layers.1.weight": [Shard(0)], "again.weight": [Shard(1)]},
            2,
            "one tied parameter, which has two placements",
        ),
        (
            {"layers.*": "colwise", "layers.0": "rowwise"},
            2,
            "two entries of the plan place 'layers.0.weight' differently",
        ),
        ({"layers.0": ColwiseParallel(output_layouts=Shard(5))}, 2, "has no axis 5"),
        ({"layers.0": ColwiseParallel(output_layouts=Shard(1))}, 2, "can't be split as the plan wants: 3 can't"),
        (["layers.0"], 2, "takes a mapping or a module, got list"),
        (nn.Linear(2, 2), 2, "neither DTensors nor a tp_plan"),
    ],
    ids=str,
)
def test_plans(plan: Any, mesh: Any, message: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=message):
        shard(export(), plan, mesh=mesh)


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        ({"layers.0": "colwise", "layers.1": "colwize"}, None),
        ({"layers.0": ColwiseParallel(output_layouts=Shard(1))}, None),
        ({"layers.0": "colwise"}, {"layers.0": 1, "layers.1": 0}),
    ],
)
def test_a_refused_plan_leaves_everything_as_it_was(plan: Any, stages: Any) -> None:
    program = export()
    before = program.model_proto.SerializeToString(deterministic=True)
    with pytest.raises(onnxplug.UsageError):
        shard(program, plan, mesh=2, stages=stages)
    assert program.model_proto.SerializeToString(deterministic=True) == before
    placed = shard(program, {"layers.0": "colwise"}, mesh=2)
    with pytest.raises(onnxplug.UsageError):
        shard(program, plan, mesh=2, stages=stages)
    assert read_shardings(program) == placed


def test_a_models_own_plan_may_name_more_than_the_program_has() -> None:
    model = Two()
    model.tp_plan = {"layers.*": "colwise", "vision.*.proj": "rowwise", "again": "colwise"}  # type: ignore[assignment]
    assert shard(export(), model, mesh=2).parameters["layers.0.weight"] == (Shard(0),)


def test_parameters_go_before_their_modules() -> None:
    plan = {"layers.*": "replicate", "layers.0.weight": "colwise", "layers.1.bias": [Shard(0)]}
    placed = shard(export(), plan, mesh=2).parameters
    assert placed == {"layers.0.weight": (Shard(0),), "layers.1.bias": (Shard(0),)}


def test_dtensors_have_their_mesh() -> None:
    model, program = Two(), export()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        two, four = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2, 3])
        weight = distribute_tensor(model.layers[0].weight.data, two, [Shard(0)], src_data_rank=None)
        model.layers[0].weight = nn.Parameter(weight)  # type: ignore[assignment]
        assert shard(program, model).devices == ("cpu:0", "cpu:1")
        with pytest.raises(onnxplug.UsageError, match=r"on a mesh of \[2\], which mesh= contradicts"):
            shard(program, model, mesh=4)
        model.other = nn.Parameter(distribute_tensor(torch.ones(4), four, [Shard(0)], src_data_rank=None))
        with pytest.raises(onnxplug.UsageError, match="on several meshes"):
            shard(program, model)
        model.other = nn.Parameter(distribute_tensor(torch.ones(4), two, [Shard(0)], src_data_rank=None))
        with pytest.raises(onnxplug.UsageError, match="names 'other', which is no parameter of the program"):
            shard(program, model)
    finally:
        dist.destroy_process_group()


def test_quantised_programs() -> None:
    program = export(quantize="int4")
    with pytest.raises(onnxplug.UsageError, match="quantised program are packed"):
        shard(program, {"layers.0": "colwise"}, mesh=2)


class Fused(nn.Module):
    """A product whose result is split, which ONNX Runtime computes faster as three products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the parts."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return q * k + v


def test_weights_in_parts(tmp_path: Path) -> None:
    """Half of the whole weight isn't half of its first third; half of each third is."""
    x = torch.randn(2, 3, 64)
    program = onnxplug.to_onnx(Fused().eval(), (x,), target="onnxruntime:cpu")
    with pytest.raises(onnxplug.UsageError, match="in a form in which its shards are no slices"):
        shard(program, {"qkv.weight": [Shard(0)]}, mesh=2)
    shardings = shard(program, {"qkv": "packed_colwise"}, mesh=(1,))
    assert shardings.initializers == {}
    shardings = shard(program, {"qkv.*": [Split(0, 3)]}, mesh=2)
    assert len(shardings.initializers) == 6
    assert {p[0].is_shard() for p in shardings.initializers.values()} == {True}
    assert shardings.parameters == {"qkv.weight": (Split(0, 3),), "qkv.bias": (Split(0, 3),)}
    program.save(tmp_path / "model.onnx")
    assert prove(tmp_path / "model.onnx", {"x": x.numpy()}).keys() == {"direct"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    program = export()
    shard(program, {"layers.0": "colwise", "layers.1": "rowwise"}, mesh=2)
    program.save(tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def _weight(model: onnx.ModelProto) -> Any:
    """The specification of the weight of the first product."""
    node = next(node for node in model.graph.node if node.op_type == "MatMul")
    return next(s for s in node.device_configurations[0].sharding_spec if s.tensor_name == node.input[1])


def _simple(model: onnx.ModelProto) -> Any:
    return _weight(model).sharded_dim[0].simple_sharding[0]


def _spread(model: onnx.ModelProto) -> None:
    """Replaces every specification by a replica's."""
    for node in model.graph.node:
        for entry in node.device_configurations:
            for spec in entry.sharding_spec:
                del spec.sharded_dim[:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(_weight(m), "tensor_name", "other"), "names no input or output of the node"),
        (lambda m: setattr(_weight(m).sharded_dim[0], "axis", 2), "an axis that is not there, of 2"),
        (lambda m: setattr(_weight(m).sharded_dim[0], "axis", -3), "an axis that is not there, of 2"),
        (lambda m: _weight(m).sharded_dim.add().CopyFrom(_weight(m).sharded_dim[0]), "splits an axis twice"),
        (lambda m: setattr(_simple(m), "num_shards", 0), "into 0 shards"),
        (lambda m: setattr(_simple(m), "num_shards", 5), "leaves a remainder"),
        (lambda m: setattr(_simple(m), "dim_value", 10), "which has 12"),
        (lambda m: setattr(_simple(m), "num_shards", 3), "has 3 shards, on 2 devices"),
        (lambda m: _weight(m).device.__setitem__(0, 2), "names the device 2, of 2"),
        (lambda m: _weight(m).device.__setitem__(0, -1), "names the device -1, of 2"),
        (lambda m: _weight(m).device.__setitem__(0, 1), "names a device twice"),
        (lambda m: setattr(m.graph.node[0].device_configurations[0], "configuration_id", "x"), "does not declare"),
        (lambda m: setattr(m.configuration[0], "num_devices", 3), "has 3 devices, a mesh of"),
        (lambda m: m.configuration[0].device.append("more"), "2 devices, and other names"),
        (lambda m: m.ClearField("configuration"), "no device configuration\nHint"),
        (lambda m: _spread(m), "contradicts the placements of"),
    ],
)
def test_files(path: Path, change: Callable[[onnx.ModelProto], Any], message: str) -> None:
    read_shardings(path)
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)
    with pytest.raises(onnxplug.UsageError, match=message):
        read_shardings(path)


def test_a_file_without_the_mesh(path: Path) -> None:
    """A file of another writer has a mesh of one dimension, or the given mesh."""
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    assert read_shardings(path).mesh == (2,)
    assert read_shardings(path, mesh=(1, 2)).initializers["layers.0.bias"] == (Replicate(), Shard(0))
    with pytest.raises(onnxplug.UsageError, match="has 2 devices, a mesh of"):
        read_shardings(path, mesh=4)
    with pytest.raises(onnxplug.UsageError, match="there is no file"):
        read_shardings(path.with_name("none.onnx"))
    path.write_text("no model")
    with pytest.raises(onnxplug.UsageError, match="is no ONNX file that can be read"):
        read_shardings(path)


def test_the_command(path: Path) -> None:
    done = CliRunner().invoke(app, ["shardings", str(path), "--nodes"])
    assert done.exit_code == 0, done.output
    assert "tensor_parallel: 2 devices, a mesh of [2]" in done.output
    assert "layers.0.bias: S(0)" in done.output
    assert "layers/0/MatMul" in done.output


def test_the_command_without_shardings(tmp_path: Path) -> None:
    export().save(tmp_path / "plain.onnx")
    done = CliRunner().invoke(app, ["shardings", str(tmp_path / "plain.onnx")])
    assert isinstance(done.exception, onnxplug.UsageError)
    assert str(done.exception).startswith("the model has no device configuration")
