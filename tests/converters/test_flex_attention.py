"""``flex_attention``: scores and masks by the model's own functions, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, and_masks, create_block_mask, flex_attention

from tests.support.check import check
from tests.support.sampling import rotated
from tests.support.tolerances import looser

torch.manual_seed(0)
LENGTH = 16
Q, K, V = (torch.randn(2, 4, LENGTH, 8) for _ in "qkv")
OTHERS = [tuple(torch.randn(batch, 4, LENGTH, 8) * 2 for _ in "qkv") for batch in (5, 1)]
BATCH = ({0: "batch"},) * 3
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
BIAS = torch.randn(4, LENGTH, LENGTH)
DOCUMENTS = torch.tensor([0] * 5 + [1] * 6 + [2] * 5)


def causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q - kv <= 4


def same_document(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return DOCUMENTS[q] == DOCUMENTS[kv]


def blocks(function: Callable[..., Any], length: int = LENGTH) -> Any:
    return create_block_mask(function, None, None, length, length, device="cpu")


def hide_all_but_the_past(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
    """The first row sees nothing: its result is zero."""
    return torch.where(q > kv, score, -float("inf"))


CAUSAL, WINDOW = blocks(causal), blocks(and_masks(causal, window))
DOCUMENT = blocks(and_masks(causal, same_document))

CALLS: dict[str, dict[str, Any]] = {
    "a slope for each head": {"score_mod": lambda s, b, h, q, kv: s + SLOPES[h] * (kv - q)},
    "scale": {"scale": 0.3},
    "relative positions": {"score_mod": lambda s, b, h, q, kv: s + (q - kv)},
    "hidden by scores": {"score_mod": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf"))},
    "a bias": {"score_mod": lambda s, b, h, q, kv: s + BIAS[h, q, kv]},
    "a row without keys": {"score_mod": hide_all_but_the_past},
    "by the batch": {"score_mod": lambda s, b, h, q, kv: s * (b + 1)},
    "causal": {"block_mask": CAUSAL},
    "plain": {},
    "logsumexp": {"block_mask": CAUSAL, "return_aux": AuxRequest(lse=True)},
    "documents": {"block_mask": DOCUMENT},
    "a window and capped scores": {
        "block_mask": WINDOW,
        "score_mod": lambda s, b, h, q, kv: torch.tanh(s / 20) * 20,
    },
}


@pytest.mark.parametrize("name", rotated(CALLS, every=5))
@pytest.mark.long
def test_any_batch(name: str) -> None:
    check(
        lambda q, k, v: flex_attention(q, k, v, **CALLS[name]),
        *(Q, K, V),
        others=OTHERS,
        dynamic=BATCH,
        **looser("attention"),
    )


def test_heads_that_share_keys() -> None:
    check(
        lambda q, k, v: flex_attention(q, k, v, enable_gqa=True, block_mask=CAUSAL),
        *(Q, K[:, :2], V[:, :2]),
        others=[(Q * 2, K[:, 1:3], V[:, 2:])],
        **looser("attention"),
    )


@pytest.mark.long
def test_lengths_that_are_known_when_the_model_runs() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flex_attention(q, k, v, block_mask=blocks(causal, q.shape[2]))

    others = [tuple(torch.randn(2, 4, length, 8) for _ in "qkv") for length in (5, 33)]
    check(attend, *(Q, K, V), others=others, dynamic=({2: "length"},) * 3, **looser("attention"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    """Scores of halves are computed in float, of doubles in double."""
    inputs = [x.to(dtype) for x in (Q, K, V)]
    tolerance = looser("half") if dtype is torch.float16 else {}
    check(lambda q, k, v: flex_attention(q, k, v, block_mask=CAUSAL), *inputs, **tolerance)


def test_plain_attention_asks_for_no_mask() -> None:
    program = check(lambda q, k, v: flex_attention(q, k, v), *(Q, K, V), **looser("attention"))
    assert not {"Where", "GreaterOrEqual", "Range"} & set(program.statistics.operators)
