"""A mixture of experts, computed eagerly by a loop that torch.export can't capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "experts": (
        {"rtol": 1e-3, "atol": 1e-4},
        "two layers of products for each expert, weighted and summed in another order",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_mixtral(implementation: str, onnx_check: Callable[..., Any]) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
        initializer_range=0.15,
        use_cache=False,
    )
    model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation(implementation)
    shapes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
    inputs = {"input_ids": torch.randint(3, 100, (2, 5)), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    program = onnx_check(
        model, kwargs=inputs, dynamic_shapes=shapes, optimize=(True,), seeds=(), **LOOSER["experts"][0]
    )
    other = {"input_ids": torch.randint(3, 100, (3, 9)), "attention_mask": torch.ones(3, 9, dtype=torch.int64)}
    with torch.no_grad():
        torch.testing.assert_close(program(**other)[0], model(**other).logits, **LOOSER["experts"][0])
    assert model.config._experts_implementation == implementation
