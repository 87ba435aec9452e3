"""The user's settings for products of float32: models are exported and compared without them, and the settings stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.child import run_child

#: In a process of its own: settings of the newer and of the older kind, once mixed, can't be told apart any more.
_SCRIPT = """
import torch
from torch import nn, backends
import onnxplug

places = [backends, backends.cudnn, backends.mkldnn, backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
places += [backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
{settings}
before = [place.fp32_precision for place in places]
onnxplug.to_onnx(nn.Linear(4, 4), (torch.randn(2, 4),), verify=True)
after = [place.fp32_precision for place in places]
assert after == before, (before, after)
{then}
"""


def test_products_in_bfloat16_are_no_difference(seeded: None) -> None:
    """The processor computes float32 in bfloat16 then, where it can."""
    model, before = (
        nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64)),
        torch.get_float32_matmul_precision(),
    )
    torch.set_float32_matmul_precision("medium")
    try:
        program = onnxplug.to_onnx(model, (torch.randn(64, 256),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
        assert program.verify().cases[0].max_abs_difference < 1e-5
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("medium", True)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("name", ["backends", "backends.mkldnn", "backends.mkldnn.matmul", "backends.cudnn.conv"])
def test_newer_settings_stay(name: str) -> None:
    """Also where PyTorch does not give the older settings any more, since both say different things."""
    precision = "ieee" if "cudnn" in name else "bf16"
    done = run_child("-c", _SCRIPT.format(settings=f"{name}.fp32_precision = {precision!r}", then=""))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("precision", "cudnn"), [("highest", True), ("high", False), ("medium", True)])
def test_older_settings_stay(precision: str, cudnn: bool) -> None:
    settings = f"torch.set_float32_matmul_precision({precision!r}); backends.cudnn.allow_tf32 = {cudnn}"
    follows = f"""
assert (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32) == ({precision!r}, {cudnn})
backends.fp32_precision = "bf16"  # an operator without a setting of its own still follows
assert backends.mkldnn.conv.fp32_precision == "bf16"
"""
    done = run_child("-c", _SCRIPT.format(settings=settings, then=follows))
    assert done.returncode == 0, done.stderr
