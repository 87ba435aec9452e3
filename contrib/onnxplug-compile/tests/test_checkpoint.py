"""Checkpointed modules: the backward graph computes them again, with the random numbers of the forward graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.tolerances import looser
from tests.support.zoo import transformers_model


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def attended(x: torch.Tensor, dropout: float) -> torch.Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(0, 1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout).transpose(0, 1).flatten(1)


BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x.relu(), 0.3),
    "two dropouts": lambda x: F.dropout(F.dropout(x, 0.3).sin(), 0.5),
    "channels": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1), 0.3).squeeze(-1),
    "noise": lambda x: x * torch.rand_like(x) + torch.randn(x.shape[1]),
    "bernoulli": lambda x: x.sin() * torch.bernoulli(x.detach(), 0.4),
    "nothing is dropped": lambda x: F.dropout(x.sin(), 0.0),
    "attention": lambda x: attended(x, 0.0),
    "attention with dropout": lambda x: attended(x, 0.5),
}


class Model(nn.Module):
    """Two checkpointed blocks."""

    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(self.block, x, layer, use_reentrant=False)
        return x.square().sum()

    def block(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return layer(self.body(layer(x)))


def trained(model: nn.Module, call: Callable[..., Any], batches: list[Any]) -> list[torch.Tensor]:
    """Losses and gradients of some steps, and the numbers that PyTorch draws next."""
    torch.manual_seed(1)
    results = []
    for batch in batches:
        model.zero_grad()
        loss = call(batch)
        loss.backward()
        results += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]
    return [*results, torch.randn(3)]


@pytest.mark.parametrize(
    ("name", "dynamic"), [*[(name, False) for name in BODIES], ("dropout", True), ("noise", True)], ids=str
)
def test_losses_and_gradients_are_those_of_eager(name: str, dynamic: bool) -> None:
    torch.manual_seed(0)
    model = Model(BODIES[name])
    batches = [torch.randn(size, 8) for size in ((4, 4, 7) if dynamic else (4, 4))]
    compiled = torch.compile(model, backend="onnxplug", dynamic=dynamic, options={"fallback": False})
    torch.testing.assert_close(trained(model, compiled, batches), trained(model, model, batches), **looser("gradients"))


def test_random_numbers_drawn_within_the_graph_are_left_to_eager() -> None:
    model = Model(lambda x: F.rrelu(x, training=True))
    batches = [torch.randn(4, 8)] * 2
    compiled = torch.compile(model, backend="onnxplug")
    with pytest.warns(UserWarning, match="is run by eager PyTorch"):
        result = trained(model, compiled, batches)
    torch.testing.assert_close(result, trained(model, model, batches), **looser("gradients"))


@pytest.mark.long
def test_a_model_of_transformers() -> None:
    torch.manual_seed(0)
    settings = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = transformers_model("BertForMaskedLM", "BertConfig", num_hidden_layers=1, **settings).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.randint(3, 50, (2, 7))
    options = {"fallback": False}
    compiled = torch.compile(model, backend="onnxplug", options=options)
    results, expected = (
        trained(model, lambda batch, f=f: f(input_ids=batch, labels=batch).loss, [ids, ids]) for f in (compiled, model)
    )
    torch.testing.assert_close(results, expected, **looser("training"))
