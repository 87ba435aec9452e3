"""The user's settings for products of float32: models are exported and compared without them, and the settings stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

BACKENDS: Any = torch.backends
PLACES = {
    "all": BACKENDS,
    "cudnn": BACKENDS.cudnn,
    "mkldnn": BACKENDS.mkldnn,
    "cuda.matmul": BACKENDS.cuda.matmul,
    "cudnn.conv": BACKENDS.cudnn.conv,
    "cudnn.rnn": BACKENDS.cudnn.rnn,
    "mkldnn.matmul": BACKENDS.mkldnn.matmul,
    "mkldnn.conv": BACKENDS.mkldnn.conv,
    "mkldnn.rnn": BACKENDS.mkldnn.rnn,
}


@pytest.fixture
def settings() -> Iterator[None]:
    before, precision = (
        {name: place.fp32_precision for name, place in PLACES.items()},
        torch.get_float32_matmul_precision(),
    )
    yield
    torch.set_float32_matmul_precision(precision)
    for name, place in PLACES.items():
        place.fp32_precision = before[name]


def _shown() -> dict[str, str]:
    return {name: place.fp32_precision for name, place in PLACES.items()}


def test_products_in_bfloat16_are_no_difference(settings: None, seeded: None) -> None:
    """The processor computes float32 in bfloat16 then, where it can."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))
    torch.set_float32_matmul_precision("medium")
    program = onnxplug.to_onnx(model, (torch.randn(64, 256),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert program.verify().cases[0].max_abs_difference < 1e-5


@pytest.mark.parametrize("name", ["all", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "cudnn.conv", "cudnn.rnn"])
def test_newer_settings_stay(name: str, settings: None) -> None:
    """Also where PyTorch does not give the older settings any more, since both say different things."""
    PLACES[name].fp32_precision = "ieee" if name.startswith("cudnn") else "bf16"
    before = _shown()
    onnxplug.to_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), verify=True)
    assert _shown() == before


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("cudnn", [False, True])
def test_older_settings_stay(precision: str, cudnn: bool, settings: None) -> None:
    torch.set_float32_matmul_precision(precision)
    BACKENDS.cudnn.allow_tf32 = cudnn
    before = _shown()
    onnxplug.to_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), verify=True)
    assert _shown() == before
    assert (torch.get_float32_matmul_precision(), BACKENDS.cudnn.allow_tf32) == (precision, cudnn)
    BACKENDS.fp32_precision = "bf16"  # an operator without a setting of its own still follows
    assert BACKENDS.mkldnn.conv.fp32_precision == "bf16"
