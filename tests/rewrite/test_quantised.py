"""Quantised graphs that ONNX Runtime's optimisations get wrong: wrong for portable ONNX, right for the target onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.ao.quantization.fx._decomposed
import torch.nn.functional as F

import onnxplug
from onnxplug.torch_private import scan
from tests.chains.operators import c8, s8, u8, w8
from tests.rewrite.test_onnxruntime import outcome
from tests.support.check import Call, check
from tests.support.sampling import rotated
from tests.support.tolerances import looser

#: Linux's description of the processor; elsewhere it is taken to be a newer processor.
CPU = CPUINFO.read_text(encoding="utf-8") if (CPUINFO := Path("/proc/cpuinfo")).is_file() else "vnni"

torch.manual_seed(0)
ROWS = torch.randn(3, 4, 8)
IMAGE = torch.randn(3, 4, 8, 8)
#: A weight [in, out] of a product, weights of convolutions, a bias.
WEIGHT = torch.randn(8, 5) / 2
KERNEL = torch.randn(6, 4, 3, 3) / 5
TRANSPOSED = torch.randn(4, 6, 3, 3) / 5
BIAS = torch.randn(5)
SQUARE = torch.randn(8, 8) / 4


def fine(x: torch.Tensor) -> torch.Tensor:
    """Results in steps so small that a rounded weight shows."""
    return torch.fake_quantize_per_tensor_affine(x, 0.0137, 128, 0, 255)


def narrow(x: torch.Tensor, low: int = -127, high: int = 127) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.05, 3, low, high)


def of_bytes(x: torch.Tensor) -> torch.Tensor:
    levels = (x * 20).to(torch.int8)
    return torch.ops.quantized_decomposed.dequantize_per_tensor(levels, 0.05, 3, -128, 127, torch.int8)


def rounded(x: torch.Tensor) -> torch.Tensor:
    levels = torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.05, 128, 0, 255, torch.uint8)
    return torch.ops.quantized_decomposed.dequantize_per_tensor(levels, 0.05, 128, 0, 255, torch.uint8)


def coarse(x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 10.0, 128, 0, 255)


def ranged(x: torch.Tensor) -> torch.Tensor:
    """Quantised to bytes, from the least number to the greatest, and back."""
    ops = torch.ops.quantized_decomposed
    outcome = (*ops.choose_qparams.tensor(x, 0, 255, 6e-5, torch.uint8), 0, 255, torch.uint8)
    result: torch.Tensor = ops.dequantize_per_tensor.tensor(ops.quantize_per_tensor.tensor(x, *outcome), *outcome)
    return result


def beside_bytes(x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w8(WEIGHT.t()), BIAS)


def from_bytes(x: torch.Tensor) -> torch.Tensor:
    return F.linear(ranged(x), c8(WEIGHT.t()), BIAS)


def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    new = F.linear(ranged(state), w8(SQUARE), SQUARE[0]).tanh() + x @ c8(SQUARE, 1)
    return new, new.clone()


def sine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (y := x.sin()), rounded(y.mT)


def cosine(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (y := x.cos()), y.mT.exp()


#: Numbers and weights whose products add up to more than 16 bits in pairs.
LARGE, LARGE_ROWS = torch.full((8, 5), 6.35), torch.full((4, 3, 8), 5.0)
LARGE_KERNEL, LARGE_IMAGE = torch.full((6, 4, 3, 3), 6.35), torch.full((3, 4, 6, 6), 5.0)


#: Functions that ONNX Runtime gets wrong in the plain form on x86 processors without VNNI.
SATURATING: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "pairs, uint8": (lambda x: coarse(u8(x) @ s8(LARGE)), LARGE_ROWS),
    "pairs, uint8, numbers": (lambda x: u8(x) @ s8(LARGE), LARGE_ROWS),
    "pairs, int8": (lambda x: coarse(s8(x) @ s8(LARGE)), LARGE_ROWS),
    "pairs, by column": (lambda x: coarse(F.linear(u8(x), c8(LARGE.t(), 0), BIAS)), LARGE_ROWS[:, 0]),
    "pairs, computed scale": (lambda x: ranged(x) @ c8(LARGE, 1), LARGE_ROWS),
    "pairs, two operands": (lambda x: coarse(u8(x) @ s8(x).mT), LARGE_ROWS),
    "pairs, convolution": (lambda x: coarse(F.conv2d(u8(x), c8(LARGE_KERNEL, 0))), LARGE_IMAGE),
    "pairs, convolution, int8": (lambda x: coarse(F.conv2d(s8(x), s8(LARGE_KERNEL))), LARGE_IMAGE),
}

#: Functions that ONNX Runtime gets wrong in the plain form.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "weight, computed": (lambda x: x @ w8(WEIGHT / WEIGHT.norm(dim=0)), ROWS),
    "weight, computed and transposed": (lambda x: F.linear(x, w8((WEIGHT / WEIGHT.norm(dim=0)).t())), ROWS),
    "weight by column, computed": (lambda x: x @ c8(WEIGHT / WEIGHT.norm(dim=0), 1), ROWS),
    "weight by row": (lambda x: s8(x) @ c8(WEIGHT, 0), ROWS),
    "weight by row, transposed": (lambda x: F.linear(u8(x), c8(WEIGHT.t(), 1)), ROWS),
    "operands by row": (lambda x: s8(x[0]) @ c8(x[0], -1).mT, ROWS),
    "convolution": (lambda x: fine(F.conv2d(fine(x), KERNEL)), IMAGE),
    "convolution, relu": (lambda x: fine(F.relu(F.conv2d(fine(x), KERNEL, padding=1))), IMAGE),
    "convolution, bias": (lambda x: fine(F.conv2d(s8(x), KERNEL, torch.ones(6))), IMAGE),
    "convolution, moved": (lambda x: fine(F.conv2d(fine(x).transpose(2, 3)[..., 1:], KERNEL)), IMAGE),
    "convolution, pooled": (lambda x: fine(F.conv2d(F.max_pool2d(fine(x), 2), KERNEL)), IMAGE),
    "convolution by input channel": (lambda x: fine(F.conv2d(u8(x), c8(KERNEL, 1))), IMAGE),
    "convolution, transposed": (lambda x: fine(F.conv_transpose2d(fine(x), TRANSPOSED)), IMAGE),
    "linear": (lambda x: fine(F.linear(fine(x), WEIGHT.t(), BIAS)), ROWS[:, 0]),
    "linear of three axes": (lambda x: fine(F.linear(fine(x), WEIGHT.t(), BIAS)), ROWS),
    "output, transposed": (lambda x: ((y := x.sin()), fine(y.transpose(0, 1))), ROWS),
    "computed scale, bias": (lambda x: F.linear(ranged(x), w8(WEIGHT.t()), BIAS), ROWS),
    "computed scale, bias first": (lambda x: BIAS + ranged(x) @ c8(WEIGHT, 1), IMAGE),
    "computed scale, read twice": (lambda x: ((q := ranged(x)).sin(), F.linear(q, c8(WEIGHT.t()), BIAS)), ROWS),
    "computed scale, reshaped": (lambda x: ranged(x).reshape(-1, 2, 8) @ w8(WEIGHT), ROWS),
    "computed scale, transposed": (lambda x: F.linear(ranged(x).transpose(0, 1), w8(WEIGHT.t()), BIAS), ROWS),
    "computed scale, reshaped to two axes": (lambda x: torch.addmm(BIAS, ranged(x).flatten(0, 1), w8(WEIGHT)), ROWS),
    "computed scale, one more axis": (lambda x: F.linear(ranged(x).unsqueeze(1), w8(WEIGHT.t()), BIAS), ROWS[:, 0]),
    "output, transposed and sliced": (lambda x: ((y := x.sin()), fine(y.mT[:, 1:])), ROWS),
}

#: Functions that ONNX Runtime gets wrong since opset 21 alone.
SINCE_21: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "narrow int8, transposed": (lambda x: narrow(x).mT.sin(), ROWS),
    "four bits, sliced": (lambda x: narrow(x, -8, 7)[..., 1:].sin(), ROWS),
    "narrow int8, pooled": (lambda x: F.max_pool2d(narrow(x), 2).sin(), IMAGE),
    "weight, quantised twice and transposed": (lambda x: s8(s8(WEIGHT[:4] / 3) / 3).mT @ x, ROWS),
    "int8 of other nodes": (lambda x: of_bytes(x).mT.sin(), ROWS),
    "int8, reshaped": (
        lambda x: torch.quantize_per_tensor(x, 0.05, 3, torch.qint8).flatten(0, 1).dequantize().t().sin(),
        ROWS,
    ),
}

#: All these functions and their neighbours, which must be right with the rewrites.
CASES: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    **WRONG,
    **SINCE_21,
    **SATURATING,
    "computed scale": (lambda x: ranged(x) @ c8(WEIGHT, 1), ROWS),
    "computed scale, in a branch": (lambda x: torch.cond(x.sum() > 0, from_bytes, beside_bytes, (x,)), ROWS),
    "quantised outside of a branch": (lambda x: torch.cond(x.sum() > 0, from_bytes, beside_bytes, (s8(x),)), ROWS),
    "computed scale, in a scan": (lambda x: scan(step, x[0] * 0, x, dim=0)[1], IMAGE),
    "computed scale, two axes": (lambda x: torch.addmm(BIAS, ranged(x), w8(WEIGHT)), ROWS[:, 0]),
    "two axes": (lambda x: torch.addmm(BIAS, x, w8(WEIGHT / WEIGHT.norm(dim=0))), ROWS[:, 0]),
    "activations quantised twice": (lambda x: F.linear(s8(u8(x)), w8(WEIGHT.t())), ROWS),
    "activations quantised twice, by column": (lambda x: s8(u8(x)) @ c8(WEIGHT, 1), ROWS),
    "activations quantised twice, moved": (lambda x: s8(u8(x)).flatten(0, 1) @ w8(WEIGHT), ROWS),
    "activations quantised twice, bias": (lambda x: torch.addmm(BIAS, s8(u8(x)), w8(WEIGHT)), ROWS[:, 0]),
    "weight read twice": (lambda x: (x @ (w := w8(WEIGHT * 2)), s8(x) @ w, w), ROWS),
    "activations reshaped, and read as they are": (lambda x: ((q := s8(x)), q.flatten(0, 1) @ w8(WEIGHT * 2)), ROWS),
    "activations by row, reshaped": (lambda x: c8(x, -1).flatten(0, 1) @ w8(WEIGHT * 2), ROWS),
    "batch of weights": (lambda x: torch.bmm(s8(x), c8(WEIGHT, 0).expand(x.shape[0], 8, 5)), ROWS),
    "int8 read as it is and transposed": (lambda x: ((q := narrow(x)), q.mT.sin()), ROWS),
    "output, transposed twice": (lambda x: ((y := x.sin()), fine(y.transpose(0, 1)), fine(y.mT)), ROWS),
    "output, transposed, relu": (lambda x: ((y := x.sin()), fine(y.mT.relu())), ROWS),
    "output, transposed, read by others": (lambda x: ((y := x.sin()), fine(y.mT), y.cos()), ROWS),
    "output of a branch": (lambda x: torch.cond(x.sum() > 0, sine, cosine, (x,)), ROWS),
    "convolution, quantised operand read twice": (lambda x: (fine(F.conv2d((q := fine(x)), KERNEL)), q.sin()), IMAGE),
}


@pytest.mark.parametrize(("name", "opset"), rotated(CASES, [13, 19, 21, 23], every=2))
def test_right_with_optimisations(name: str, opset: int) -> None:
    function, x = CASES[name]
    check(function, x, others=[(x[:2] * 1.5,)], dynamic=({0: torch.export.Dim.DYNAMIC},), opset=opset)
    check(function, x, others=[(x * 1.5,)], opset=opset)


@pytest.mark.parametrize("opset", [13, 21])
def test_halves(opset: int) -> None:
    """ONNX Runtime computes halves in float between Casts, which it removes."""
    weight, x = WEIGHT.half(), ROWS[:, 0].half()
    for function in (lambda x: s8(x) @ c8(weight, 0), lambda x: x @ w8(weight / weight.norm(dim=0))):
        check(function, x, others=[(x * 2,)], opset=opset, **looser("quantised layers, float16"))


@pytest.mark.parametrize("name", {**WRONG, **SINCE_21})
def test_the_plain_form_is_still_wrong(name: str) -> None:
    """When this fails ONNX Runtime has mended the fault: the rewrite can go."""
    function, x = CASES[name]
    model = onnxplug.to_onnx(Call(function), (x,), target=None).model_proto.SerializeToString()
    plain, optimised = (outcome(model, x, on) for on in (False, True))
    assert not isinstance(plain, str), plain
    if not isinstance(optimised, str):
        assert not all(np.allclose(a, b, atol=1e-5) for a, b in zip(plain, optimised, strict=True))


@pytest.mark.skipif("vnni" in CPU, reason="the processor adds up products of bytes in 32 bits")
@pytest.mark.parametrize("name", SATURATING)
def test_sums_of_the_plain_form_still_saturate(name: str) -> None:
    test_the_plain_form_is_still_wrong(name)


class Bytes(torch.nn.Module):
    """A product with int8 weights of which PyTorch has the integers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (5, 8), dtype=torch.int8))

    def forward(self, x: torch.Tensor, high: int = 255) -> torch.Tensor:
        ops, scale_and_range = torch.ops.quantized_decomposed, (0.05, 3, 0, high, torch.uint8)
        x = ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *scale_and_range), *scale_and_range)
        scales, zeros = torch.arange(1, 6) / 50, torch.zeros(5, dtype=torch.int64)
        return F.linear(x, ops.dequantize_per_channel(self.weight, scales, zeros, 0, -128, 127, torch.int8))


def test_weights_beside_bytes_are_unsigned() -> None:
    """Beside 7 bits, or for another runtime, weights stay signed; new weights are stored like the old weights."""
    model, x = Bytes(), torch.randn(4, 8) * 5
    program = check(model, x, others=[(-x * 3,)])
    assert program.model.graph.initializers["weight.unsigned"].dtype == ir.DataType.UINT8
    other = Bytes()
    program.apply_weights(other.state_dict())
    torch.testing.assert_close(program(x)[0], other(x), **looser("quantised layers"))
    for more, options in (({"high": 127}, {}), ({}, {"target": None})):
        plain = onnxplug.to_onnx(model, (x,), kwargs=more, **options)
        assert plain.model.graph.initializers["weight"].dtype == ir.DataType.INT8


def test_only_the_output_is_a_copy(expect_graph: Any) -> None:
    program = check(lambda x: ((y := x.sin()), fine(y.mT)), ROWS, others=[(ROWS * 2,)])
    expect_graph(program, "Sin Identity Transpose QuantizeLinear DequantizeLinear")
    plain = check(lambda x: ((y := x.sin()), y.mT.exp()), ROWS, others=[(ROWS * 2,)])
    expect_graph(plain, "Sin Transpose Exp")


class Between(torch.nn.Module):
    """A layer with parameters in floating point between quantised activations."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fine(self.layer(fine(x)))


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("bias", [True, False])
def test_layers_between_quantised_activations(bias: bool, opset: int) -> None:
    linear, dynamic = torch.nn.Linear(8, 5, bias), [{0: torch.export.Dim.DYNAMIC}]
    for x in (ROWS[:, 0], ROWS, IMAGE):
        check(Between(linear), x, others=[(x[:2] * 1.5,)], dynamic=dynamic, opset=opset)
    for layer in (torch.nn.Conv2d(4, 3, 3, bias=bias), torch.nn.ConvTranspose2d(4, 3, 3, bias=bias)):
        check(Between(layer), IMAGE, others=[(IMAGE[:2] * 1.5,)], dynamic=dynamic, opset=opset)


class Activation(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Restored(torch.nn.Module):
    """A linear whose weight torchao restores from integers, by group of a row or by row."""

    def __init__(self, bits: int, group: int) -> None:
        super().__init__()
        self.group, self.low = group, -(1 << (bits - 1))
        self.register_buffer("levels", torch.randint(self.low, -self.low, (5, 32), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(5, 32 // group) / 50 + 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torchao  # noqa: F401

        restored = torch.ops.torchao.dequantize_affine(
            self.levels, [1, self.group], self.scales, None, torch.int8, self.low, -self.low - 1
        )
        return F.linear(x, restored)


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("activations", [s8, u8, lambda x: s8(u8(x))], ids=["int8", "uint8", "twice"])
@pytest.mark.parametrize(("bits", "group"), [(8, 16), (4, 16), (8, 32), (4, 32)])
def test_stored_integers_beside_quantised_activations(
    bits: int, group: int, activations: Callable[[torch.Tensor], torch.Tensor], opset: int
) -> None:
    model = torch.nn.Sequential(Activation(activations), Restored(bits, group))
    for x in (torch.randn(3, 32), torch.randn(2, 3, 32)):
        check(model, x, others=[(x[:1] * 2,)], dynamic=[{0: torch.export.Dim.DYNAMIC}], opset=opset, atol=1e-5)


#: Functions for which ONNX Runtime makes right integer kernels.
INTEGER: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "product": (lambda x: s8(x) @ w8(WEIGHT), ROWS),
    "product by column": (lambda x: s8(x) @ c8(WEIGHT, 1), ROWS),
    "product by column, transposed": (lambda x: F.linear(u8(x), c8(WEIGHT.t(), 0)), ROWS),
    "convolution": (lambda x: u8(F.conv2d(u8(x), w8(KERNEL))), IMAGE),
    "convolution by channel": (lambda x: u8(F.relu(F.conv2d(u8(x), c8(KERNEL, 0)))), IMAGE),
}


@pytest.mark.parametrize("name", INTEGER)
def test_integer_kernels_are_kept(name: str) -> None:
    function, x = INTEGER[name]
    operators = [node.op_type for node in onnxplug.to_onnx(Call(function), (x,)).model.graph]
    assert operators.count("DequantizeLinear") >= 2
    assert "Cast" not in operators


@pytest.mark.parametrize("x", [ROWS, IMAGE], ids=lambda x: f"{x.dim()}d")
def test_products_of_computed_scales_stay_integer(x: torch.Tensor, tmp_path: Path) -> None:
    model = onnxplug.to_onnx(Call(lambda x: F.linear(ranged(x), c8(WEIGHT.t()), BIAS)), (x,))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(model.model_proto.SerializeToString(), options, ["CPUExecutionProvider"])
    operators = {node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node}
    assert operators & {"MatMulIntegerToFloat", "QGemm"}
    assert not operators & {"MatMulNBits", "MatMul", "Gemm"}


@pytest.mark.parametrize("value", [-128.0, -127.0, -1.0, 0.0, 126.0, 127.0])
def test_ends_of_a_narrow_range(value: float) -> None:
    """Levels outside a narrow range are clipped alike in int8 and uint8."""
    x = torch.full((2, 3), value) * 0.05
    for low, high in ((-127, 127), (-8, 7), (0, 15)):
        check(lambda x, low=low, high=high: narrow(x, low, high).mT.neg(), x, opset=21)


def test_a_second_rounding_has_its_own_step() -> None:
    """The numbers are divided by the scale of QuantizeLinear, and multiplied by the scale of each DequantizeLinear."""
    quantised = torch.ops.quantized_decomposed

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        y = quantised.quantize_per_tensor(rounded(x), 0.07, 128, 0, 255, torch.uint8)
        return [quantised.dequantize_per_tensor(y, scale, 128, 0, 255, torch.uint8) for scale in (0.07, 0.2)]

    check(model, ROWS, others=[(ROWS * 3,)], dynamic=({0: torch.export.Dim.DYNAMIC},), opset=21)
