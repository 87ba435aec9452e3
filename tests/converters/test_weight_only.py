"""Weights quantised alone: bytes, nibbles, torch's packed nibbles; how they are stored, and replaced."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import Unsupported
from onnxplug.errors import UsageError
from tests.support.check import check
from tests.support.sampling import rotated
from tests.support.tolerances import looser

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
    import torchao  # noqa: F401  # registers torchao::dequantize_affine

DYNAMIC = ({0: torch.export.Dim.DYNAMIC},)
#: Sums of products in another order, rounded once to the half type.
TOLERANCES: dict[torch.dtype, dict[str, float]] = {
    torch.float32: looser("weights only"),
    torch.float16: looser("weights only, float16"),
    torch.bfloat16: looser("weights only, bfloat16"),
}


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


def ints(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    numbers = torch.randint(low, high + 1, shape, dtype=dtype)
    # Both ends of the range occur.
    numbers.view(-1)[0], numbers.view(-1)[-1] = low, high
    return numbers


class Affine(nn.Module):
    """A linear whose weight is restored from integers in groups of a row."""

    def __init__(self, low: int, high: int, group: int, rows: int = 6, columns: int = 32, **how: Any) -> None:
        super().__init__()
        stored = torch.int8 if low < 0 else torch.uint8
        dtype = how.get("dtype", torch.float32)
        groups = columns // group
        self.register_buffer("levels", ints(low, high, rows, columns, dtype=stored))
        self.register_buffer("scales", (torch.rand(rows, groups) * 0.1 + 0.01).to(dtype))
        zero = ints(how.get("zero_low", low), how.get("zero_high", high), rows, groups, dtype=stored)
        self.register_buffer("zeros", zero if how.get("zeros", True) else None)
        self.block, self.range = [1, group], how.get("range", (low, high))

    def weight(self) -> torch.Tensor:
        return torch.ops.torchao.dequantize_affine(
            self.levels, self.block, self.scales, self.zeros, self.levels.dtype, *self.range,
            output_dtype=self.scales.dtype,
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight())


def dtypes(program: Any) -> dict[str, ir.DataType]:
    return {name: value.dtype for name, value in program.model.graph.initializers.items()}


CASES: dict[str, dict[str, Any]] = {
    "signed": {"low": -8, "high": 7, "group": 8},
    "unsigned": {"low": 0, "high": 15, "group": 16},
    "three_bits": {"low": -4, "high": 3, "group": 8},
    "by_row": {"low": -8, "high": 7, "group": 32},
    "without_zeros": {"low": -8, "high": 7, "group": 16, "zeros": False},
    "odd": {"low": -8, "high": 7, "group": 5, "rows": 3, "columns": 15},
    "odd_row": {"low": 0, "high": 15, "group": 7, "rows": 3, "columns": 7},
    "one": {"low": -8, "high": 7, "group": 1, "rows": 2, "columns": 3},
}


@pytest.mark.parametrize(("name", "dtype", "opset"), rotated(CASES, TOLERANCES, [18, 21, 24], every=3))
def test_nibbles(name: str, dtype: torch.dtype, opset: int) -> None:
    model = Affine(**CASES[name], dtype=dtype)
    columns = model.levels.shape[1]
    others = [(torch.randn(1, columns).to(dtype) * 3,), (torch.zeros(7, columns, dtype=dtype),)]
    program = check(
        model, torch.randn(4, columns).to(dtype), others=others, dynamic=DYNAMIC, opset=opset, **TOLERANCES[dtype]
    )
    wanted = ir.DataType.INT4 if CASES[name]["low"] < 0 else ir.DataType.UINT4
    if opset >= 21:
        assert dtypes(program)["levels.packed"] == wanted
    else:
        assert not {ir.DataType.INT4, ir.DataType.UINT4} & set(dtypes(program).values())


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_restored_exactly(dtype: torch.dtype) -> None:
    """The weight alone, which must be equal bit for bit."""

    class Weight(Affine):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight() + x * 0

    check(Weight(-8, 7, 8, dtype=dtype), torch.ones(1, dtype=dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    "case",
    [
        # Either the declared range or the numbers themselves exceed four bits: the bytes are kept.
        {"low": -8, "high": 7, "group": 8, "range": (-128, 127)},
        {"low": -9, "high": 7, "group": 8, "range": (-8, 7)},
        {"low": 0, "high": 16, "group": 8, "range": (0, 15)},
        {"low": -8, "high": 7, "group": 8, "zero_low": -8, "zero_high": 8},
    ],
)
def test_more_than_four_bits(case: dict[str, Any]) -> None:
    program = check(Affine(**case), torch.randn(4, 32), others=[(torch.randn(2, 32),)], dynamic=DYNAMIC)
    assert not {ir.DataType.INT4, ir.DataType.UINT4} & set(dtypes(program).values())


def test_weights_at_run_time_stay_bytes() -> None:
    def model(x: torch.Tensor, levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        restored = torch.ops.torchao.dequantize_affine(levels, [1, 8], scales, None, torch.int8, -8, 7)
        return x @ restored.t()

    args = (torch.randn(2, 16), ints(-8, 7, 4, 16), torch.rand(4, 2))
    check(model, *args, others=[(args[0] * 2, -args[1].clamp(min=-7), args[2] * 3)])


def test_shared_weights_are_stored_once() -> None:
    class Shared(Affine):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight()), nn.functional.linear(x + 1, self.weight())

    class Raw(Affine):
        def forward(self, x: torch.Tensor) -> Any:
            return nn.functional.linear(x, self.weight()), self.levels.float() + self.zeros.sum()

    x, others = torch.randn(4, 32), [(torch.randn(1, 32),)]
    program = check(Shared(-8, 7, 8), x, others=others, dynamic=DYNAMIC)
    assert dtypes(program) == {
        "levels.packed": ir.DataType.INT4,
        "scales.reshaped": ir.DataType.FLOAT,
        "zeros.packed": ir.DataType.INT4,
        **{n: d for n, d in dtypes(program).items() if n.startswith("constant")},
    }
    stored = dtypes(check(Raw(-8, 7, 8), x, others=others, dynamic=DYNAMIC))
    # The bytes themselves are read too, so they keep their name.
    assert (stored["levels"], stored["levels.packed"]) == (ir.DataType.INT8, ir.DataType.INT4)
    assert (stored["zeros"], stored["zeros.packed"]) == (ir.DataType.INT8, ir.DataType.INT4)


def test_plain_translation() -> None:
    program = check(Affine(-8, 7, 8), torch.randn(4, 32), optimize=False)
    assert dtypes(program)["levels.packed"] == ir.DataType.INT4


def test_replaced_weights() -> None:
    """Every stored form of a weight is computed from the new weights."""
    model, other, x = Affine(-8, 7, 8), Affine(-8, 7, 8), torch.randn(4, 32)
    program = onnxplug.to_onnx(model, (x,))
    torch.testing.assert_close(program(x)[0], model(x))
    program.apply_weights(dict(other.named_buffers()))
    assert (model(x) - other(x)).abs().max() > 0.1
    torch.testing.assert_close(program(x)[0], other(x))
    # A single weight is replaced.
    program.apply_weights({"levels": model.levels})
    other.levels = model.levels
    torch.testing.assert_close(program(x)[0], other(x))
    with pytest.raises(UsageError, match="4 bits, -8 to 7"):
        program.apply_weights({"levels": model.levels + 1})


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("opset", [13, 18, 21])
def test_byte_weights(dtype: torch.dtype, opset: int) -> None:
    args = (torch.randn(4, 32).to(dtype), ints(-128, 127, 8, 32), (torch.rand(8) * 0.05).to(dtype))
    others = [(torch.randn(1, 32).to(dtype) * 3, args[1].flip(0), args[2] * 2)]
    shapes = (*DYNAMIC, None, None)
    check(torch._weight_int8pack_mm, *args, others=others, dynamic=shapes, opset=opset, **TOLERANCES[dtype])


class Packed(nn.Module):
    """Weights in torch's own layout."""

    def __init__(self, rows: int, columns: int, group: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.levels = ints(0, 15, rows, columns, dtype=torch.int32)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.levels, 1))
        self.register_buffer("scales", (torch.randn(columns // group, rows, 2) * 0.1).to(dtype))
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, self.group, self.scales)


@pytest.mark.parametrize(
    ("shape", "dtype", "opset"),
    rotated(
        [(64, 64, 32), (16, 128, 64), (48, 64, 32), (160, 96, 32), (128, 256, 256)],
        TOLERANCES,
        [13, 18, 21, 24],
        every=2,
    ),
)
def test_packed_nibbles(shape: tuple[int, int, int], dtype: torch.dtype, opset: int) -> None:
    columns = shape[1]
    others = [(torch.randn(1, columns).to(dtype) * 3,), (torch.randn(9, columns).to(dtype),)]
    program = check(
        Packed(*shape, dtype),
        torch.randn(4, columns).to(dtype),
        others=others,
        dynamic=DYNAMIC,
        opset=opset,
        **TOLERANCES[dtype],
    )
    assert dtypes(program)["weight.unpacked"] == (ir.DataType.INT4 if opset >= 21 else ir.DataType.INT8)


def test_packed_nibbles_are_unpacked_exactly() -> None:
    model = Packed(96, 64, 32)
    program = onnxplug.to_onnx(model, (torch.randn(2, 64),))
    stored = program.model.graph.initializers["weight.unpacked"].const_value
    np.testing.assert_array_equal(stored.numpy().astype(np.int32) + 8, model.levels.numpy())
    other, x = Packed(96, 64, 32), torch.randn(2, 64)
    program.apply_weights(dict(other.named_buffers()))
    torch.testing.assert_close(program(x)[0], other(x), **TOLERANCES[torch.float32])


def test_packed_nibbles_from_elsewhere_are_refused() -> None:
    packed = Packed(64, 64, 32)

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, packed.scales)

    with pytest.raises(Unsupported, match="packed layout"):
        onnxplug.to_onnx(model, (torch.randn(2, 64), packed.weight))


def test_a_converter_of_ones_own() -> None:
    """``docs/write-a-plugin.md``: a parameter in another dtype and layout; the rule declines other values."""
    linear, other, x = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False), torch.randn(3, 8)

    def convert(g: Any, node: Any) -> Any:
        x, weight, _ = node.args
        if g.stored(weight) is None:
            raise onnxplug.Decline("no parameter")
        rows = g.derive(weight, lambda tensor: tensor.half().t().contiguous(), "half, transposed", form="half")
        return g.op.MatMul(x, g.cast(rows, weight.dtype))

    rules = [onnxplug.Rule("aten::linear.default", convert)]
    program = onnxplug.to_onnx(linear, (x,), rules=rules)
    assert dtypes(program) == {"weight.half": ir.DataType.FLOAT16}
    for model in (linear, other):
        program.apply_weights(dict(model.named_parameters()))
        torch.testing.assert_close(program(x)[0], x @ model.weight.half().float().t())
    computed = check(lambda x: nn.functional.linear(x, x * 2), x, rules=rules)
    assert "Gemm" in computed.statistics.operators


class Bytes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", ints(-128, 127, 64, 64))
        self.register_buffer("scales", torch.rand(64) * 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x.reshape(-1, 64), self.weight, self.scales)


class Restored(nn.Module):
    """A product with a constant weight of bytes, restored in one way and used in one way."""

    def __init__(self, kind: str, use: str) -> None:
        super().__init__()
        self.register_buffer("levels", ints(-128, 127, 64, 64))
        self.register_buffer("nibbles", ints(-8, 7, 64, 64))
        self.register_buffer("floats", torch.randn(64, 64))
        self.register_buffer("scales", torch.rand(64) * 0.05 + 0.01)
        self.register_buffer("groups", torch.rand(64, 2) * 0.05 + 0.01)
        self.register_buffer("zeros", torch.zeros(64, dtype=torch.int32))
        self.kind, self.use = kind, use

    def weight(self) -> torch.Tensor:
        plain, affine = torch.ops.quantized_decomposed, torch.ops.torchao.dequantize_affine
        return {
            "channel": lambda: plain.dequantize_per_channel(
                self.levels, self.scales, self.zeros, 0, -128, 127, torch.int8
            ),
            "tensor": lambda: plain.dequantize_per_tensor(self.levels, 0.03, 0, -128, 127, torch.int8),
            "row": lambda: affine(self.levels, [1, 64], self.scales, None, torch.int8, -128, 127),
            "group": lambda: affine(self.levels, [1, 32], self.groups, None, torch.int8, -128, 127),
            "nibbles_by_row": lambda: affine(self.nibbles, [1, 64], self.scales, None, torch.int8, -8, 7),
            "nibbles_by_group": lambda: affine(self.nibbles, [1, 32], self.groups, None, torch.int8, -8, 7),
            "fake": lambda: torch.fake_quantize_per_channel_affine(self.floats, self.scales, self.zeros, 0, -128, 127),
            "fake_tensor": lambda: torch.fake_quantize_per_tensor_affine(self.floats, 0.03, 0, -128, 127),
        }[self.kind]()

    def forward(self, x: torch.Tensor) -> Any:
        return {
            "linear": lambda: nn.functional.linear(x, self.weight()),
            "linear_of_rows": lambda: nn.functional.linear(x[0], self.weight()),
            "transposed": lambda: x[0] @ self.weight().t(),
            "direct": lambda: x @ self.weight(),
            "of_rows": lambda: x[0] @ self.weight(),
            "of_a_row": lambda: x[0, 0] @ self.weight().t(),
            "with_bias": lambda: torch.addmm(x[0, :, :1], x[0], self.weight().t()),
            "direct_with_bias": lambda: torch.addmm(x[0, 0], x[0], self.weight()),
            "activations_too": lambda: nn.functional.linear(
                torch.fake_quantize_per_tensor_affine(x, 0.02, 3, -128, 127), self.weight()
            ),
        }[self.use]()


KINDS = ["channel", "tensor", "row", "group", "nibbles_by_row", "nibbles_by_group", "fake", "fake_tensor"]
USES = [
    "linear",
    "linear_of_rows",
    "transposed",
    "direct",
    "of_rows",
    "of_a_row",
    "with_bias",
    "direct_with_bias",
    "activations_too",
]
FIVE = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)


def exactly(model: nn.Module, **options: Any) -> None:
    others = [(torch.randn(2, 2, 64) * 3,), (torch.randn(3, 7, 64),)]
    check(model, torch.randn(2, 5, 64), others=others, dynamic=FIVE, **looser("weights only"), **options)


@pytest.mark.parametrize(("kind", "use", "opset"), rotated(KINDS, USES, [18, 21], every=2))
def test_activations_are_not_rounded(kind: str, use: str, opset: int) -> None:
    """ONNX Runtime's own fusion of DequantizeLinear and MatMul would round activations to bytes, a hundredth off."""
    exactly(Restored(kind, use), opset=opset)


@pytest.mark.parametrize("use", ["linear", "direct"])
@pytest.mark.parametrize("kind", ["channel", "tensor", "nibbles_by_row"])
def test_activations_are_not_rounded_in_the_plain_translation(kind: str, use: str) -> None:
    exactly(Restored(kind, use), optimize=False)


@pytest.mark.parametrize("opset", [18, 21, 24])
def test_activations_are_not_rounded_beside_bytes(opset: int) -> None:
    exactly(Bytes(), opset=opset)
