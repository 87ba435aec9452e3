"""Layers that torch fuses to one operator, against torch's kernel and in traces that call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onnxplug.converters.helpers import fused_layers
from tests.support.scripts import check_script, traced
from tests.support.tolerances import looser

SIZE, HEADS, LENGTH = 8, 2, 5
CAUSAL = torch.ones(LENGTH, LENGTH).triu(1).bool()
PADDED = torch.tensor([[False] * 5, [False, False, False, True, True]])


@pytest.mark.parametrize(("mask", "kind"), [(None, None), (CAUSAL, 0), (PADDED, 1)], ids=["none", "causal", "padded"])
@pytest.mark.parametrize("gelu", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_layer_of_an_encoder(norm_first: bool, gelu: bool, mask: torch.Tensor | None, kind: int | None) -> None:
    torch.manual_seed(0)
    shapes = [(3 * SIZE, SIZE), (3 * SIZE,), (SIZE, SIZE), (SIZE,)]
    attention = [torch.randn(shape) for shape in shapes]
    rest = [torch.randn(SIZE) for _ in range(4)]
    rest += [torch.randn(16, SIZE), torch.randn(16), torch.randn(SIZE, 16), torch.randn(SIZE)]
    x = torch.randn(2, LENGTH, SIZE)
    args = (x, SIZE, HEADS, *attention, gelu, norm_first, 1e-5, *rest, mask, kind)
    with torch.no_grad():
        wanted = torch.ops.aten._transformer_encoder_layer_fwd(*args)
    torch.testing.assert_close(fused_layers.encoder_layer(*args), wanted, **looser("core"))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_attention(need_weights: bool, average: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in [(3 * SIZE, SIZE), (3 * SIZE,), (SIZE, SIZE), (SIZE,)]]
    x = torch.randn(2, LENGTH, SIZE)
    args = (x, x, x, SIZE, HEADS, *weights, PADDED, need_weights, average, 1)
    with torch.no_grad():
        wanted = torch.ops.aten._native_multi_head_attention(*args)
    got = fused_layers.attention(*args)
    torch.testing.assert_close(got[0], wanted[0], **looser("core"))
    if need_weights:
        assert got[1] is not None
        torch.testing.assert_close(got[1], wanted[1], **looser("core"))


class Masked(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: torch.Tensor) -> Any:
        return self.encoder(x, mask=CAUSAL)


@pytest.mark.parametrize("masked", [False, True])
def test_a_trace_without_gradients(masked: bool) -> None:
    layer = nn.TransformerEncoderLayer(SIZE, HEADS, 16, batch_first=True)
    encoder: nn.Module = nn.TransformerEncoder(layer, 2).eval()
    first, second = torch.randn(2, LENGTH, SIZE), torch.randn(3, LENGTH, SIZE)
    with torch.no_grad():
        script = traced(Masked(encoder).eval() if masked else encoder, first)
    assert "_transformer_encoder_layer_fwd" in str(script.inlined_graph)
    check_script(script, (first,), (second,), dynamic=({0: "batch"},))
