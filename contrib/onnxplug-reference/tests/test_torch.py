"""The evaluator by PyTorch's operators: exported models against eager PyTorch, devices, and operators in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnxplug_reference import ExtendedReferenceEvaluator, Kernel, TorchReferenceEvaluator
from torch import nn

import onnxplug
from tests.support.tolerances import looser


def parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "local": 1]> {text}')


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Planes(nn.Module):
    """Convolutions, pools and normalisations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, stride=2),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(8, 8, 3, groups=4, dilation=2, padding=2),
            nn.GroupNorm(2, 8),
            nn.AvgPool2d(2, ceil_mode=True),
            nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
            nn.LogSoftmax(-1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Recurrent(nn.Module):
    """A recurrent layer in both directions."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer = kind(4, 6, 2, bidirectional=True, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "transformer": (Block, (2, 5, 16)),
    "planes": (Planes, (2, 3, 24, 20)),
    "lstm": (lambda: Recurrent(nn.LSTM), (2, 5, 4)),
    "gru": (lambda: Recurrent(nn.GRU), (2, 5, 4)),
    "rnn": (lambda: Recurrent(nn.RNN), (2, 5, 4)),
}


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("evaluator", [ExtendedReferenceEvaluator, TorchReferenceEvaluator])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_exported_models(name: str, opset: int, evaluator: Any) -> None:
    make, shape = MODELS[name]
    model = make().eval()
    program = onnxplug.to_onnx(
        model, (torch.randn(shape),), dynamic_shapes=({0: "batch"},), opset_version=opset, plugins=[]
    )
    session = evaluator(program)
    for batch in (shape[0], 1, 3):
        x = torch.randn(batch, *shape[1:]) * 2
        with torch.no_grad():
            expected = model(x)
        leaves = torch.utils._pytree.tree_leaves(expected)
        got = session.run(None, {session.input_names[0]: x})
        assert len(got) == len(leaves)
        for mine, theirs in zip(got, leaves, strict=True):
            torch.testing.assert_close(mine, theirs, **looser("reference, products"))


class Fusible(nn.Module):
    """A model that ONNX Runtime fuses into operators of com.microsoft."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")
        self.gate = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gate(self.layer(x))
        return y * torch.sigmoid(1.702 * y)


@pytest.mark.usefixtures("seeded")
def test_a_model_optimised_by_onnxruntime(tmp_path: Path) -> None:
    """The model from ONNX Runtime's own optimiser, with its fused operators."""
    model = Fusible().eval()
    x = torch.randn(2, 5, 16)
    program = onnxplug.to_onnx(model, (x,), dynamic_shapes=({0: "batch"},), plugins=[])
    program.save(tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    fused = onnx.load(tmp_path / "optimised.onnx")
    assert {node.op_type for node in fused.graph.node if node.domain} >= {"QuickGelu", "FusedMatMul"}
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        session = evaluator(tmp_path / "optimised.onnx")
        for batch in (2, 1):
            y = torch.randn(batch, 5, 16)
            with torch.no_grad():
                got = session.run(None, {session.input_names[0]: y})[0]
                torch.testing.assert_close(got, model(y), **looser("fused"))


def test_results_are_tensors_of_the_device() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = Exp(x) }")
    x = np.array([0, 1], np.float32)
    (y,) = TorchReferenceEvaluator(model, device="cpu").run(None, {"x": x})
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y, torch.from_numpy(x).exp())
    parameter = nn.Parameter(torch.ones(2))
    (y,) = TorchReferenceEvaluator(model).run(None, {"x": parameter})
    assert not y.requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = Exp(x) }")
    (y,) = TorchReferenceEvaluator(model, device="cuda").run(None, {"x": torch.ones(2)})
    assert y.is_cuda


def test_operators_computed_in_numpy_are_listed() -> None:
    model = parsed(
        "g (float[N] x) => (float[N] z) { y = Exp(x)\n k = Constant <value_int = 4> ()\n w = HannWindow(k)\n z = Mul(y, w) }"
    )
    evaluator = TorchReferenceEvaluator(model)
    (z,) = evaluator.run(None, {"x": torch.ones(4)})
    assert evaluator.in_numpy == {("", "HannWindow")}
    torch.testing.assert_close(z, torch.e * torch.hann_window(4))


def test_text_and_four_bits_stay_arrays() -> None:
    model = parsed("g (float[N] x) => (int4[N] y, float[N] z) { y = Cast <to = 22> (x)\n z = Cast <to = 1> (y) }")
    y, z = TorchReferenceEvaluator(model).run(None, {"x": torch.tensor([-8.0, 3.0])})
    assert isinstance(y, np.ndarray)
    assert z.tolist() == [-8, 3]
    text = parsed('g (string[N] x) => (string[N] y) { y = StringNormalizer <case_change_action = "UPPER"> (x) }')
    (y,) = TorchReferenceEvaluator(text).run(None, {"x": np.array(["ab", "c"], object)})
    assert y.tolist() == ["AB", "C"]


def test_kernels_of_the_call_are_functions_of_tensors() -> None:
    model = parsed("g (float[N] x) => (float[N] y) { y = local.Twice <by = 3.0> (x) }")
    kernel = Kernel("Twice", lambda x, *, by=2.0: torch.mul(x, by), domain="local")
    (y,) = TorchReferenceEvaluator(model, kernels=[kernel]).run(None, {"x": torch.ones(2)})
    assert y.tolist() == [3, 3]
    builtin = Kernel("Twice", torch.neg, domain="local")
    plain = parsed("g (float[N] x) => (float[N] y) { y = local.Twice(x) }")
    (y,) = TorchReferenceEvaluator(plain, kernels=[builtin]).run(None, {"x": torch.ones(2)})
    assert y.tolist() == [-1, -1]


def test_steps_hooks_and_loops() -> None:
    model = parsed(
        """g (int64 n, float[3] x) => (float[3] last, float[T, 3] every) {
            last, every = Loop(n, , x) <body = b (int64 i, bool go, float[3] s) => (bool more, float[3] t, float[3] row)
            { more = Identity(go)\n t = Add(s, s)\n row = Neg(t) }>
        }"""
    )
    seen: list[str] = []
    evaluator = TorchReferenceEvaluator(model, after=lambda step: seen.append(step.op_type))
    run = evaluator.steps({"n": torch.tensor(2), "x": torch.ones(3)})
    assert [s.op_type for s in run] == seen == ["Identity", "Add", "Neg"] * 2 + ["Loop"]
    assert run.outputs is not None
    assert run.outputs[0].tolist() == [4, 4, 4]
    assert run.outputs[1].tolist() == [[-2] * 3, [-4] * 3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(dtype: torch.dtype) -> None:
    """Results of NumPy and of PyTorch are one rounding apart at most."""
    program = onnxplug.to_onnx(Block().eval().to(dtype), (torch.randn(2, 5, 16, dtype=dtype),), plugins=[])
    x = torch.randn(2, 5, 16, dtype=dtype)
    name = program.model.graph.inputs[0].name
    (a,), (b,) = (e(program).run(None, {name: x}) for e in (ExtendedReferenceEvaluator, TorchReferenceEvaluator))
    assert a.dtype == b.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(a, b, rtol=4 * step, atol=4 * step)


#: Operators on tensors without elements, or with one element for each mean: inputs, text and attributes.
SMALL: dict[str, tuple[list[np.ndarray], str]] = {
    "instances of one element": (
        [np.array([[[2], [3]]], np.float32), np.ones(2, np.float32), np.array([0.5, -1], np.float32)],
        "InstanceNormalization(a, b, c)",
    ),
    "no instances": (
        [np.zeros((0, 2, 3), np.float32), np.ones(2, np.float32), np.ones(2, np.float32)],
        "InstanceNormalization(a, b, c)",
    ),
    "groups of one element": (
        [np.array([[[2], [3]]], np.float32), np.ones(2, np.float32), np.array([0.5, -1], np.float32)],
        "GroupNormalization<num_groups=2>(a, b, c)",
    ),
    "sums of nothing": ([np.zeros((2, 0), np.float32), np.array(1)], "CumSum<exclusive=1>(a, b)"),
    "slices of nothing": (
        [np.zeros((3, 0), np.float32), np.array([[1]]), np.zeros((1, 0), np.float32)],
        "ScatterND(a, b, c)",
    ),
    "no batch": ([np.zeros((0, 3, 4), np.float32), np.zeros((0, 5, 1), np.int64)], "GatherND<batch_dims=1>(a, b)"),
    "the largest of nothing": ([np.zeros((2, 0), np.float32)], "Hardmax(a)"),
    "a slice from before the first element": (
        [np.arange(6, dtype=np.float32).reshape(3, 2), *(np.array([n]) for n in (-100, -200, 0, -1))],
        "Slice(a, b, c, d, e)",
    ),
}


@pytest.mark.parametrize("case", SMALL)
def test_small_tensors(case: str) -> None:
    inputs, node = SMALL[case]
    names = "abcde"[: len(inputs)]
    types = {"float32": "float", "int64": "int64"}
    formals = [
        f"{types[str(x.dtype)]}[{', '.join('N' for _ in x.shape)}] {name}" if x.ndim else f"int64 {name}"
        for name, x in zip(names, inputs, strict=True)
    ]
    rank = inputs[0].ndim
    result = f"float[{', '.join('M' for _ in range(rank))}] y"
    model = parsed(f"small ({', '.join(formals)}) => ({result}) {{ y = {node} }}")
    for value in (*model.graph.input, *model.graph.output):
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            size.dim_param = f"{value.name}{axis}"
    feeds = dict(zip(names, inputs, strict=True))
    (wanted,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    (result_,) = TorchReferenceEvaluator(model).run(None, feeds)
    torch.testing.assert_close(result_, torch.from_numpy(wanted))


@pytest.mark.parametrize("index", [[0, 3], [0, -4], [2, 0]])
def test_indices_outside_of_a_tensor(index: list[int]) -> None:
    """As in NumPy and ONNX Runtime an error, not the element of another row."""
    model = parsed("g (float[2, 3] x, int64[1, 2] i, float[1] u) => (float[2, 3] y) { y = ScatterND(x, i, u) }")
    feeds = {"x": np.zeros((2, 3), np.float32), "i": np.array([index]), "u": np.ones(1, np.float32)}
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        with pytest.raises(onnxplug.errors.EvaluationError, match="ScatterND"):
            evaluator(model).run(None, feeds)
