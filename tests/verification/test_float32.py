"""The user's settings for products of float32: models are exported and compared without them, and the settings stay."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.child import run_child

#: For a process of its own, as settings of the older and of the newer kind, once mixed, can't be told apart any more.
_SCRIPT = """
import torch
from torch import backends, nn
import onnxplug

{settings}
places = [backends, backends.cudnn, backends.mkldnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
places += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
before = [place.fp32_precision for place in places]
onnxplug.to_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), verify=True)
after = [place.fp32_precision for place in places]
assert after == before, (before, after)
{then}
"""


@pytest.fixture
def medium() -> Iterator[None]:
    """PyTorch computes products of float32 in bfloat16, where the processor can."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def test_products_in_bfloat16_are_no_difference(medium: None, seeded: None) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))
    program = onnxplug.to_onnx(model, (torch.randn(64, 256),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    assert program.verify().cases[0].max_abs_difference < 1e-5
    assert torch.get_float32_matmul_precision() == "medium"
    assert torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("name", ["backends", "backends.mkldnn", "backends.mkldnn.matmul", "backends.cudnn.conv"])
@pytest.mark.parametrize("precision", ["ieee", "tf32", "bf16"])
def test_newer_settings_stay(name: str, precision: str) -> None:
    """torch.export itself refuses newer settings that contradict PyTorch's older settings."""
    if "cudnn" in name and precision == "bf16":
        precision = "none"  # cuDNN has no bfloat16 for float32
    done = run_child("-c", _SCRIPT.format(settings=f"{name}.fp32_precision = {precision!r}", then=""))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("precision", "cudnn"), [("highest", True), ("high", False), ("medium", True)])
def test_older_settings_stay(precision: str, cudnn: bool) -> None:
    settings = f"torch.set_float32_matmul_precision({precision!r}); backends.cudnn.allow_tf32 = {cudnn}"
    follows = f"""
assert (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32) == ({precision!r}, {cudnn})
backends.fp32_precision = "bf16"  # an operator without a precision of its own has the common precision
assert backends.mkldnn.conv.fp32_precision == "bf16"
"""
    done = run_child("-c", _SCRIPT.format(settings=settings, then=follows))
    assert done.returncode == 0, done.stderr


def test_settings_that_can_not_be_changed_by_their_public_names() -> None:
    settings = 'torch.set_float32_matmul_precision("medium"); backends.disable_global_flags()'
    follows = 'assert torch.get_float32_matmul_precision() == "medium"'
    done = run_child("-c", _SCRIPT.format(settings=settings, then=follows))
    assert done.returncode == 0, done.stderr
