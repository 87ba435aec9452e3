"""onnxplug-ort: products with weights of four bits by MatMulNBits, against torch and against the plain form."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.errors import UsageError
from tests.converters.test_weight_only import DYNAMIC, TOLERANCES, Affine, Packed
from tests.support.check import check
from tests.support.contrib import plugged
from tests.support.sampling import rotated
from tests.test_torchao import CONFIGS, quantised

REGISTRY = plugged("onnxplug-ort")


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


def products(model: nn.Module, columns: int, dtype: torch.dtype, opset: int, others: Any = ()) -> list[Any]:
    """The MatMulNBits nodes of the model."""
    inputs = [(torch.randn(1, columns).to(dtype) * 3,), (torch.zeros(7, columns, dtype=dtype),), *others]
    program = check(
        model,
        torch.randn(4, columns).to(dtype),
        others=inputs,
        dynamic=DYNAMIC,
        opset={"": opset, "com.microsoft": 1},
        registry=REGISTRY,
        **TOLERANCES[dtype],
    )
    return [n for n in program.model.graph if n.op_type == "MatMulNBits"]


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "signed": ({"low": -8, "high": 7, "group": 32, "columns": 96}, 32),
    "unsigned": ({"low": 0, "high": 15, "group": 16, "columns": 48}, 16),
    "three_bits": ({"low": -4, "high": 3, "group": 64, "columns": 64}, 64),
    "without_zeros": ({"low": -8, "high": 7, "group": 32, "columns": 64, "zeros": False}, 32),
    "unsigned_without_zeros": ({"low": 0, "high": 15, "group": 32, "columns": 96, "zeros": False}, 32),
    "by_row": ({"low": -8, "high": 7, "group": 96, "columns": 96}, 128),
    "by_long_row": ({"low": 0, "high": 15, "group": 600, "columns": 600}, 256),
    "by_odd_row": ({"low": -8, "high": 7, "group": 7, "columns": 7, "rows": 3}, 16),
}


@pytest.mark.parametrize(
    ("name", "dtype", "opset"), rotated(CASES, [torch.float32, torch.float16], [13, 18, 21, 24], every=2)
)
def test_nibbles(name: str, dtype: torch.dtype, opset: int) -> None:
    how, size = CASES[name]
    (node,) = products(Affine(**how, dtype=dtype), how["columns"], dtype, opset)
    assert int(node.attributes["block_size"].value) == size
    assert int(node.attributes["accuracy_level"].value) == 1


def test_not_finite() -> None:
    x = torch.randn(6, 64)
    x[0, 0], x[1, 5], x[2, 3], x[3] = float("nan"), float("inf"), -float("inf"), 1e30
    (_,) = products(Affine(-8, 7, 32, columns=64), 64, torch.float32, 21, [(x,)])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(64, 64, 32), (48, 128, 64), (128, 256, 256)], ids=str)
def test_packed_by_torch(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    for opset in (18, 21, 24):
        (node,) = products(Packed(*shape, dtype), shape[1], dtype, opset)
        assert int(node.attributes["block_size"].value) == shape[2]


def test_nodes_that_stay_plain() -> None:
    class ZeroScale(Packed):
        def __init__(self) -> None:
            super().__init__(64, 64, 32)
            self.scales[1, 3, 0] = 0.0

    cases: list[tuple[nn.Module, int, torch.dtype]] = [
        (Affine(-8, 7, 8), 32, torch.float32),  # a block size without a kernel
        (Affine(-8, 7, 48, columns=96), 96, torch.float32),
        (Affine(-8, 7, 32, range=(-128, 127)), 32, torch.float32),
        (Affine(-9, 7, 32, range=(-8, 7)), 32, torch.float32),
        (Affine(-8, 7, 32, dtype=torch.bfloat16), 32, torch.bfloat16),
        (ZeroScale(), 64, torch.float32),
        (nn.Linear(8, 4), 8, torch.float32),
    ]
    for model, columns, dtype in cases:
        assert products(model, columns, dtype, 21) == []


def test_without_the_domain() -> None:
    program = onnxplug.to_onnx(Affine(-8, 7, 32), (torch.randn(2, 32),), registry=REGISTRY)
    assert [n.op_type for n in program.model.graph] == ["DequantizeLinear", "Gemm"]


def test_bias_and_shared_weights() -> None:
    class Shared(Affine):
        def __init__(self) -> None:
            super().__init__(-8, 7, 32, columns=64)
            self.bias = nn.Parameter(torch.randn(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight()
            first = nn.functional.linear(x, weight, self.bias)
            return first + nn.functional.linear(x[None] * 2, self.weight())[0] + weight.sum()

    first, second = products(Shared(), 64, torch.float32, 21)
    assert list(first.inputs)[1:4] == list(second.inputs)[1:4]


def test_replaced_weights() -> None:
    options: dict[str, Any] = {"opset_version": {"": 18, "com.microsoft": 1}, "registry": REGISTRY}
    pairs: list[tuple[nn.Module, nn.Module, int]] = [
        (Affine(-8, 7, 96, columns=96), Affine(-8, 7, 96, columns=96), 96),
        (Packed(64, 64, 32), Packed(64, 64, 32), 64),
    ]
    for model, other, columns in pairs:
        x = torch.randn(3, columns)
        program = onnxplug.to_onnx(model, (x,), **options)
        program.apply_weights(dict(other.named_buffers()))
        torch.testing.assert_close(program(x)[0], other(x), **TOLERANCES[torch.float32])
    program = onnxplug.to_onnx(Affine(-8, 7, 32), (torch.randn(2, 32),), **options)
    with pytest.raises(UsageError, match="4 bits, -8 to 7"):
        program.apply_weights({"zeros": torch.full((6, 1), 8, dtype=torch.int8)})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("name", [n for n in CONFIGS if "int4" in n])
def test_torchao(name: str, opset: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(products(quantised(name), 64, torch.float32, opset)) == 2
