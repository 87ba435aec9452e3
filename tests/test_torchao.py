"""Linears quantised by torchao export and match eager PyTorch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.check import check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao import quantization

CONFIGS: dict[str, Any] = {
    "int8_weight_only": quantization.Int8WeightOnlyConfig,
    "int8_dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
    "float8_weight_only": quantization.Float8WeightOnlyConfig,
    "int4_in_int8": lambda: quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4),
    "int4_groups": lambda: quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
    ),
    "int8_activation_int4_weight": lambda: quantization.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CONFIGS)
def test_quantised_linears(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval()
    quantization.quantize_(model, CONFIGS[name]())
    program = check(
        model,
        torch.randn(4, 64),
        others=[(torch.randn(9, 64) * 3,), (torch.randn(1, 64),)],
        dynamic=({0: torch.export.Dim.DYNAMIC},),
        rtol=1e-4,
        atol=1e-4,
    )
    if name in ("int4_in_int8", "int4_groups"):
        assert [node.op_type for node in program.model.graph].count("DequantizeLinear") == 2
