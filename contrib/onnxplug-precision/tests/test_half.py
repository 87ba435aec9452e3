"""``to_onnx(dtype="float16")``: converted nodes, nodes in float32 and their reasons, against eager float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import OnnxProgram

LOOSER = {
    "half": ({"rtol": 1e-2, "atol": 5e-3}, "float16 has 11 bits"),
    "bfloat16": ({"rtol": 2e-2, "atol": 2e-2}, "bfloat16 has 8 bits"),
}
HALF = ir.DataType.FLOAT16
FLOAT = ir.DataType.FLOAT


def export(model: Any, *args: Any, dtype: str = "float16", **options: Any) -> OnnxProgram:
    program = onnxplug.to_onnx(model, args, dtype=dtype, verify=True, **options)
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program


def reasons(program: OnnxProgram) -> dict[str, str]:
    return {node.op_type: node.reason for node in program.precision.wide}


def casts(program: OnnxProgram) -> list[ir.Node]:
    return [node for node in program.model.graph.all_nodes() if node.op_type == "Cast"]


class Overflowing(nn.Module):
    """A model with activations in the hundreds of thousands, which a norm makes small again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x) * 300000.0))


def test_activations_beyond_65504_agree_with_float32() -> None:
    model = Overflowing().eval()
    x = torch.randn(3, 8)
    program = export(model, x, dynamic_shapes=({0: "batch"},))
    (got,) = program(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, model(x), **LOOSER["half"][0])
    assert not torch.isfinite(model.half()(x.half())).all()  # hence the Casts
    wide = {node.op_type: node for node in program.precision.wide}
    assert wide.keys() == {"Mul", "LayerNormalization"}
    assert "float16, which ends at 65504" in wide["Mul"].reason
    assert "it reaches" in wide["LayerNormalization"].reason
    assert "test_half.py:" in wide["Mul"].place
    assert program.precision.operators["Gemm"] == 2
    assert "stays in float32: Mul" in str(program.precision)
    assert all(v.dtype == HALF for name, v in program.model.graph.initializers.items() if name.startswith("first.w"))


def test_inputs_and_outputs_in_half_precision() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    x = torch.randn(3, 8)
    program = export(model, x, dynamic_shapes=({0: "batch"},), keep_io=False)
    graph = program.model.graph
    assert [v.dtype for v in (*graph.inputs, *graph.outputs)] == [HALF, HALF]
    assert casts(program) == []
    assert program(torch.randn(5, 8))[0].dtype == torch.float16
    assert [v.name for v in export(model, x, output_names=["y"]).model.graph.outputs] == ["y"]


class Masked(nn.Module):
    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = (1.0 - mask.float()) * self.fill
        return (x + bias[:, None]).softmax(-1)


@pytest.mark.parametrize("fill", [float(torch.finfo(torch.float32).min), -1e9, -1e4])
def test_the_fill_of_a_mask_is_a_number_of_float16(fill: float) -> None:
    x, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]])
    program = onnxplug.to_onnx(Masked(fill), (x, mask), dtype="float16", dynamic_shapes=({0: "batch"}, {0: "batch"}))
    program.verify(seeds=())
    program.verify(args=(x[:1], mask[:1]), seeds=())
    assert reasons(program) == {}
    assert len(program.precision.masks) == (fill < -65504)


def test_a_row_masked_as_a_whole_has_equal_shares() -> None:
    x, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0]])
    program = export(Masked(-1e9), x, mask)
    assert {"Add", "Softmax"} <= reasons(program).keys()
    torch.testing.assert_close(program(x, mask)[0][1], torch.full((4, 6), 1 / 6))


def test_a_large_constant_that_is_no_mask_keeps_its_node_wide() -> None:
    linear = nn.Linear(4, 4)
    program = export(lambda x: (linear(x).abs() * 1e6).log1p(), torch.rand(3, 4) + 0.5)
    assert any("the constant 1e+06 is beyond float16" in node.reason for node in program.precision.wide)
    clipped = export(lambda x: x.clamp(-1e9, 3e38) * 2, torch.randn(3, 4))
    assert reasons(clipped) == {}


def test_an_epsilon_keeps_its_node_wide() -> None:
    program = export(lambda x: x / (x.pow(2).mean(-1, keepdim=True) + 1e-12).sqrt(), torch.randn(3, 8))
    assert reasons(program) == {"Add": "the constant 1e-12 has few digits in float16, or is 0"}
    assert len(casts(program)) == 4  # at the input, the output, before the sum and after it


def test_values_that_are_tiny_stay_wide() -> None:
    linear = nn.Linear(8, 8)
    program = export(lambda x: linear((x * 1e-3 * 1e-3).square().sqrt() * 1e6), torch.rand(3, 8) + 0.5)
    assert "where float16 has few digits" in " ".join(reasons(program).values())


class Table(nn.Module):
    """Positions in a table, of which the samples read the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(5000.0))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = (self.places[index] * 1.0).long()
        before = self.places[: x.shape[0]] < 2049.0
        return self.linear(x) * before[:, None], places


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_integers_made_of_a_table_are_exact(dtype: str) -> None:
    model = Table().eval()
    shapes = ({0: "rows"}, {0: "count"})
    program = onnxplug.to_onnx(model, (torch.randn(3, 4), torch.tensor([1, 2])), dtype=dtype, dynamic_shapes=shapes)
    for rows, index in ((2060, [2049, 300, 4999]), (1, [2051])):
        x = torch.randn(rows, 4)
        wanted, places = model(x, torch.tensor(index))
        got, at = program(x, torch.tensor(index))
        assert at.equal(places)
        if dtype == "float16":  # bfloat16 keeps the digits of arithmetic that ends in integers alone
            torch.testing.assert_close(got, wanted, **LOOSER["half"][0])


def test_the_fill_of_a_mask_stays_finite_in_bfloat16() -> None:
    model = Masked(float(torch.finfo(torch.float32).min))
    x, mask = torch.randn(2, 4, 6), torch.tensor([[1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 1]])
    program = onnxplug.to_onnx(model, (x, mask), dtype="bfloat16", dynamic_shapes=({0: "batch"}, {0: "batch"}))
    for inputs in ((x, mask), (x[:1] * 2, mask[:1]), (x, mask * 0)):
        torch.testing.assert_close(program(*inputs)[0], model(*inputs), **LOOSER["bfloat16"][0])


def test_infinities_and_nan_of_the_samples_count_for_nothing() -> None:
    x = torch.randn(3, 4)
    x[0, 0], x[1, 1], x[2, 2] = float("inf"), float("-inf"), float("nan")
    program = export(lambda x: x.relu() + 1, x)
    assert reasons(program) == {}


def test_positions_and_integers_keep_their_digits() -> None:
    frequencies = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1]).float()[:, None] * frequencies
        places = (x[..., 0] * 0 + 2049.0).long()
        return x[..., :4] * angles.cos() + x[..., 4:] * angles.sin() + places[..., None]

    program = export(rotate, torch.randn(2, 300, 8), dynamic_shapes=({1: "length"},))
    assert {"Cos", "Sin"} <= reasons(program).keys()


def test_casts_of_integers_are_merged() -> None:
    def forward(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * n.float() + (n.float() * 300000.0).sum() * 1e-6

    program = export(forward, torch.randn(3, 4), torch.ones(3, 4, dtype=torch.int64))
    nodes = list(casts(program))
    assert nodes
    for node in nodes:
        source = node.inputs[0]
        assert source is not None
        assert source.producer() is None or source.producer().op_type != "Cast"
        assert source.dtype != node.outputs[0].dtype


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x * 2).relu(), lambda x: (x * 1000).cos(), (x,))


@pytest.mark.parametrize("examples", [None, [(torch.ones(3, 4),), (-torch.ones(3, 4),)]])
def test_branches(examples: Any) -> None:
    inputs = () if examples else (torch.ones(3, 4),)
    program = export(Branching(), *inputs, examples=examples)
    wide = [node.reason for node in program.precision.wide]
    assert ("it is not computed on the samples" in wide) == (examples is None)
    (node,) = [node for node in program.model.graph if node.op_type == "If"]
    kinds = {branch.outputs[0].dtype for branch in (node.attributes[n].as_graph() for n in node.attributes)}
    assert kinds == {node.outputs[0].dtype}


def test_loops() -> None:
    def forward(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        def step(i: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
            return i + 1, y * 1.5 + 1, z * 10.0

        _, y, z = torch.while_loop(lambda i, y, z: i < n, step, (torch.tensor(0), x, x))
        return y + z.log1p()

    program = export(forward, torch.rand(3, 4) + 1, torch.tensor(6))
    (loop,) = [node for node in program.model.graph if node.op_type == "Loop"]
    assert sorted(out.dtype.name for out in loop.outputs if out.dtype in (HALF, FLOAT)) == ["FLOAT", "FLOAT16"]


def test_scans() -> None:
    from torch._higher_order_ops.scan import scan

    def forward(x: torch.Tensor) -> torch.Tensor:
        last, all_ = scan(lambda carry, item: (carry * 0.5 + item, carry * item), x[0], x)
        return last + all_.sum(0)

    program = export(forward, torch.randn(5, 4))
    assert reasons(program) == {}


def test_functions_are_converted_in_their_bodies() -> None:
    class Block(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
            self.register_buffer("factor", torch.tensor(factor))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x).relu() * self.factor)

    model = nn.Sequential(Block(1.0), Block(1.0), Block(60000.0)).eval()
    program = export(model, torch.randn(3, 8), functions=[Block])
    assert len(program.model.functions) == 1
    assert {"Mul", "LayerNormalization"} <= reasons(program).keys()
    assert "Gemm" not in reasons(program)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) + 1,
        lambda x: x.topk(3).values * 2,
        lambda x: x.cumsum(-1),
        lambda x: torch.nn.functional.gelu(x).erf(),
    ],
)
def test_operators_whose_operands_differ(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
    convolution = nn.Conv2d(3, 3, 1)
    export(lambda x: forward(convolution(x)), torch.randn(2, 3, 8, 8))


def test_a_recurrent_network() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x)[0]

    export(Recurrent().eval(), torch.randn(2, 5, 8), dynamic_shapes=({1: "length"},))


def test_the_cpu_as_target_has_the_casts_in_the_file() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    program = export(model, torch.randn(3, 64), target="onnxruntime:cpu")
    assert "has no kernel for it in half precision" in reasons(program)["Tanh"]
    assert (
        program.precision.bytes_after < program.precision.bytes_before * 0.6
    )  # the weight is stored in half precision


def test_bfloat16() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    with pytest.warns(UserWarning, match="no kernel for bfloat16"):
        program = export(model, torch.randn(3, 64), dtype="bfloat16")
    assert program.precision.kind == "bfloat16"
    assert export(model, torch.randn(3, 64), dtype="bfloat16", target="onnxruntime:cpu")(torch.randn(3, 64))


def test_more_data_widen_operators_that_overflow() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return (linear(x).abs() * 100).log1p()

    linear = nn.Linear(4, 4)

    x = torch.rand(3, 4)
    assert reasons(export(forward, x)) == {}
    assert "Mul" in reasons(export(forward, x, calibrate=[(x * 1000,)]))


def test_weights_are_exchanged_in_half_precision(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(2, 4)
    program = export(model, x)
    program.apply_weights(other.state_dict())
    torch.testing.assert_close(program(x)[0], other(x), **LOOSER["half"][0])
    program.save(tmp_path / "m.onnx")
    assert {v.dtype for v in ir.load(tmp_path / "m.onnx").graph.initializers.values()} == {HALF}


def test_verification_finds_a_wrong_weight() -> None:
    program = export(nn.Linear(8, 8), torch.randn(3, 8))
    weight = next(v for name, v in program.model.graph.initializers.items() if "weight" in name)
    array = weight.const_value.numpy().copy()
    array[0, 0] += 0.5
    weight.const_value = ir.tensor(array, name=weight.name)
    with pytest.raises(onnxplug.VerificationError, match="differs"):
        program.verify()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "half"}, "dtype= takes 'float16' or 'bfloat16', not 'half'"),
        ({"dtype": "float16", "pieces": ["a"]}, "can't be given together with pieces="),
        ({"calibrate": [1]}, "calibrate= is data for quantize= or dtype="),
        ({"dtype": "float16", "calibrate": []}, "calibrate= has no data"),
        ({"dtype": "float16", "calibrate": "nowhere.npz"}, "there is no file nowhere.npz"),
        ({"dtype": "float16", "calibrate": [(torch.ones(2, 3),)]}, "call 0 of calibrate= does not fit the model"),
        ({"dtype": "float16", "calibrate": [{"y": torch.ones(2, 4).numpy()}]}, "'y', which is no input of the model"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=message):
        onnxplug.to_onnx(nn.Linear(4, 4), (torch.ones(2, 4),), **options)


def test_intermediates_and_integers_alone_are_refused() -> None:
    program = export(nn.Linear(4, 4), torch.ones(2, 4))
    with pytest.raises(onnxplug.UsageError, match="Export it without dtype="):
        program.verify(intermediates=True)
    with pytest.raises(onnxplug.UsageError, match="nothing of the model is in float32"):
        onnxplug.to_onnx(lambda x: x + 1, (torch.ones(2, dtype=torch.int64),), dtype="float16")


@pytest.mark.filterwarnings("ignore")
def test_a_constant_that_is_read_in_two_types_keeps_its_digits_for_integers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sizes", torch.tensor([1.0, 2049.0, 70000.0, -7.0]))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x + self.sizes.clamp(max=5), self.sizes.long(), self.sizes.double()

    model, x = Model(), torch.rand(3, 4)
    for dtype in ("float16", "bfloat16"):
        results = onnxplug.to_onnx(model, (x,), dtype=dtype)(x)
        added, integers, doubles = model(x)
        torch.testing.assert_close(results[0], added, **LOOSER["bfloat16"][0])
        torch.testing.assert_close(results[1], integers)
        torch.testing.assert_close(results[2], doubles, **LOOSER["bfloat16"][0])


@pytest.mark.filterwarnings("ignore")
def test_positions_and_integers_keep_their_digits_in_bfloat16() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
            angles = positions.float() * 0.01
            return x * torch.sin(angles)[:, None], (positions.float() / 7).long()

    model = Model()
    inputs = torch.rand(3, 4), torch.tensor([5, 3001, 70001])
    results = onnxplug.to_onnx(model, inputs, dtype="bfloat16")(*inputs)
    rotated, integers = model(*inputs)
    torch.testing.assert_close(results[0], rotated, **LOOSER["bfloat16"][0])
    torch.testing.assert_close(results[1], integers)
