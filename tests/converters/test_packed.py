"""Packed sequences, as models use them: packed, run through a layer, padded again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.check import check
from tests.support.sampling import rotated

AUTO = torch.export.Dim.AUTO


class Tagger(nn.Module):
    """A layer over sequences of different lengths, and a linear one on top."""

    def __init__(self, layer: nn.RNNBase, in_order: bool, to_full_length: bool) -> None:
        super().__init__()
        self.layer = layer
        self.in_order = in_order
        self.to_full_length = to_full_length
        self.top = nn.Linear((layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1), 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, hx: Any = None) -> Any:
        first = self.layer.batch_first
        total = x.shape[1 if first else 0] if self.to_full_length else None
        rows = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=self.in_order)
        rows, states = self.layer(rows, hx)
        y, again = pad_packed_sequence(rows, batch_first=first, padding_value=-1.5, total_length=total)
        return self.top(y), again, states


LAYERS = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "lstm_batch_first_double": lambda: nn.LSTM(3, 4, batch_first=True).double(),
    "lstm_projected": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4, 2, batch_first=True),
    "gru_both": lambda: nn.GRU(3, 4, bidirectional=True),
    "rnn": lambda: nn.RNN(3, 4, nonlinearity="relu"),
}


def tagger(name: str, in_order: bool, to_full_length: bool = False) -> Tagger:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    return Tagger(layer, in_order, to_full_length).to(layer.weight_ih_l0.dtype).eval()


def inputs(model: Tagger, steps: int, lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(lengths), steps, 3) if model.layer.batch_first else (steps, len(lengths), 3)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(model.top.weight.dtype)
    return x, torch.tensor(sorted(lengths, reverse=True) if model.in_order else lengths)


@pytest.mark.parametrize(
    ("name", "in_order", "to_full_length", "dynamic"),
    rotated(LAYERS, [True, False], [False, True], [False, True], every=2),
)
def test_there_and_back(name: str, in_order: bool, to_full_length: bool, dynamic: bool) -> None:
    model = tagger(name, in_order, to_full_length)
    others = [inputs(model, 5, [2, 4, 1], 1), inputs(model, 5, [1, 1, 1], 2), inputs(model, 5, [5, 5, 5], 3)]
    if dynamic:
        others += [inputs(model, 9, [3, 8, 9, 2, 2], 4), inputs(model, 1, [1, 1], 5)]
    check(model, *inputs(model, 5, [3, 5, 2], 0), others=others, dynamic=True if dynamic else None)


def test_dimensions_by_name() -> None:
    model = tagger("gru", False)
    batch, steps = torch.export.Dim("batch"), torch.export.Dim("steps")
    others = [inputs(model, 9, [3, 8, 9, 2, 2], 4), inputs(model, 3, [1, 2], 5)]
    check(model, *inputs(model, 5, [3, 5, 2], 0), others=others, dynamic=({0: batch, 1: steps}, {0: batch}))


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("name", ["lstm", "lstm_projected", "gru"])
def test_initial_states(name: str, in_order: bool) -> None:
    model = tagger(name, in_order)
    count = model.layer.num_layers * (2 if model.layer.bidirectional else 1)

    def states(batch: int) -> Any:
        h = torch.randn(count, batch, model.layer.proj_size or 4)
        return (h, torch.randn(count, batch, 4)) if name.startswith("lstm") else h

    state = {1: AUTO}
    dynamic = ({0: AUTO, 1: AUTO}, {0: AUTO}, (state, state) if name.startswith("lstm") else state)
    others = [(*inputs(model, 8, [1, 8], 1), states(2))]
    check(model, *inputs(model, 5, [3, 5, 2], 0), states(3), others=others, dynamic=dynamic)


@pytest.mark.parametrize("batch_first", [False, True])
def test_packing_alone(batch_first: bool) -> None:
    def rows(x: torch.Tensor, lengths: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, lengths, batch_first=batch_first)
        return packed.data * 2, packed.batch_sizes

    x, lengths = torch.randn(5, 5, 2, 3), torch.tensor([4, 4, 3, 1, 1])
    check(rows, x, lengths, others=[(x + 1, torch.tensor([5, 1, 1, 1, 1]))])
    check(
        rows,
        x,
        lengths,
        others=[(torch.randn(7, 7, 2, 3), torch.tensor([6, 6, 4, 3, 2, 1, 1]))],
        dynamic=({0: AUTO, 1: AUTO}, {0: AUTO}),
    )
    check(rows, torch.arange(12).reshape(3, 4).repeat(2, 1)[:4], torch.tensor([4, 2, 2, 1]))


def test_lengths_as_a_list() -> None:
    check(lambda x: pad_packed_sequence(pack_padded_sequence(x, [4, 2, 1])), torch.randn(4, 3, 2))
