"""``to_onnx(quantize=…)``: nodes in 8 and 4 bits, the differences of results, and invalid input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import OnnxProgram
from onnxplug.cli.app import run

X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """A convolution, linear layers of one and of three axes, and a layer whose weight an embedding shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(4, 8, 3, padding=1)
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        self.embedding = nn.Embedding(50, 64)
        self.last = nn.Linear(64, 50, bias=False)
        self.last.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.convolution(self.embedding(ids)).relu()
        return self.second(self.first(x).relu()), self.last(y)


INPUTS = (X, torch.arange(12).reshape(3, 4))
SHAPES = ({0: "rows"}, {0: "batch"})


def export(kind: str, **options: Any) -> OnnxProgram:
    program = onnxplug.to_onnx(Network().eval(), INPUTS, dynamic_shapes=SHAPES, quantize=kind, verify=True, **options)
    onnx.checker.check_model(program.model_proto)
    assert program(torch.randn(7, 64), INPUTS[1])[0].shape == (7, 64)
    return program


@pytest.mark.parametrize(
    ("kind", "operators", "cosine", "share"),
    [
        ("dynamic", {"MatMulInteger": 3}, 0.999, 0.5),
        ("dynamic:convolutions=yes,per_channel=no", {"MatMulInteger": 3, "ConvInteger": 1}, 0.999, 0.5),
        ("qdq", {"MatMul": 1, "Gemm": 2, "Conv": 1}, 0.999, 0.5),
        ("qdq:method=percentile,percentile=99.9", {"MatMul": 1, "Gemm": 2, "Conv": 1}, 0.99, 0.5),
        ("qdq:method=entropy,per_channel=no", {"MatMul": 1, "Gemm": 2, "Conv": 1}, 0.99, 0.5),
        ("int4", {"MatMulNBits": 3}, 0.99, 0.4),
        ("int4:block_size=16,symmetric=no,accuracy_level=1", {"MatMulNBits": 3}, 0.99, 0.4),
    ],
)
def test_products_and_accuracy(kind: str, operators: dict[str, int], cosine: float, share: float) -> None:
    data = {"calibrate": [INPUTS, (X * 0.5, INPUTS[1])]} if kind.startswith("qdq") else {}
    program = export(kind, **data)
    done = program.precision
    assert done.operators == operators
    assert [item.name for item in done.accuracy] == ["output_0", "output_1"]
    assert all(cosine < item.cosine < 1 and 0 < item.mean < item.largest for item in done.accuracy)
    assert done.bytes_after < share * done.bytes_before
    left = {node.op_type for node in done.wide}
    assert left == ({"Conv"} if done.operators.keys().isdisjoint({"Conv", "ConvInteger"}) else set())
    report = program.verify(seeds=())
    assert report.quantised is done
    assert "compared is the model before quantising, not the quantised one" in str(report)
    assert str(done.accuracy[1]) in str(report)
    # the reports' own numbers
    torch.testing.assert_close(
        float((program(*INPUTS)[0] - Network().eval()(*INPUTS)[0]).abs().max()) <= done.accuracy[0].largest + 1e-5, True
    )


@pytest.mark.long
def test_settings_reach_the_nodes() -> None:
    nodes = [n for n in export("int4:block_size=64,symmetric=no").model.graph if n.op_type == "MatMulNBits"]
    assert {(n.attributes.get_int("block_size"), n.attributes.get_int("accuracy_level")) for n in nodes} == {(64, 4)}
    assert all(len(n.inputs) > 3 and n.inputs[3] is not None for n in nodes)
    (convolution,) = [n for n in export("qdq", calibrate=[INPUTS]).model.graph if n.op_type == "Conv"]
    restored = convolution.inputs[1].producer()  # type: ignore[union-attr]
    assert restored is not None
    assert restored.inputs[1].shape == ir.Shape([8])  # type: ignore[union-attr]  # a scale for each channel


@pytest.mark.long
def test_percentiles_and_entropy_leave_outliers_out() -> None:
    x = X.clone()
    x[0, 0] = 1000.0
    scales = []
    for method in ("minmax", "percentile,percentile=99", "entropy"):
        program = onnxplug.to_onnx(nn.Linear(64, 64), (x,), quantize=f"qdq:method={method}", calibrate=[(x,)])
        quantised = next(n for n in program.model.graph if n.op_type == "QuantizeLinear")
        scales.append(float(quantised.inputs[1].const_value.numpy()))  # type: ignore[union-attr]
    assert scales[1] < 0.1 * scales[0]
    assert scales[2] < scales[0]


def test_four_bits_in_half_precision() -> None:
    program = export("int4", dtype="float16")
    assert program.precision.kind == "int4, float16"
    (scales,) = {n.inputs[2].dtype for n in program.model.graph if n.op_type == "MatMulNBits"}  # type: ignore[union-attr]
    assert scales == ir.DataType.FLOAT16


@pytest.mark.long
def test_recurrent_networks_and_branches() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(8, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.lstm(x)[0]
            return torch.cond(y.sum() > 0, lambda y: self.linear(y), lambda y: self.linear(y) + 1, (y,))

    program = onnxplug.to_onnx(Branching().eval(), (torch.randn(5, 1, 8),), quantize="dynamic", verify=True)
    assert {"DynamicQuantizeLSTM", "MatMulInteger"} <= program.precision.operators.keys()


def test_modules_as_functions_are_quantised() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
    program = onnxplug.to_onnx(model, (X,), functions=True, quantize="int4")
    assert program.precision.operators == {"MatMulNBits": 3}


@pytest.mark.parametrize("kind", ["dynamic", "qdq", "int4"])
@pytest.mark.parametrize(
    ("model", "args", "why"),
    [
        (nn.ReLU(), (X,), "it has no MatMul, Gemm or Conv in float32"),
        (torch.matmul, (X, X.T), "1 MatMul: both operands are computed"),
    ],
)
def test_nothing_to_quantise_is_an_error(
    kind: str, model: Any, args: tuple[Any, ...], why: str, tmp_path: Path
) -> None:
    if kind == "qdq" and model is torch.matmul:
        return  # its operands are quantised by the data
    with pytest.raises(onnxplug.ConversionError, match=f"nothing was quantised .*{why}"):
        onnxplug.to_onnx(model, args, tmp_path / "m.onnx", quantize=kind, calibrate=[args])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int8"}, "quantize= takes 'dynamic', 'qdq' or 'int4', not 'int8'"),
        ({"quantize": "int4:size=3"}, "int4 has no setting 'size'"),
        ({"quantize": "int4:block_size=33"}, "block_size is one of 16, 32, 64, 128, 256, got 33"),
        ({"quantize": "int4:symmetric=maybe"}, "symmetric is yes or no, got 'maybe'"),
        (
            {"quantize": "qdq:method=best", "calibrate": [(X,)]},
            "method is one of minmax, percentile, entropy, got best",
        ),
        ({"quantize": "qdq"}, "quantize='qdq' needs data for the scales of activations"),
        ({"quantize": "qdq", "calibrate": []}, "calibrate= has no data"),
        ({"quantize": "dynamic", "dtype": "float16"}, "can't be given together with dtype="),
        ({"quantize": "qdq", "calibrate": [{"y": X.numpy()}]}, "'y', which is no input of the model"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(onnxplug.UsageError, match=message):
        onnxplug.to_onnx(nn.Linear(64, 4), (X,), **options)


def test_weights_of_a_quantised_model_stay() -> None:
    program = export("int4")
    with pytest.raises(onnxplug.UsageError, match="the weights of a quantised model can't be replaced"):
        program.apply_weights(Network().state_dict())


MODEL = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2)).eval(), (torch.randn(3, 8),)
"""


@pytest.mark.long
def test_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.py").write_text(MODEL)
    np.savez("data.npz", input=np.random.default_rng(0).standard_normal((3, 8), np.float32))
    assert run(["export", "m.py:make", "-o", "m.onnx"]) == 0
    assert run(["export", "m.py:make", "-o", "q.onnx", "--quantize", "dynamic", "--verify", "--external-data"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "compared is the model before quantising, not the quantised one (dynamic)" in printed
    assert "dynamic: 2 nodes (MatMulInteger 2)" in printed
    assert "output output: largest difference" in printed
    assert len(list(tmp_path.glob("q.onnx.data*"))) == 1
    for kind in (["qdq", "--calibrate", "data.npz"], ["int4:block_size=16"], ["dynamic"]):
        assert run(["convert", "m.onnx", "-o", "c.onnx", "--quantize", *kind]) == 0
    assert run(["convert", "m.onnx", "-o", "c.onnx", "--quantize", "int4", "--to", "float16"]) == 0
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert run(["convert", "m.onnx", "-o", "n.onnx", "--quantize", "qdq"]) == 2
    assert "needs data for the scales" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def product(nodes: str, **weights: np.ndarray) -> onnx.ModelProto:
    """A model of one input of 32 columns, with weights by name."""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> graph (float[rows,32] x) => (float[rows,32] y) {{{nodes}}}'
    )
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def check_converted(model: onnx.ModelProto, folder: Path, kind: str) -> None:
    """Converts a file, and compares with the file on the data of the calibration and on other rows."""
    rng = np.random.default_rng(0)
    onnx.save(model, folder / "m.onnx")
    np.savez(folder / "data.npz", x=rng.standard_normal((4, 32), np.float32))
    calibrated = ["--calibrate", str(folder / "data.npz")] if kind == "qdq" else []
    assert run(["convert", str(folder / "m.onnx"), "--quantize", kind, "-o", str(folder / "q.onnx"), *calibrated]) == 0
    plain, quantised = (onnxruntime.InferenceSession(folder / name) for name in ("m.onnx", "q.onnx"))
    for x in (np.load(folder / "data.npz")["x"], rng.standard_normal((1, 32), np.float32)):
        (wanted,), (got,) = plain.run(None, {"x": x}), quantised.run(None, {"x": x})
        assert np.abs(got - wanted).max() < 0.25 * np.abs(wanted).max()


SQUARE = np.random.default_rng(1).standard_normal((2, 32, 32), np.float32)


@pytest.mark.parametrize("kind", ["dynamic", "qdq", "int4"])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_the_factor_of_a_bias(kind: str, beta: float, tmp_path: Path) -> None:
    model = product(f"y = Gemm<beta={beta}>(x, w, b)", w=SQUARE[0], b=SQUARE[1, 0] * 9)
    check_converted(model, tmp_path, kind)


@pytest.mark.parametrize("kind", ["dynamic", "int4"])
def test_a_weight_of_the_name_of_another_that_is_transposed(kind: str, tmp_path: Path) -> None:
    nodes = "z = Gemm<transB=1>(x, w) y = MatMul(z, w_transposed)"
    check_converted(product(nodes, w=SQUARE[0], w_transposed=SQUARE[1]), tmp_path, kind)
