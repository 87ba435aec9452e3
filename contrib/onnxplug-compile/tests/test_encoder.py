"""``nn.TransformerEncoder`` in evaluation, whose fast path is one operator; and threads of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnxruntime
import pytest
import torch
from onnxplug_compile.backend import _make_session, _threads, onnxplug_backend
from onnxplug_compile.options import BackendOptions
from torch import nn

import onnxplug
from tests.support.sampling import rotated
from tests.support.tolerances import LOOSER, looser


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
HIDDEN = torch.tensor([[False, False, False, True, True], [False] * 5])


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    "masks", [{}, {"mask": CAUSAL, "is_causal": False}, {"mask": CAUSAL.float().masked_fill(CAUSAL, float("-inf")), "is_causal": True}],
    ids=["all", "masked", "causal"],
)  # fmt: skip
@pytest.mark.long
def test_an_encoder_is_run_by_onnxruntime(masks: dict[str, Any], activation: str, norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation=activation, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    store: dict[str, Any] = {}
    compiled = torch.compile(model, backend=onnxplug_backend, options={"store": store, "fallback": False})
    with torch.no_grad():
        for x in (torch.randn(2, 5, 16), torch.randn(2, 5, 16) * 3 - 1, torch.randn(3, 5, 16)):
            torch.testing.assert_close(
                compiled(x, **masks), model(x, **masks), rtol=LOOSER["attention"].rtol, atol=LOOSER["attention"].atol
            )
    assert store["graphs"]
    assert all(graph.model is not None and graph.error is None for graph in store["graphs"])


NUMBERS = CAUSAL.float().masked_fill(CAUSAL, float("-inf"))
NOT_CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril(-2)


@pytest.mark.parametrize(("training", "nested"), rotated([False, True], [True, False], every=2))
@pytest.mark.long
def test_a_mask_without_is_causal(training: bool, nested: bool) -> None:
    """The graph that Dynamo traces is right for masks of other values too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).train(training)
    store: dict[str, Any] = {}
    compiled = torch.compile(
        model, backend=onnxplug_backend, fullgraph=True, options={"store": store, "fallback": False}
    )
    with torch.no_grad():
        for mask in (CAUSAL, NOT_CAUSAL, NUMBERS, NUMBERS.T.contiguous()):
            x = torch.randn(2, 5, 16)
            torch.testing.assert_close(compiled(x, mask=mask), model(x, mask=mask), **looser("attention"))
    assert len(store["graphs"]) == 2  # for masks of truth values, and of numbers


@pytest.mark.long
def test_a_decoder_with_a_mask() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    compiled = torch.compile(model, backend=onnxplug_backend, fullgraph=True, options={"fallback": False})
    x, y = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    with torch.no_grad():
        for mask in (CAUSAL, NOT_CAUSAL):
            torch.testing.assert_close(compiled(x, y, tgt_mask=mask), model(x, y, tgt_mask=mask), **looser("attention"))


class Fast(nn.Module):
    """The operator itself, with a mask of each type."""

    def __init__(self, mask: torch.Tensor | None, kind: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mask, self.kind = mask, kind
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layer = layer.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, m = self.layer.self_attn, self.layer
        return torch._transformer_encoder_layer_fwd(
            x, 8, 2, a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias, False, False, 1e-5,
            m.norm1.weight, m.norm1.bias, m.norm2.weight, m.norm2.bias,
            m.linear1.weight, m.linear1.bias, m.linear2.weight, m.linear2.bias, self.mask, self.kind,
        )  # fmt: skip


MASKS = {
    "none": (None, None),
    "pairs": (CAUSAL, 0),
    "positions": (HIDDEN, 1),
    "heads": (torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.7, 2),
    "all hidden": (torch.tensor([[True] * 5, [False] * 5]), 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_the_operator_is_exported(name: str) -> None:
    model = Fast(*MASKS[name]).eval()
    with torch.no_grad():
        program = onnxplug.to_onnx(torch.export.export(model, (torch.randn(2, 5, 8),)))
        for x in (torch.randn(2, 5, 8), torch.randn(2, 5, 8) * 4 + 1):
            torch.testing.assert_close(
                program(x)[0], model(x), rtol=LOOSER["attention"].rtol, atol=LOOSER["attention"].atol, equal_nan=True
            )


class Heads(nn.Module):
    """``nn.MultiheadAttention``'s fast path, with the weights of all heads, their mean, or without."""

    def __init__(self, mask: torch.Tensor | None, kind: int | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.mask, self.kind = mask, kind
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = self.attention
        weights = (a.in_proj_weight, a.in_proj_bias, a.out_proj.weight, a.out_proj.bias)
        each, mean, none = (
            torch._native_multi_head_attention(x, x, x, 8, 2, *weights, self.mask, needed, average, self.kind)
            for needed, average in ((True, False), (True, True), (False, True))
        )
        return *each, *mean, none[0]


@pytest.mark.parametrize("name", [*MASKS, "numbers"])
def test_the_operator_of_attention_is_exported(name: str) -> None:
    """A mask of numbers hides where it is not 0, as in PyTorch's kernel."""
    numbers = torch.tensor([0.0, 0.0, 0.5, -2.0, float("-inf")]).repeat(5, 1)
    model = Heads(*MASKS.get(name, (numbers, 0))).eval()
    with torch.no_grad():
        program = onnxplug.to_onnx(torch.export.export(model, (torch.randn(2, 5, 8),)))
        for x in (torch.randn(2, 5, 8), torch.randn(2, 5, 8) * 4 + 1):
            torch.testing.assert_close(list(program(x)), list(model(x)), **looser("attention"), equal_nan=True)


# -- threads ---------------------------------------------------------------------------------------------------------------


def threads_of(**options: Any) -> int:
    """Threads within an operator, of a session that is made with some options."""
    model = onnxplug.to_onnx(nn.Linear(2, 2), (torch.ones(1, 2),)).model
    return int(_make_session(model, BackendOptions(**options)).get_session_options().intra_op_num_threads)


def test_sessions_take_as_many_threads_as_pytorch() -> None:
    for count in (1, 3):
        torch.set_num_threads(count)
        assert threads_of() == count
    assert threads_of(threads=2) == 2
    assert threads_of(session_options={"intra_op_num_threads": 4}) == 4
    assert threads_of(session_options={"intra_op_num_threads": 4}, threads=2) == 2
    assert threads_of(session_options={"log_severity_level": 3}) == 3
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 5
    assert threads_of(session_options=options) == 5


def test_other_threads_get_another_session() -> None:
    torch.set_num_threads(1)
    first = _threads(BackendOptions())
    torch.set_num_threads(2)
    assert (first, _threads(BackendOptions())) == (1, 2)
