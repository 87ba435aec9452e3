"""A mixture of experts, computed eagerly by a loop that torch.export can't capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "experts": (
        {"rtol": 1e-3, "atol": 1e-4},
        "two layers of products for each expert, weighted and summed in another order",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.long
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


def dbrx() -> nn.Module:
    from transformers import DbrxConfig, DbrxForCausalLM

    attention = {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}
    experts = {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "moe_normalize_expert_weights": 1.0}
    sizes = {"d_model": 32, "n_heads": 4, "n_layers": 1, "vocab_size": 100, "max_seq_len": 64}
    return DbrxForCausalLM(DbrxConfig(**sizes, attn_config=attention, ffn_config=experts, use_cache=False))


def longcat_flash() -> nn.Module:
    from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

    config = LongcatFlashConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_layers=1,
        num_attention_heads=4,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=24,
        n_routed_experts=3,
        zero_expert_num=2,
        moe_topk=3,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        head_dim=8,
        v_head_dim=8,
        use_cache=False,
    )
    return LongcatFlashForCausalLM(config)


def switch_transformers() -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=4,
        num_experts=3,
        expert_capacity=2,
        use_cache=False,
    )
    return SwitchTransformersForConditionalGeneration(config)


def nllb_moe() -> nn.Module:
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    config = NllbMoeConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_experts=3,
        max_position_embeddings=64,
        use_cache=False,
    )
    return NllbMoeForConditionalGeneration(config)


def step3p7() -> nn.Module:
    from transformers import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    config = Step3p7TextConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        mlp_layer_types=["dense", "sparse"],
        n_routed_experts=3,
        share_expert_dim=24,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return Step3p7TextModel(config)


LOOPS = {
    "dbrx": dbrx,
    "longcat_flash": longcat_flash,
    "step3p7": step3p7,
    "switch_transformers": switch_transformers,
    "nllb_moe": nllb_moe,
}


def stirred(name: str) -> nn.Module:
    """A model whose weights differ from zero and one another everywhere."""
    torch.manual_seed(0)
    model = LOOPS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.nan_to_num().clamp(-1, 1) + 0.1 * torch.randn_like(parameter))
    return model


def texts(name: str, batch: int, length: int) -> dict[str, torch.Tensor]:
    inputs = {"input_ids": torch.randint(3, 100, (batch, length))}
    if name != "nllb_moe":  # with a mask torch.export ties its sizes to the example's
        inputs["attention_mask"] = torch.ones(batch, length, dtype=torch.int64)
    if name in ("switch_transformers", "nllb_moe"):
        inputs["decoder_input_ids"] = torch.randint(3, 100, (batch, length + 1))
    return inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
@pytest.mark.parametrize("name", LOOPS)
def test_loops_beside_the_interface(name: str) -> None:
    """DBRX and its like, whose own loop over the chosen experts torch.export refuses."""
    model, inputs = stirred(name), texts(name, 2, 5)
    axes = {key: {0: "batch", 1: "target" if "decoder" in key else "sequence"} for key in inputs}
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=axes)
    program.verify(**LOOSER["experts"][0])
    for batch, length in ((1, 1), (3, 9)):
        given = texts(name, batch, length)
        with torch.no_grad():
            torch.testing.assert_close(program(**given)[0], model(**given)[0], **LOOSER["experts"][0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LOOPS)
def test_forward_as_in_transformers(name: str) -> None:
    """Each model as a whole, with the experts' forward exchanged, which afterwards is transformers' own again."""
    from onnxplug_transformers.experts import exportable_experts

    model = stirred(name)
    experts = next(type(module) for module in model.modules() if type(module).__name__.endswith("Experts"))
    before = experts.forward
    for batch, length in ((1, 1), (3, 9)):
        given = texts(name, batch, length)
        with torch.no_grad():
            expected = model(**given)[0]
            with exportable_experts():
                assert experts.forward is not before
                actual = model(**given)[0]
        torch.testing.assert_close(actual, expected, **LOOSER["experts"][0])
    assert experts.forward is before


def test_an_expert_beyond_the_last() -> None:
    """Step 3.7 leaves out an expert beyond the last."""
    from onnxplug_transformers.experts import exportable_experts

    experts = next(module for module in stirred("step3p7").modules() if type(module).__name__ == "Step3p7Experts")
    args = (torch.randn(4, 32), torch.tensor([[0, 3], [3, 3], [2, 1], [3, 1]]), torch.rand(4, 2))
    with torch.no_grad():
        expected = experts(*args)
        with exportable_experts():
            actual = experts(*args)
    torch.testing.assert_close(actual, expected)
