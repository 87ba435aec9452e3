"""The mean of a convolution's result, by a global pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import onnxplug

AUTO = torch.export.Dim.AUTO


class Mean(nn.Module):
    """A convolution, further operators, and a mean."""

    def __init__(self, behind: nn.Module, mean: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolution, self.behind, self.mean = nn.Conv2d(3, 4, 3, padding=1), behind, mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mean(self.behind(self.convolution(x)))


def planes(x: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3), keepdim=True)


POOLED: dict[str, tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = {
    "convolution": (nn.Identity(), planes),
    "silu": (nn.SiLU(), planes),
    "batch norm": (nn.Sequential(nn.BatchNorm2d(4), nn.Hardswish()), lambda x: x.mean((-1, -2), True)),
}
REDUCED: dict[str, tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = {
    "axes gone": (nn.Identity(), lambda x: x.mean((2, 3))),
    "one axis": (nn.Identity(), lambda x: x.mean((3,), keepdim=True)),
    "channels": (nn.Identity(), lambda x: x.mean((1, 2), keepdim=True)),
    "channels last": (nn.Identity(), lambda x: x.permute(0, 2, 3, 1).mean((2, 3), keepdim=True)),
    "double": (nn.Identity(), lambda x: x.mean((2, 3), keepdim=True, dtype=torch.float64)),
    "softmax": (nn.Softmax(1), planes),
}


@pytest.mark.parametrize("target", ["onnxruntime", None])
@pytest.mark.parametrize("name", [*POOLED, *REDUCED])
def test_mean(name: str, target: str | None) -> None:
    torch.manual_seed(1)
    module = Mean(*{**POOLED, **REDUCED}[name]).eval()
    sizes = ({0: AUTO, 2: AUTO, 3: AUTO},)
    program = onnxplug.to_onnx(module, (torch.randn(2, 3, 9, 11),), dynamic_shapes=sizes, target=target, plugins=[])
    counts = Counter(node.op_type for node in program.model.graph)
    pooled = name in POOLED and target is not None
    assert (counts["GlobalAveragePool"], counts["ReduceMean"]) == (int(pooled), int(not pooled))
    special = torch.randn(2, 3, 5, 6)
    special[0, 0, 2, 2], special[1, 0, 0, 0] = float("nan"), float("inf")
    for x in (torch.randn(2, 3, 9, 11), torch.randn(1, 3, 1, 1), 30 * torch.randn(3, 3, 64, 48), special):
        got, expected = program(x)[0], module(x)
        assert got.dtype == expected.dtype
        # The convolution computes in float, so that the mean in double is compared with float's tolerance.
        torch.testing.assert_close(got.float(), expected.float(), equal_nan=True)
