"""Sparse attention: the tokens that each query sees, beside transformers' own loop, and a whole model of any length."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onnxplug_transformers.indexers import selected_tokens
from torch import Tensor

import onnxplug

pytestmark = pytest.mark.filterwarnings("ignore")

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "models": ({"rtol": 1e-3, "atol": 1e-4}, "a delta rule's chunks, and experts' sums in another order"),
}
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "use_cache": False,
}


def config(**settings: Any) -> Any:
    return importlib.import_module("transformers").Qwen4ExpTextConfig(**{**SMALL, **settings})


LATER = [(1, 1, 8, 4), (3, 3, 8, 4), (9, 9, 8, 4), (40, 40, 8, 4), (30, 30, 5, 1), (23, 5, 64, 8)]


@pytest.mark.parametrize(
    ("tokens", "queries", "budget", "ratio"),
    [(40, 7, 12, 3), *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in LATER)],
)
@pytest.mark.parametrize("kind", ["causal", "padded", "any", "floats"])
def test_the_same_tokens_as_by_the_loop(tokens: int, queries: int, budget: int, ratio: int, kind: str) -> None:
    """More and fewer blocks than are chosen, incomplete blocks, gaps, queries that see nothing, a past."""
    torch.manual_seed(tokens + budget)
    module = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
    settings = {"indexer_budget": budget, "indexer_compress_ratio": ratio}
    indexer = module.Qwen4ExpTextQSAIndexer(config(**settings), 0).eval()
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    mask = torch.ones(2, 1, queries, tokens, dtype=torch.bool).tril(tokens - queries)
    if kind == "padded":
        mask[0, ..., : tokens // 3] = False
    elif kind == "any":
        mask = torch.rand(2, 1, queries, tokens) < 0.6
        mask[1, 0, 0] = False
    angles = torch.rand(2, tokens, 8) * 6
    past = torch.randn(2, tokens - queries, 16)
    cache = SimpleNamespace(update_indexer=lambda keys, _: torch.cat([past, keys], 1)) if queries < tokens else None
    given = mask if kind != "floats" else torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    args = (torch.randn(2, queries, 32), (angles.cos(), angles.sin()), given, cache)
    with torch.no_grad():
        expected = indexer(*args)
        found = selected_tokens(indexer, *args)
    assert found.dtype == torch.bool
    # The scores of blocks may be tied, at zero above all: then each choice is right.
    full = (mask.sum(-1) // ratio)[:, 0]
    assert torch.equal(found.sum(-1), expected.sum(-1))
    untied = (full <= budget // ratio)[:, None, :, None].expand_as(found)
    assert torch.equal(found[untied], expected[untied])
    assert (found == expected).float().mean() > 0.9


@pytest.mark.long
def test_any_length() -> None:
    torch.manual_seed(0)
    model = importlib.import_module("transformers").Qwen4ExpForCausalLM(config()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    def given(batch: int, length: int, padding: int = 0) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, :padding] = 0
        return {"input_ids": torch.randint(3, 100, (batch, length)), "attention_mask": mask}

    inputs = given(2, 9, 2)
    shapes = {name: {0: "batch", 1: "sequence"} for name in inputs}
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes)
    for batch, length, padding in ((1, 1, 0), (2, 9, 3), (3, 5, 1), (1, 11, 0)):
        inputs = given(batch, length, padding)
        shown = inputs["attention_mask"].bool()
        with torch.no_grad():
            expected = model(**inputs).logits[shown]
        torch.testing.assert_close(program(**inputs)[0][shown], expected, **LOOSER["models"][0])
