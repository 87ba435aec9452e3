"""The models that latency is measured on: five of images, seven of language, one sequence to sequence.

Language models are shrunken to six layers of width 256. As in :mod:`tests.support.zoo`, biases and scales that
initialisation leaves at zero or one are made random: an exporter that drops zero biases would look fast.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tests.support.vision import define_vision_schemas
from tests.support.zoo import TARGET, TEXT, ZooModel, draw_t5, draw_text, image_model, timm_model, transformers_model

_VOCABULARY = 1000
_LONGEST = 512

_ENCODER = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": _LONGEST,
}
_DECODER = {**_ENCODER, "intermediate_size": 704, "num_key_value_heads": 2, "use_cache": False}
_GPT2 = {
    "vocab_size": _VOCABULARY,
    "n_positions": _LONGEST,
    "n_embd": 256,
    "n_layer": 6,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 256,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 3,
    "num_heads": 4,
    "use_cache": False,
    # torch.onnx can't decompose the fused form with dynamic sizes.
    "attn_implementation": "eager",
}


def _of_transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return partial(transformers_model, model, config, **settings)


def _text(build: Callable[[], nn.Module]) -> ZooModel:
    return ZooModel(
        build,
        partial(draw_text, vocabulary=_VOCABULARY),
        {"batch": 2, "sequence": 64},
        {"input_ids": TEXT, "attention_mask": TEXT},
        limits={"sequence": _LONGEST},
    )


IMAGE_MODELS = {
    "resnet18": "resnet18",
    "efficientnet_b0": "efficientnet_b0",
    "mobilenetv3": "mobilenetv3_small_100",
    "convnext_atto": "convnext_atto",
    "vit_tiny": "vit_tiny_patch16_224",
    "swin_tiny": "swin_tiny_patch4_window7_224",
}


def _maxvit() -> nn.Module:
    """MaxViT with attention written out: torch.onnx can't decompose the fused form with a dynamic batch."""
    define_vision_schemas()
    layers: Any = importlib.import_module("timm.layers")
    before = layers.use_fused_attn()
    layers.set_fused_attn(False)
    try:
        return timm_model("maxvit_rmlp_pico_rw_256")
    finally:
        layers.set_fused_attn(before)


LATENCY: dict[str, ZooModel] = {
    **{name: image_model(timm) for name, timm in IMAGE_MODELS.items()},
    "maxvit": replace(image_model("maxvit_rmlp_pico_rw_256", 256), build=_maxvit),
    "bert": _text(_of_transformers("BertModel", "BertConfig", **_ENCODER)),
    "deberta": _text(
        _of_transformers(
            "DebertaV2Model", "DebertaV2Config", **_ENCODER, relative_attention=True, pos_att_type=["c2p", "p2c"]
        )
    ),
    "gpt2": _text(_of_transformers("GPT2LMHeadModel", "GPT2Config", **_GPT2)),
    "llama": _text(_of_transformers("LlamaForCausalLM", "LlamaConfig", **_DECODER)),
    "qwen3": _text(_of_transformers("Qwen3ForCausalLM", "Qwen3Config", **_DECODER, head_dim=64)),
    "t5": ZooModel(
        _of_transformers("T5ForConditionalGeneration", "T5Config", **_T5),
        draw_t5,
        {"batch": 2, "sequence": 64, "target": 32},
        {
            "input_ids": TEXT,
            "attention_mask": TEXT,
            "decoder_input_ids": TARGET,
            "decoder_attention_mask": TARGET,
        },
    ),
}

TRANSFORMERS = frozenset({"vit_tiny", "bert", "deberta", "gpt2", "llama", "qwen3", "t5"})
