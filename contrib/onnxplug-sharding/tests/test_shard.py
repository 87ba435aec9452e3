"""Plans in files: the results of each node, computed from its shards and compared with the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.distributed as dist
from onnxplug_sharding import Shardings, Split, read_shardings, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import onnxplug
from tests.support.sharding import prove

R = Replicate()


class Block(nn.Module):
    """An embedding, a block of two layers, and a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(24, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 48, bias=bias)
        self.down = nn.Linear(48, 16, bias=bias)
        self.head = nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.emb(ids)
        return self.head(x + self.down(nn.functional.silu(self.up(self.norm(x)))))


IDS = torch.arange(24).reshape(2, 12)
DYNAMIC = ({0: "batch", 1: "length"},)


def export(model: nn.Module, *args: Any, dynamic: Any = DYNAMIC, **options: Any) -> onnxplug.OnnxProgram:
    torch.manual_seed(0)
    return onnxplug.to_onnx(model.eval(), args or (IDS,), dynamic_shapes=dynamic, **options)


def saved(program: onnxplug.OnnxProgram, shardings: Shardings, folder: Path) -> Path:
    """The file of a sharded program, checked: it is valid, reads back equal, and has the same results."""
    path = folder / "model.onnx"
    program.save(path)
    onnx.checker.check_model(path, full_check=True)
    assert read_shardings(path) == shardings
    again = folder / "again.onnx"
    ir.save(ir.load(path), again)
    assert read_shardings(again) == shardings
    onnx.save(onnx.load(path), again)
    assert read_shardings(again) == shardings
    proto = onnx.load(path)
    assert proto.ir_version >= 11
    assert [c.name for c in proto.configuration] == [shardings.name]
    return path


def run(path: Path, *args: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(path)
    names = [value.name for value in session.get_inputs()]
    feed = {name: x.numpy() for name, x in zip(names, args, strict=True)}
    return torch.from_numpy(session.run(None, feed)[0])


TP = {"emb": "embedding_rowwise", "up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}
TORCH = {
    "emb": RowwiseParallel(input_layouts=R),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=R),
}


@pytest.mark.parametrize("plan", [TP, TORCH], ids=["transformers", "torch"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mesh", [2, (4,), (2, 2)], ids=str)
def test_a_plan(plan: Any, tied: bool, mesh: Any, tmp_path: Path) -> None:
    model = Block(tied=tied)
    program = export(model)
    assert program.model.ir_version < 11
    shardings = shard(program, plan, mesh=mesh)
    before = () if isinstance(mesh, int) or len(mesh) == 1 else (R,)
    head = {"emb.weight": (*before, Shard(0)), "head.weight": (*before, Shard(0))}
    assert shardings.parameters == {
        **head,
        "up.weight": (*before, Shard(0)),
        "up.bias": (*before, Shard(0)),
        "down.weight": (*before, Shard(1)),
    }
    assert shardings.initializers["up.weight.transposed"] == (*before, Shard(1))
    assert shardings.initializers["down.weight.transposed"] == (*before, Shard(0))
    assert shardings.undefined == ()
    path = saved(program, shardings, tmp_path)
    for ids in (IDS, torch.tensor([[3, 23, 0]])):
        torch.testing.assert_close(run(path, ids), model(ids))
        counts = prove(path, {"ids": ids.numpy()}, (mesh,) if isinstance(mesh, int) else mesh)
        # The lookup and the second layer are summed, the head's columns are joined; no other node needs a message.
        assert counts == Counter({"sum": 2, "concat": 1, "direct": 5 if tied else 4})


def test_elementwise_nodes_keep_the_split(tmp_path: Path) -> None:
    program = export(Block())
    nodes = shard(program, TP, mesh=2).nodes
    between = [of for name, of in nodes.items() if name.startswith(("up/Add", "Sigmoid", "silu", "Mul"))]
    assert between
    assert all(set(of.values()) <= {(Shard(2),), (Shard(0),)} for of in between)
    assert "norm/LayerNormalization" not in nodes  # whole before and after
    assert "down/Add" not in nodes
    assert nodes["head/MatMul"]["output"] == (R,)


def test_sequence_parallel(tmp_path: Path) -> None:
    """Between the products the sequence is split: the second product's sum is scattered, the norm has its own rows."""
    model = Block(tied=False)
    program = export(model)
    plan = {
        "emb": RowwiseParallel(input_layouts=R, output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    shardings = shard(program, plan, mesh=2)
    assert shardings.nodes["norm/LayerNormalization"]["layer_norm"] == (Shard(1),)
    assert shardings.nodes["up/MatMul"]["layer_norm"] == (R,)
    assert shardings.nodes["down/MatMul"]["gelu" if "gelu" in shardings.nodes["down/MatMul"] else "silu"] == (Shard(2),)
    assert shardings.nodes["down/Add"]["linear_1"] == (Shard(1),)
    assert shardings.nodes["Add"] == {"embedding": (Shard(1),), "linear_1": (Shard(1),), "add": (Shard(1),)}
    assert shardings.undefined == ("norm/LayerNormalization",)  # ONNX's formalism leaves it out
    path = saved(program, shardings, tmp_path)
    for ids in (IDS, IDS[:1, :4]):
        torch.testing.assert_close(run(path, ids), model(ids))
        assert prove(path, {"ids": ids.numpy()})["sum"] == 2


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_a_module_with_dtensors(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """``parallelize_module`` in a single process of a fake group."""
    model = Block(tied=False)
    program = export(model)
    count = 2 ** len(sizes)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
        if len(sizes) == 1:
            parallelize_module(model, mesh, {k: TORCH[k] for k in ("up", "down")})
        else:
            from torch.distributed.tensor import distribute_tensor

            for layer, placements in ((model.up, [Shard(1), Shard(0)]), (model.down, [R, Shard(1)])):
                placed = distribute_tensor(layer.weight.data, mesh, placements, src_data_rank=None)
                layer.weight = nn.Parameter(placed)
        wanted = {n: tuple(p.placements) for n, p in model.named_parameters() if hasattr(p, "placements")}
        shardings = shard(program, model)
    finally:
        dist.destroy_process_group()
    split = {name: placements for name, placements in wanted.items() if any(p != R for p in placements)}
    assert shardings.parameters == split
    assert shardings.names == ("dp", "tp")[-len(sizes) :]
    assert shardings.devices == tuple(f"cpu:{rank}" for rank in range(count))
    path = saved(program, shardings, tmp_path)
    for ids in (IDS, IDS[:1, :3]):
        counts = prove(path, {"ids": ids.numpy()}, sizes)
        assert counts["sum"] >= 1
        assert counts.total() == len(shardings.nodes)


class Products(nn.Module):
    """Weights that the exporter transposes, shares and folds."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(8, 12))
        self.right = nn.Parameter(torch.randn(12, 8))
        self.scale = nn.Parameter(torch.randn(8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Several products, sums and means."""
        y = torch.tanh(x @ self.left.T.contiguous().T)
        z = torch.addmm(self.bias, y.flatten(0, 1), self.right) * self.scale
        return z.reshape(x.shape) + x.mean(-1, keepdim=True) + self.scale.abs().sqrt()


X = torch.randn(2, 4, 8)


@pytest.mark.parametrize(
    "plan",
    [
        {"left": [Shard(0)]},
        {"left": [Shard(1)]},
        {"right": [Shard(0)]},
        {"right": [Shard(1)], "bias": [Shard(0)]},
        {"right": [Split(0, 2)]},
        {"left": [Split(1, 3)]},
        {"scale": [Shard(0)]},
        {"left": [Shard(1)], "right": [Shard(0)], "scale": [R]},
        {"left": [Shard(0), Shard(1)]},
        {"left": [Shard(0), Shard(0)]},
        {"left": [Split(1, 2), Shard(1)]},
        {"right": [Shard(1), Shard(0)], "bias": [Shard(0), R], "scale": [R, Shard(0)]},
    ],
    ids=str,
)
def test_placements_of_parameters(plan: dict[str, Any], tmp_path: Path) -> None:
    """Every placement is proved by computation, and reads back equal."""
    model = Products()
    program = export(model, X, dynamic=({0: "batch", 1: "length"},))
    sizes = (2,) * len(next(iter(plan.values())))
    shardings = shard(program, plan, mesh=sizes)
    assert shardings.parameters == {
        name: tuple(placements) for name, placements in plan.items() if any(p != R for p in placements)
    }
    assert shardings.undefined == ()
    path = saved(program, shardings, tmp_path)
    for x in (X, torch.randn(1, 2, 8)):
        torch.testing.assert_close(run(path, x), model(x))
        assert prove(path, {"x": x.numpy()}, sizes).total() == len(shardings.nodes) > 0


def test_what_has_no_parallel_form_is_left_to_the_runtime(tmp_path: Path) -> None:
    """A split bias of a product with a whole weight: its placement is written, and no parallel form of the product."""
    program = export(Products(), X, dynamic=({0: "batch", 1: "length"},))
    shardings = shard(program, {"bias": [Shard(0)]}, mesh=2)
    assert len(shardings.undefined) == 1
    assert shardings.nodes[shardings.undefined[0]] == {"bias": (Shard(0),)}
    assert shardings.parameters == {"bias": (Shard(0),)}
    saved(program, shardings, tmp_path)


class Folded(nn.Module):
    """A batch norm that is folded into the convolution before it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, bias=False)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One result."""
        return torch.relu(self.bn(self.conv(x)))


def test_a_folded_weight_has_the_axis_of_its_parameter(tmp_path: Path) -> None:
    program = export(Folded(), torch.randn(1, 4, 8, 8), dynamic=None)
    shardings = shard(program, {"conv": [Shard(1)]}, mesh=2)
    (placed,) = shardings.initializers.values()
    assert placed == (Shard(1),)
    assert [name for name in shardings.undefined if "Conv" in name]  # ONNX's formalism leaves convolutions out
    saved(program, shardings, tmp_path)
    beside = shard(program, {"conv": [Shard(0)], "bn.*": [R]}, mesh=2)
    assert beside.parameters["conv.weight"] == (Shard(0),)
    assert beside.parameters["bn.weight"] == (R,)
    both = {"conv": [Shard(0)], "bn.weight": [Shard(0)], "bn.bias": [Shard(0)]}
    assert set(shard(program, both, mesh=2).initializers.values()) == {(Shard(0),)}
    with pytest.raises(onnxplug.UsageError, match="made of parameters that are placed differently"):
        shard(program, {"conv": [Shard(1)], "bn.weight": [Shard(0)]}, mesh=2)


def test_half_precision_keeps_the_placements(tmp_path: Path) -> None:
    program = export(Block(), dtype="float16")
    shardings = shard(program, TP, mesh=2)
    assert shardings.parameters["down.weight"] == (Shard(1),)
    saved(program, shardings, tmp_path)


def test_weights_are_replaced_after_sharding(tmp_path: Path) -> None:
    program = export(Block())
    shardings = shard(program, TP, mesh=2)
    torch.manual_seed(1)
    other = Block().eval()
    program.apply_weights(other.state_dict())
    path = saved(program, shardings, tmp_path)
    torch.testing.assert_close(run(path, IDS), other(IDS))
    prove(path, {"ids": IDS.numpy()})


def test_optimised_programs() -> None:
    """``optimize()`` transposes the tied weight, and doesn't record it."""
    program = export(Block())
    program.optimize()
    assert program.folded == {"emb.weight", "head.weight"}
    with pytest.raises(onnxplug.UsageError, match=r"'emb\.weight' has been computed with by optimize"):
        shard(program, TP, mesh=2)
    assert shard(program, {"up": "colwise", "head": "replicate"}, mesh=2).parameters.keys() == {"up.weight", "up.bias"}


def test_the_proof_finds_a_wrong_axis(tmp_path: Path) -> None:
    program = export(Block())
    path = saved(program, shard(program, TP, mesh=2), tmp_path)
    proto = onnx.load(path)
    node = next(node for node in proto.graph.node if node.name == "up/Add")
    spec = next(s for s in node.device_configurations[0].sharding_spec if s.tensor_name in node.output)
    spec.sharded_dim[0].axis = 1  # the result is split by columns, not by words
    spec.sharded_dim[0].simple_sharding[0].ClearField("dim")
    onnx.save(proto, path)
    assert prove(path, {"ids": IDS.numpy()})["concat"] == 2  # a message that the right specification doesn't need
    spec = next(s for s in node.device_configurations[0].sharding_spec if s.tensor_name == "up.bias")
    spec.device[:] = [1, 0]
    onnx.save(proto, path)
    with pytest.raises(AssertionError, match="up/Add: its shards do not give its result"):
        prove(path, {"ids": IDS.numpy()})


class Branches(nn.Module):
    """A weight that a branch reads, and a layer that is a function in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One result."""
        y = torch.cond(x.sum() > 0, lambda x: self.inner(x), lambda x: x.sin(), (x,))
        return self.outer(y)


@pytest.mark.parametrize("functions", [None, [nn.Linear]])
@pytest.mark.long
def test_branches_and_functions_are_left_to_the_runtime(functions: Any, tmp_path: Path) -> None:
    model, x = Branches(), torch.randn(4, 8)
    program = export(model, x, dynamic=({0: "batch"},), functions=functions)
    shardings = shard(program, {"inner": "colwise", "outer": "colwise"}, mesh=2)
    assert shardings.parameters.keys() == {"inner.weight", "inner.bias", "outer.weight", "outer.bias"}
    assert len(shardings.undefined) == (1 if functions is None else 2)
    path = saved(program, shardings, tmp_path)
    for given in (x.abs(), -x[:1].abs()):
        torch.testing.assert_close(run(path, given), model(given))


def test_configurations_stand_side_by_side(tmp_path: Path) -> None:
    program = export(Block())
    shard(program, TP, mesh=2, name="two")
    shard(program, TP, mesh=4, name="four")
    shard(program, {"up": "colwise"}, mesh=3, name="four")  # replaces the former configuration
    program.save(tmp_path / "model.onnx")
    two, four = (read_shardings(tmp_path / "model.onnx", name) for name in ("two", "four"))
    assert (len(two.devices), len(four.devices)) == (2, 3)
    assert set(four.parameters) == {"up.weight", "up.bias"}
    prove(tmp_path / "model.onnx", {"ids": IDS.numpy()}, name="two")
    with pytest.raises(onnxplug.UsageError, match="several device configurations: 'two', 'four'"):
        read_shardings(tmp_path / "model.onnx")


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    program = export(Block(tied=False))
    shardings = shard(program, TP, mesh=2, stages={"emb": 0, "up": 0, "down": 1, "head": 2})
    stages = shardings.stages
    assert (stages["emb/Gather"], stages["up/MatMul"], stages["down/MatMul"], stages["head/MatMul"]) == (0, 0, 1, 2)
    assert stages["Add"] == 1
    assert len(stages) == program.model.graph.num_nodes()
    path = saved(program, shardings, tmp_path)
    assert {c.pipeline_stage for n in onnx.load(path).graph.node for c in n.device_configurations} == {0, 1, 2}
    for stages, message in (
        ({"up": 1, "down": 0}, "reads a result of stage 1"),
        ({"nothing": 1}, "in a module 'nothing'"),
        ({"up": -1}, "numbers from 0 on"),
    ):
        with pytest.raises(onnxplug.UsageError, match=message):
            shard(program, TP, mesh=2, stages=stages)


class Choosing(nn.Module):
    """A condition of the first layer; a branch within a branch reads the second layer's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.chosen = nn.Module()
        self.chosen.forward = self._choose  # type: ignore[method-assign]

    def _choose(self, seen: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        def inner(seen: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cond(seen.sum() > 1, lambda seen, y: y + seen, lambda seen, y: y - seen, (seen, y))

        return torch.cond(seen.sum() > 0, inner, lambda seen, y: -seen, (seen, y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The second layer's result, changed."""
        seen = self.first(x)
        return self.chosen(seen, self.second(seen))


def test_stages_of_values_that_branches_read() -> None:
    program = export(Choosing(), torch.randn(2, 4), dynamic=None)
    stages = shard(program, {"first": "colwise"}, mesh=2, stages={"first": 0, "second": 1}).stages
    assert [stages[str(node.name)] for node in program.model.graph if node.op_type == "If"] == [1]
    with pytest.raises(onnxplug.UsageError, match="is in stage 0, and reads a result of stage 1"):
        shard(program, {"first": "colwise"}, mesh=2, stages={"chosen": 0, "second": 1})


def test_onnxruntime_ignores_them(tmp_path: Path) -> None:
    """ONNX Runtime, as documented, loads and even keeps specifications, and computes on one device."""
    model = Block()
    program = export(model)
    shardings = shard(program, TP, mesh=8)
    path = saved(program, shardings, tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "kept.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.InferenceSession(path, options)
    kept = onnx.load(tmp_path / "kept.onnx")
    assert len(kept.configuration) == 1
    assert sum(bool(node.device_configurations) for node in kept.graph.node) == len(shardings.nodes)
    torch.testing.assert_close(run(path, IDS), model(IDS))


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("name", "extra", "counts"),
    [
        # The lookup and two products in each layer are summed, the head's columns are joined.
        ("Llama", {}, {"sum": 5, "concat": 1}),
        ("Llama", {"tie_word_embeddings": True}, {"sum": 5, "concat": 1}),
        ("Qwen2", {}, {"sum": 5, "concat": 1}),  # with biases
        ("Gemma2", {"head_dim": 8}, {"sum": 5, "concat": 1}),
        ("Phi3", {}, {"sum": 5, "concat": 5}),  # packed weights, whose results are whole
        ("Mixtral", {"num_local_experts": 4}, {"sum": 3, "concat": 1}),  # the experts are in a loop
    ],
)
@pytest.mark.long
def test_models_of_transformers(
    name: str, extra: dict[str, Any], counts: dict[str, int], vision: Callable[..., Any], tmp_path: Path
) -> None:
    """Models of transformers with their own plans."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SMALL, **extra)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.randint(0, 64, (2, 6))
    dynamic = {"input_ids": {0: "batch", 1: "length"}, "use_cache": None}
    program = onnxplug.to_onnx(model, kwargs={"input_ids": ids, "use_cache": False}, dynamic_shapes=dynamic)
    stages = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "lm_head": 1}
    shardings = shard(program, model, mesh=4, stages=stages)
    assert bool(shardings.undefined) == (name == "Mixtral")
    for layer in ("model.layers.0", "model.layers.1"):
        placed = {n: shardings.parameters.get(f"{layer}.{n}.weight") for n in ("self_attn.q_proj", "mlp.down_proj")}
        assert placed == {
            "self_attn.q_proj": None if name == "Phi3" else (Shard(0),),
            "mlp.down_proj": None if name == "Mixtral" else (Shard(1),),
        }
    if name == "Mixtral":
        assert shardings.parameters["model.layers.1.mlp.experts.gate_up_proj"] == (Split(1, 2),)
    path = saved(program, shardings, tmp_path)
    for x in (ids, ids[:1, :3]):
        torch.testing.assert_close(run(path, x), model(input_ids=x).logits)
        found = prove(path, {"input_ids": x.numpy()})
        assert {way: found[way] for way in counts} == counts
