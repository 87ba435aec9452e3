"""Quantised models without the package that captures them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.errors import CaptureError, ConversionError, UsageError

X = torch.randn(2, 4)


def quantised() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 3)).eval(), {nn.Linear})


class Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.dequantize()


@pytest.mark.parametrize("make", [quantised, Stored, lambda: lambda x: torch.ops.quantized.relu6(x)])
def test_a_quantised_model_names_the_package(make: Any) -> None:
    with pytest.raises(UsageError, match="without the package onnxplug-quantized") as error:
        onnxplug.to_onnx(make(), (X,), plugins=[])
    assert error.value.hint == "pip install onnxplug-quantized"


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="torch 2.9 traces no quantised tensors: a CaptureError"
)
def test_functions_of_quantised_tensors_name_the_package() -> None:
    with pytest.raises(CaptureError) as error:
        onnxplug.to_onnx(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).int_repr(), (X,), plugins=[])
    assert "pip install onnxplug-quantized" in str(error.value.hint)
    with pytest.raises(ConversionError) as refused:
        onnxplug.to_onnx(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).relu(), (X,), plugins=[])
    assert "onnxplug-quantized" in str(refused.value.hint)
