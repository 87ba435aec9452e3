"""Quantisation: to bytes and back, fake quantisation, products of bytes and 8-bit floats, whole quantised models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization import quantize_fx

import onnxplug
from onnxplug.errors import Unsupported
from tests.support.check import check
from tests.support.sampling import rotated
from tests.support.tolerances import looser

AUTO = torch.export.Dim.AUTO
Q = torch.ops.quantized_decomposed
INF = math.inf
# Ties, both signs, numbers beyond the limits, and infinities; all exact with scales that are powers of two.
HARD = torch.tensor(
    [
        [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5],
        [100.0, -100.0, INF, -INF, 1e30, -1e30, 1e-30],
        [7.25, 31.75, -32.0, 63.5, 64.0, -64.5, 0.124],
    ]
)


def tensor(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def ints(*shape: int, low: int = -128, high: int = 127, dtype: torch.dtype = torch.int8, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


RANGES: dict[str, tuple[torch.dtype, int, int, int]] = {
    "int8": (torch.int8, -128, 127, 3),
    "int8_symmetric": (torch.int8, -127, 127, 0),
    "int8_nibbles": (torch.int8, -8, 7, -2),
    "uint8": (torch.uint8, 0, 255, 128),
    "uint8_reduced": (torch.uint8, 0, 127, 64),
    "int16": (torch.int16, -(2**15), 2**15 - 1, 5),
    "uint16": (torch.uint16, 0, 2**16 - 1, 5),
    "int32": (torch.int32, -(2**20), 2**20, -7),
    "zero_point_outside": (torch.int8, -128, 127, 300),
}


@pytest.mark.parametrize(
    ("name", "scale", "dtype"),
    rotated(RANGES, [0.25, 1.0, 0.0371], [torch.float32, torch.float16, torch.bfloat16], every=3),
)
def test_per_tensor(name: str, scale: float, dtype: torch.dtype) -> None:
    stored, low, high, zero = RANGES[name]
    x = (HARD if scale != 0.0371 else tensor(3, 7, scale=2.0)).to(dtype)
    check(
        lambda x: Q.quantize_per_tensor(x, scale, zero, low, high, stored),
        x,
        others=[(tensor(5, 2, seed=1).to(dtype),), (x[:0],)],
        dynamic=True,
    )
    q = ints(3, 7, low=low, high=high, dtype=stored)
    for out in (None, dtype):
        check(
            lambda q, out=out: Q.dequantize_per_tensor(q, scale, zero, low, high, stored, out_dtype=out),
            q,
            others=[(q[:1, :3],), (q[:0],)],
            dynamic=True,
        )


@pytest.mark.parametrize(
    ("name", "parameter"),
    rotated([n for n in RANGES if n != "zero_point_outside"], [torch.float32, torch.float64], every=2),
)
def test_per_tensor_with_tensors(name: str, parameter: torch.dtype) -> None:
    stored, low, high, zero = RANGES[name]
    for shape in ((), (1,)):
        scale, offset = torch.full(shape, 0.25, dtype=parameter), torch.full(shape, zero)
        least, most = torch.tensor(low), torch.tensor(high)
        args = (HARD, scale, offset)
        others = [(HARD * 2, scale * 4, offset + (1 if zero < high else 0))]
        check(lambda x, s, z: Q.quantize_per_tensor.tensor(x, s, z, low, high, stored), *args, others=others)
        check(lambda x, s, z, a, b: Q.quantize_per_tensor.tensor2(x, s, z, a, b, stored), *args, least, most)
        q = ints(3, 7, low=low, high=high, dtype=stored)
        check(lambda q, s, z: Q.dequantize_per_tensor.tensor(q, s, z, low, high, stored), q, scale, offset)
        check(
            lambda q, s, z, a, b: Q.dequantize_per_tensor.tensor2(q, s, z, a, b, stored), q, scale, offset, least, most
        )


@pytest.mark.parametrize(
    ("name", "parameter", "axis"),
    rotated([n for n in RANGES if n != "zero_point_outside"], [torch.float32, torch.float64], [0, -2], every=2),
)
def test_per_channel(name: str, parameter: torch.dtype, axis: int) -> None:
    stored, low, high, zero = RANGES[name]
    x = HARD[:, :, None].expand(3, 7, 2).contiguous()
    count = x.shape[axis]
    scales = torch.tensor([0.25, 1.0, 0.125, 2.0, 0.5, 4.0, 0.0625], dtype=parameter)[:count]
    zeros = torch.arange(count) % 3 + (zero if zero < high - 2 else 0)
    check(
        lambda x, s, z: Q.quantize_per_channel(x, s, z, axis, low, high, stored),
        x,
        scales,
        zeros,
        others=[(tensor(3, 7, 2), scales.flip(0), zeros.flip(0))],
    )
    q = ints(3, 7, 2, low=low, high=high, dtype=stored)

    def restored(kind: torch.dtype | None, out: torch.dtype | None) -> None:
        if kind is None:
            check(lambda q, s: Q.dequantize_per_channel(q, s, None, axis, low, high, stored, out_dtype=out), q, scales)
        else:
            args = (q, scales, zeros.to(kind))
            check(lambda q, s, z: Q.dequantize_per_channel(q, s, z, axis, low, high, stored, out_dtype=out), *args)

    for out in (None, torch.float16, torch.float64):
        restored(None, out)
        if stored != torch.uint16:  # torch has no subtraction of uint16
            restored(torch.int64, out)
    if stored in (torch.int8, torch.uint8):
        # Zero points of the same dtype wrap around.
        for kind in (torch.int32, torch.float32, stored):
            restored(kind, None)


def test_per_token() -> None:
    x, scales, zeros = tensor(2, 3, 8), tensor(2, 3, 1, seed=1).abs() + 0.01, ints(2, 3, 1, low=-5, high=5)
    for kind in (torch.float32, torch.float64):
        for zero in (torch.int32, torch.int64, torch.float32):
            args = (x, scales.to(kind), zeros.to(zero))
            check(lambda x, s, z: Q.quantize_per_token(x, s, z, -128, 127, torch.int8), *args)
            args = (ints(2, 3, 8), *args[1:])
            check(lambda q, s, z: Q.dequantize_per_token(q, s, z, -128, 127, torch.int8, torch.float32), *args)
    check(
        lambda x, s, z: Q.quantize_per_token(x, s, z, -8, 7, torch.int8),
        tensor(6, 4).half(),
        torch.rand(6, 1) + 0.1,
        torch.zeros(6, 1),
    )


def test_by_group() -> None:
    w, scales, zeros = tensor(6, 32), tensor(6, 4, seed=1).abs() + 0.1, ints(6, 4, low=-2, high=2)
    for zero in (torch.int32, torch.float32):
        args = (w, scales, zeros.to(zero))
        check(lambda w, s, z: Q.quantize_per_channel_group(w, s, z, -8, 7, torch.int8, 8), *args)
        args = (ints(6, 32, low=-8, high=7), *args[1:])
        check(lambda w, s, z: Q.dequantize_per_channel_group(w, s, z, -8, 7, torch.int8, 8, torch.float32), *args)
    check(
        lambda w, s: Q.dequantize_per_channel_group(w, s, None, -8, 7, torch.int8, 8, torch.float32),
        ints(6, 32),
        scales,
    )


def test_by_group_of_a_dynamic_number_of_rows() -> None:
    def inputs(rows: int) -> tuple[torch.Tensor, ...]:
        return tensor(rows, 32), tensor(rows, 4, seed=1).abs() + 0.1, ints(rows, 4, low=-2, high=2).int()

    def model(w: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = Q.quantize_per_channel_group(w, s, z, -8, 7, torch.int8, 8)
        one = Q.quantize_per_channel_group(w, s[:, :1], z[:, :1], -8, 7, torch.int8, 64)
        return q, one, Q.dequantize_per_channel_group(q, s, z, -8, 7, torch.int8, 8, torch.float32)

    rows = {0: torch.export.Dim.AUTO}
    check(model, *inputs(6), others=[inputs(1), inputs(9), inputs(0)], dynamic=[rows] * 3)


PARAMETERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "affine": lambda x: Q.choose_qparams.tensor(x, -128, 127, 1e-5, torch.int8),
    "affine_uint8": lambda x: Q.choose_qparams.tensor(x, 0, 255, 1e-3, torch.uint8),
    "symmetric": lambda x: Q.choose_qparams_symmetric.tensor(x, -127, 127, 1e-5, torch.int8),
    "symmetric_uint8": lambda x: Q.choose_qparams_symmetric.tensor(x, 0, 255, 1e-5, torch.uint8),
}


@pytest.mark.parametrize(
    ("name", "dtype"), rotated(PARAMETERS, [torch.float32, torch.float16, torch.bfloat16], every=3)
)
def test_parameters(name: str, dtype: torch.dtype) -> None:
    inputs = [
        tensor(3, 5),
        tensor(2, 8, seed=1).abs(),
        -tensor(1, 4, seed=2).abs(),
        torch.zeros(2, 2),
        tensor(2, 2) * 1e-9,
        tensor(4, 4) * 1e3,
    ]
    first, *others = [(x.to(dtype),) for x in inputs]
    # The scale is a double of float's precision.
    check(PARAMETERS[name], *first, others=others, dynamic=True, rtol=1e-6, atol=0)


def test_parameters_by_token() -> None:
    inputs = [
        tensor(3, 5),
        tensor(2, 8, seed=1).abs(),
        -tensor(2, 4, seed=2).abs(),
        torch.zeros(2, 2),
        tensor(2, 2) * 1e-9,
        tensor(4, 4) * 1e3,
    ]
    first, *others = [(x,) for x in inputs]
    check(
        lambda x: Q.choose_qparams_per_token_asymmetric(x, torch.int8),
        *first,
        others=others,
        dynamic=True,
        rtol=1e-6,
        atol=0,
    )

    def there_and_back(x: torch.Tensor) -> torch.Tensor:
        s, z = Q.choose_qparams_per_token(x, torch.int8)
        q = Q.quantize_per_token(x, s, z, -128, 127, torch.int8)
        return Q.dequantize_per_token(q, s, z, -128, 127, torch.int8, torch.float32)

    check(there_and_back, *first, others=others, dynamic=True)


FAKE = {
    "int8": (-128, 127, 3),
    "uint8": (0, 255, 128),
    "uint8_reduced": (0, 127, 64),
    "nibbles": (-8, 7, 0),
    "int16": (-(2**15), 2**15 - 1, 9),
}


@pytest.mark.parametrize(
    ("name", "dtype"), rotated(FAKE, [torch.float32, torch.float64, torch.float16, torch.bfloat16], every=2)
)
def test_fake(name: str, dtype: torch.dtype) -> None:
    low, high, zero = FAKE[name]
    hard = HARD.to(dtype)
    nan = torch.tensor([[math.nan, 1.0, -1.0]], dtype=dtype)
    scale, offset = torch.tensor(0.5), torch.tensor(zero, dtype=torch.int32)
    others = [(tensor(4, 5).to(dtype),), (hard[:0],), (nan if low else hard,)]
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, zero, low, high), hard, others=others, dynamic=True)
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.0371, zero, low, high), tensor(9, 9).to(dtype))
    check(lambda x, s, z: torch.fake_quantize_per_tensor_affine(x, s, z, low, high), hard, scale, offset)
    ops = torch.ops.aten
    check(lambda x: ops.fake_quantize_per_tensor_affine_cachemask(x, 0.25, zero, low, high), hard)
    # Numbers far beyond int64 wrap in some of torch's kernels; the exported model limits them.
    near = torch.where(HARD.abs() < 1e9, HARD, 0.0).to(dtype)
    for enabled in (0, 1):
        check(
            lambda x, s, z, e: ops._fake_quantize_per_tensor_affine_cachemask_tensor_qparams(x, s, z, e, low, high),
            near,
            scale,
            offset,
            torch.tensor([enabled]),
        )

    def by_channel(axis: int) -> None:
        scales = torch.tensor([0.25, 1.0, 0.125, 2.0, 0.5, 4.0, 0.0625])[: near.shape[axis]]
        zeros = (torch.arange(len(scales)) % 3 + (zero if zero < high - 2 else 0)).int()
        for args in ((near, scales, zeros), (near, scales, zeros.float() + 0.25)):
            check(lambda x, s, z: torch.fake_quantize_per_channel_affine(x, s, z, axis, low, high), *args)
        check(lambda x, s, z: ops.fake_quantize_per_channel_affine_cachemask(x, s, z, axis, low, high), *args)

    by_channel(0)
    by_channel(1)


#: Numbers whose quotients by 0.03, 0.05 and 0.07 lie within a unit in the last place of halfway between two integers.
HALFWAY = torch.cat([scale * (torch.arange(-60.0, 60.0) + 0.5) for scale in (0.03, 0.05, 0.07)]).reshape(3, -1)
ROUNDING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fake": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.03, 20, -128, 127),
    "fake by channel": lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.tensor([0.03, 0.05, 0.07]), torch.tensor([0, 3, 20], dtype=torch.int32), 0, -128, 127
    ),
    "quantised": lambda x: Q.quantize_per_tensor(x, 0.07, 3, -128, 127, torch.int8),
    "quantised by channel": lambda x: Q.quantize_per_channel(
        x, torch.tensor([0.03, 0.05, 0.07]), torch.tensor([0, 3, 20]), 0, -128, 127, torch.int8
    ),
}


@pytest.mark.parametrize("name", ROUNDING)
def test_exact_form_rounds_as_torch_halfway_between_integers(name: str) -> None:
    nearly = HALFWAY * (1 + torch.linspace(-3e-7, 3e-7, HALFWAY.shape[1]))
    check(ROUNDING[name], HALFWAY, others=[(nearly,), (-HALFWAY,)], exact=True, rtol=0, atol=0)


@pytest.mark.parametrize("opset", [13, 19, 21, 26])
def test_opsets(opset: int) -> None:
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, 0, 127), HARD, opset=opset)
    check(lambda x: Q.quantize_per_tensor(x, 0.25, 3, -100, 100, torch.int8), HARD, opset=opset)
    scales, zeros = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([0, 3, 5])
    check(lambda x, s, z: Q.quantize_per_channel(x, s, z, 0, 0, 255, torch.uint8), HARD, scales, zeros, opset=opset)
    check(
        lambda q, s, z: Q.dequantize_per_channel(q, s, z, 0, 0, 255, torch.uint8),
        ints(3, 4).view(torch.uint8),
        scales,
        zeros,
        opset=opset,
    )


def test_runtimes_recognise_it(expect_graph: Any) -> None:
    program = check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.25, 3, -128, 127), HARD)
    expect_graph(program, "QuantizeLinear DequantizeLinear")


# -- products ----------------------------------------------------------------------------------------------------------


def test_integer_product() -> None:
    extremes = torch.tensor([-128, 127, -128, -127], dtype=torch.int8)
    args = (ints(17, 32), ints(32, 24, seed=1))
    others = [(ints(20, 32, seed=2), ints(32, 24, seed=3)), (extremes.repeat(18, 8), extremes.repeat(32, 6))]
    others.append((extremes[1:2].repeat(18, 32), extremes[1:2].repeat(32, 24)))
    check(torch._int_mm, *args, others=others, dynamic=({0: AUTO}, None))


def test_product_of_unsigned_and_signed_bytes() -> None:
    """Arguments as torchao passes them on processors without VNNI."""
    x = torch.randint(0, 256, (20, 16), dtype=torch.uint8)
    weight = torch.randint(-128, 128, (16, 8), dtype=torch.int8)
    check(torch._int_mm, x, weight, others=[(x.flip(0), weight)])


# -- 8-bit floats ------------------------------------------------------------------------------------------------------

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


def eight_bit_inputs() -> torch.Tensor:
    edges = [
        0.0,
        448.0,
        463.9,
        464.0,
        464.1,
        480.0,
        240.0,
        247.9,
        248.1,
        57344.0,
        61439.0,
        61440.0,
        61441.0,
        65504.0,
        65536.0,
        1e6,
        INF,
    ]
    small = [2.0**-n * f for n in range(5, 20) for f in (1.0, 0.999, 1.001, 1.5)]
    values = torch.tensor([*edges, *small, math.nan])
    spread = tensor(4000, scale=1.0) * torch.exp(tensor(4000, seed=1, scale=4.0))
    return torch.cat([values, -values, spread, torch.linspace(-600, 600, 2001)])


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_eight_bit_floats(dtype: torch.dtype, source: torch.dtype) -> None:
    x = eight_bit_inputs().to(source)
    check(lambda x: x.to(dtype).to(source), x, rtol=0, atol=0, others=[(x[:1],), (x[:0],)], dynamic=True)
    zeros = torch.tensor([0.0, -0.0, 1e-30, -1e-30], dtype=source)
    check(lambda x: 1 / x.to(dtype).float(), zeros, rtol=0, atol=0)


def test_eight_bit_floats_before_onnx_has_them() -> None:
    weight = torch.ones(4, 40).to(torch.float8_e4m3fn)
    for model in (lambda x: x.to(torch.float8_e4m3fn).float(), lambda x: x @ weight.float()):
        with pytest.raises(Unsupported, match=r"float8e4m3fn.*\n.*opset 19 or later"):
            onnxplug.to_onnx(model, (torch.ones(3, 4),), opset_version=18)
    unread = nn.Linear(4, 2)
    unread.register_buffer("kept", weight)
    assert check(unread, torch.ones(3, 4), opset=18).statistics.operators == {"Gemm": 1}


@pytest.mark.parametrize("dtype", EIGHT_BITS, ids=str)
def test_integers_to_eight_bit_floats(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, -1, 7, 17, 19, 100, 247, 449, -500])
    check(lambda x: x.to(dtype).float(), x, rtol=0, atol=0)
    check(lambda x: (x > 3).to(dtype).float(), x, rtol=0, atol=0)
    check(lambda x: x + torch.full((10,), 500.0).to(dtype).float(), x.float())


BY_ROWS = pytest.mark.xfail(
    torch.__version__.startswith("2.9."), strict=True, reason="torch 2.9's _scaled_mm has no scales by rows on a CPU"
)


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("rowwise", [False, pytest.param(True, marks=BY_ROWS)])
def test_scaled_product(rowwise: bool, out: torch.dtype | None) -> None:
    a = tensor(16, 32, scale=1.0).to(torch.float8_e4m3fn).float()
    b = tensor(8, 32, scale=1.0, seed=1).to(torch.float8_e4m3fn).float()
    scales = (torch.rand(16, 1) + 0.5, torch.rand(1, 8) + 0.5) if rowwise else (torch.tensor(2.0), torch.tensor(0.25))

    def scaled(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        return torch._scaled_mm(a, b.t(), s, t, out_dtype=out).float()

    # Numbers near the middle of two 8-bit floats may be rounded to either.
    tolerance = (
        looser("float8 products") if out is None else looser("float8 products, halves") if out != torch.float32 else {}
    )
    check(scaled, a, b, *scales, **tolerance)


# -- whole models ------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_quantised_model(backend: str, trained: bool) -> None:
    """Graph-mode quantisation, in the decomposed form that torch.export takes."""
    torch.manual_seed(0)
    x = tensor(2, 3, 8, 8, scale=1.0)
    if trained:
        mapping = ao.get_default_qat_qconfig_mapping(backend)
        prepared = quantize_fx.prepare_qat_fx(Small().train(), mapping, (x,))
    else:
        prepared = quantize_fx.prepare_fx(Small().eval(), ao.get_default_qconfig_mapping(backend), (x,))
    prepared(x)
    prepared.eval()
    model = quantize_fx._convert_to_reference_decomposed_fx(prepared)
    # Means of integers often lie in the middle between two: one step up or down.
    step = float(max(node.args[1] for node in model.graph.nodes if "quantize_per_tensor" in str(node.target)))
    others = [(tensor(1 + seed % 3, 3, 9, 8, seed=seed, scale=1.0),) for seed in range(5)]
    program = check(model, x, others=others, dynamic=({0: AUTO, 2: AUTO},), rtol=0, atol=1.01 * step)
    counts = Counter(node.op_type for node in program.model.graph)
    assert counts["QuantizeLinear"] == 6
    assert counts["DequantizeLinear"] == 6
