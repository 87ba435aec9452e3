"""Attention written out, and self-attention with its projections, against the plain form and eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

AUTO = torch.export.Dim.AUTO
CUDA = {"target": "onnxruntime:cuda"}
#: An operator of com.microsoft, and its count in the model.
MHA, ATTENTION = {"MultiHeadAttention": 1}, {"Attention": 1}
HEADS, SIZE = 4, 8
WIDTH = HEADS * SIZE


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape) * 2


def apart(x: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def beside(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], -1, x.shape[1] * x.shape[3])


def rows(queries: int, keys: int, batch: int = 2) -> tuple[torch.Tensor, ...]:
    return draw(batch, queries, WIDTH), draw(batch, keys, WIDTH), draw(batch, keys, WIDTH)


def biases(queries: int, keys: int, shape: tuple[int, int], batch: int = 2) -> torch.Tensor:
    """Biases [batch or 1, heads or 1, queries, keys] that hide some keys by the least number, in the first row all."""
    bias = torch.randn(batch if shape[0] > 1 else 1, shape[1], queries, keys)
    hidden = torch.rand(bias.shape) > 0.7
    hidden[0, 0, 0] = True
    return bias.masked_fill(hidden, torch.finfo(torch.float32).min)


@pytest.mark.long
def test_written_out_attention(fused: Any) -> None:
    """Attention without a scale, scaled after and before the product, and with keys permuted in one step."""

    def unscaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return beside((apart(q) @ apart(k).mT).softmax(-1) @ apart(v))

    def after(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return beside(((apart(q) @ apart(k).mT) / 3.0).softmax(-1) @ apart(v))

    def before(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return beside((0.5 * apart(q) @ apart(k).mT).softmax(3) @ apart(v))

    def permuted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys = k.view(*k.shape[:2], HEADS, SIZE).permute(0, 2, 3, 1)
        return beside(((apart(q) @ keys) * 0.3).softmax(-1) @ apart(v))

    batch, queries, keys = (torch.export.Dim(n) for n in ("batch", "queries", "keys"))
    dynamic = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys})
    others = [rows(1, 1, 1), rows(2, 9, 3), tuple(x * 20 for x in rows(4, 3))]
    for function in (unscaled, after, before, permuted):
        assert fused(function, *rows(5, 7), others=others, dynamic=dynamic) == MHA
    assert fused(after, *rows(5, 7), **CUDA) == MHA


@pytest.mark.parametrize("shape", [(2, 1), (1, 1), (2, HEADS), (1, HEADS)])
def test_bias_of_scores(shape: tuple[int, int], fused: Any) -> None:
    """Biases; a row whose keys are all hidden by the least number has uniform weights."""

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return beside(((apart(q) @ apart(k).mT) * 0.4 + bias).softmax(-1) @ apart(v))

    batch, queries, keys = (torch.export.Dim(n) for n in ("batch", "queries", "keys"))
    of_bias = {2: queries, 3: keys} | ({0: batch} if shape[0] > 1 else {})
    dynamic = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys}, of_bias)
    others = [(*rows(2, 9, 3), biases(2, 9, shape, 3)), (*rows(2, 2), biases(2, 2, shape))]
    others.append((*rows(3, 4), torch.full_like(biases(3, 4, shape), float("-inf"))))
    assert fused(model, *rows(5, 7), biases(5, 7, shape), others=others, dynamic=dynamic) == MHA


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (apart(q) @ apart(k).mT).softmax(-1)


def _two_uses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    weights = _plain(q, k, v)
    return beside(weights @ apart(v)), weights


def _of_queries(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return beside((apart(q) @ apart(k).mT).softmax(-2) @ apart(v))


def _with_bias(bias: torch.Tensor) -> Callable[..., Any]:
    return lambda q, k, v: beside((apart(q) @ apart(k).mT + bias).softmax(-1) @ apart(v))


NEARLY: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "weights that are read again": (_two_uses, rows(5, 7)),
    "softmax over queries": (_of_queries, rows(5, 7)),
    "double": (lambda *x: beside(_plain(*x) @ apart(x[2])), tuple(x.double() for x in rows(5, 7))),
    "a factor of 0": (lambda q, k, v: beside((apart(q) @ apart(k).mT * 0.0).softmax(-1) @ apart(v)), rows(5, 7)),
    "a bias of keys alone": (_with_bias(torch.randn(2, 1, 1, 7)), rows(5, 7)),
    "a bias of queries alone": (_with_bias(torch.randn(5, 1)), rows(5, 7)),
    "a bias of three axes": (_with_bias(torch.randn(HEADS, 5, 7)), rows(5, 7)),
    "values of another size": (
        lambda q, k, v: beside(_plain(q, k, v) @ apart(v)),
        (*rows(5, 7)[:2], draw(2, 7, HEADS * 3)),
    ),
    "keys for all of the batch": (lambda *x: beside(_plain(*x) @ apart(x[2])), (draw(2, 5, WIDTH), *rows(5, 7, 1)[1:])),
    "heads left apart": (lambda *x: _plain(*x) @ apart(x[2]), rows(5, 7)),
    "heads beside each other in another order": (
        lambda *x: (_plain(*x) @ apart(x[2])).permute(0, 2, 3, 1).reshape(2, 5, WIDTH),
        rows(5, 7),
    ),
}


@pytest.mark.parametrize("name", NEARLY)
def test_graphs_that_resemble_attention_stay_plain(name: str, fused: Any) -> None:
    function, args = NEARLY[name]
    assert not {"MultiHeadAttention", "Attention"} & fused(function, *args).keys()


class SelfAttention(nn.Module):
    """Projections of the same rows, and attention with a bias made of the rows' first numbers."""

    def __init__(self, bias: bool = True, size: int = 10, widths: tuple[int, ...] = (WIDTH,) * 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, width, bias) for width in widths)
        self.joined = nn.Linear(size, sum(widths), bias)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)
        self.widths = list(widths)

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [apart(layer(x)) for layer in self.layers]

    def forward(self, x: torch.Tensor) -> Any:
        bias = x[:, None, :, :1] + x[:, None, None, :, 0]
        return beside(scaled_dot_product_attention(*self.parts(x), attn_mask=bias))


class Joined(SelfAttention):
    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [apart(part) for part in self.joined(x).split(self.widths, -1)]


class WrittenOut(SelfAttention):
    """Self-attention as T5 writes it, without a scale."""

    def forward(self, x: torch.Tensor) -> Any:
        q, k, v = self.parts(x)
        return beside((q @ k.mT + (x[:, None, :, :1] + x[:, None, None, :, 0])).softmax(-1) @ v)


class Causal(SelfAttention):
    def forward(self, x: torch.Tensor) -> Any:
        return beside(scaled_dot_product_attention(*self.parts(x), is_causal=True, scale=0.3))


class Unhidden(SelfAttention):
    def forward(self, x: torch.Tensor) -> Any:
        return beside(scaled_dot_product_attention(*self.parts(x)))


class OfTwo(SelfAttention):
    """Attention with keys and values of other rows."""

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [apart(layer(rows)) for layer, rows in zip(self.layers, (x, x * 0.5, x * 0.5), strict=True)]


class ReadAgain(SelfAttention):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.layers[1](x) + 1


class Computed(SelfAttention):
    """Self-attention with keys by a weight that is computed from the rows."""

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        q, _, v = super().parts(x)
        return [q, apart(x @ (self.layers[1].weight.mT * x.mean())), v]


SELF: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "three layers": (SelfAttention, ATTENTION),
    "three layers without a bias": (lambda: SelfAttention(False), ATTENTION),
    "one layer for all": (Joined, ATTENTION),
    "one layer without a bias": (lambda: Joined(False), ATTENTION),
    "written out": (WrittenOut, ATTENTION),
    "written out without a bias": (lambda: WrittenOut(False), ATTENTION),
    "causal": (Causal, ATTENTION),
    "nothing hidden": (Unhidden, MHA),
    "keys of other rows": (OfTwo, MHA),
    "keys that are read again": (ReadAgain, MHA),
    "keys by a weight that is computed": (Computed, MHA),
}


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize("name", SELF)
@pytest.mark.long
def test_self_attention(name: str, opset: int, fused: Any) -> None:
    make, expected = SELF[name]
    model = make().eval()
    others = [(draw(1, 1, 10),), (draw(3, 9, 10),)]
    program = fused(model, draw(2, 5, 10), others=others, dynamic=({0: AUTO, 1: AUTO},), opset=opset)
    assert {op: n for op, n in program.items() if op.endswith("Attention")} == expected


def test_self_attention_elsewhere(fused: Any) -> None:
    """The rewrite, which was measured on the CPU alone, isn't applied for other providers."""
    program = fused(SelfAttention().eval(), draw(2, 5, 10), **CUDA)
    assert program["MultiHeadAttention"] == 1
    assert not program["Attention"]


def test_other_weights(fused: Any) -> None:
    """The weights keep their names, and are replaced as in the plain form."""
    model, other, x = SelfAttention().eval(), SelfAttention().eval(), draw(2, 5, 10)
    assert fused(model, x)["Attention"] == 1
    fused.program.apply_weights(other.state_dict())
    torch.testing.assert_close(fused.program(x)[0], other(x), **fused.tolerances)
