"""Operators for which capture has kernels of its own, in models that are traced below autograd and functorch.

The kernels compute kinds of results without values; a trace that recorded them would give memory that nothing wrote.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.check import check
from tests.support.tolerances import looser

BATCH = ({0: "batch"},)


class FirstResult(nn.Module):
    """A recurrent layer's sequence, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


class Rounded(nn.Module):
    """Fake quantisation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)


LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "linear without bias": lambda: nn.Linear(6, 6, bias=False),
    "layer_norm": lambda: nn.LayerNorm(6),
    "batch_norm": lambda: nn.BatchNorm1d(4),
    "instance_norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "group_norm": lambda: nn.GroupNorm(2, 4),
    "lstm": lambda: FirstResult(nn.LSTM(6, 6, batch_first=True)),
    "gru": lambda: FirstResult(nn.GRU(6, 3, batch_first=True, bidirectional=True)),
    "rnn": lambda: FirstResult(nn.RNN(6, 6, batch_first=True)),
    "fake_quantize": Rounded,
}


class Beside(nn.Module):
    """The layer beside a gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> object:
        return self.layer(x), torch.func.grad(lambda v: (v**3).sum())(x)


class Before(Beside):
    """The layer gives the tensor at which a gradient is taken."""

    def forward(self, x: torch.Tensor) -> object:
        return torch.func.grad(lambda v: (v**3).sum())(self.layer(x))


class Within(Beside):
    """The gradient of the layer."""

    def forward(self, x: torch.Tensor) -> object:
        return torch.func.grad(lambda v: self.layer(v.sin()).square().sum())(x)


class Recorded(Beside):
    """The gradient by autograd."""

    def forward(self, x: torch.Tensor) -> object:
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            y = self.layer(x)
            return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]


class Functionalized(Beside):
    """The layer within functionalization."""

    def forward(self, x: torch.Tensor) -> object:
        return torch.func.functionalize(lambda v: self.layer(v) * 2)(x), torch.func.grad(lambda v: v.sin().sum())(x)


PLACES = (Beside, Before, Within, Recorded, Functionalized)
#: torch's own kernels of a linear layer of three axes make sizes static within functorch.
STATIC = {(Within, "linear"), (Functionalized, "linear"), (Within, "linear without bias")}
STATIC |= {(Functionalized, "linear without bias")}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.long
def test_results_have_values(place: type[Beside], layer: str) -> None:
    torch.manual_seed(0)
    model = place(LAYERS[layer]()).eval()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.uniform_(0.5, 2.0) if "var" in name else tensor.normal_(std=0.5)
    rows = [torch.randn(n, 4, 6) for n in (3, 5, 1)]
    static = (place, layer) in STATIC
    others = [(rows[0] * 2,)] if static else [(x,) for x in rows[1:]]
    check(model, rows[0], others=others, dynamic=None if static else BATCH, **looser("gradients"))
