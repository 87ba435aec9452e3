"""Small configurations of transformers' architectures: by the names of their settings, and the few that need their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

VOCABULARY = 99

#: Settings by their names, the first pattern that fits.
_SMALL: tuple[tuple[str, Any], ...] = (
    (r"(.*_)?vocab_size(_per_layer_input)?|n_vocab|n_words|token_vocabulary_size", VOCABULARY),
    (r"pad_token_id", 0),
    (r"(bos|cls|decoder_start)_token_id|bos_index", 1),
    (r"(eos|sep)_token_id|eos_index", 2),
    (
        r"(forced_|begin_|end_|image_|video_|audio_|unk_|mask_)?.*_token_(id|index)|image_token_index|pad_index|unk_index|mask_index",
        3,
    ),
    (
        r"num_key_value_heads|num_kv_heads|kv_heads|num_global_key_value_heads|swa_num_key_value_heads|compress_num_key_value_heads",
        2,
    ),
    (
        r"(.*_)?num_(attention_|hidden_)?heads|n_heads?|(en|de)coder_attention_heads|attention_heads|swa_num_attention_heads|num_query_heads",
        4,
    ),
    (
        r"head_dim|global_head_dim|swa_head_dim|d_head|attention_head_dim|attention_key_size|kv_channels|d_kv|dim_head|swa_v_head_dim",
        8,
    ),
    (r"qk_head_dim", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|index_head_dim", 8),
    (r"(q|kv|o|index_q|swa_kv|swa_q)_lora_rank|.*_rank", 16),
    (r"rotary_dim|rope_dim", 4),
    (r"n_group|topk_group|num_expert_group|n_groups_experts", 1),
    (
        r"num_experts_per_tok|num_experts_per_token|top_k|moe_top_?k|moe_topk|num_selected_experts|router_top_k|num_experts_per_token|zero_expert_num",
        2,
    ),
    (r"num_(local_)?experts|n_routed_experts|moe_num_experts|num_routed_experts|ffn_num_experts", 4),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_nextn_predict_layers|num_dense_layers|num_mtp_layers", 1),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"linear_(key|value)_head_dim", 8),
    (r"mamba_(n|num)_?heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim|mamba_headdim", 8),
    (r"mamba_d_ssm", 64),
    (r"mamba_n_?groups|n_groups|mamba_ngroups", 1),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size|mamba_d_state", 8),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"(mamba_)?chunk_size|chunk_length|attention_chunk_size|index_block_size", 8),
    (r"lru_width|attention_hidden_size|conv_dim", 32),
    (
        r"(.*_)?(ffn|feed_?forward|mlp|intermediate)_(dim|size|hidden_size|embed_dim)|n_inner|d_ff|dim_ff|d_inner|ffn_hidden_size|mlp_dim|moe_intermediate_size|(en|de)coder_ffn_dim|inner_dim",
        64,
    ),
    (
        r"max_position_embeddings|n_positions|max_(source|target)_positions|max_seq_len|max_sequence_length|n_ctx|model_max_length|max_length|seq_length",
        128,
    ),
    (
        r"sliding_window|local_attention|window_size|attention_window|swa_window|attention_window_size|sliding_window_size",
        8,
    ),
    (
        r"(.*_)?num_(hidden_)?layers|n_layers?|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks|n_blocks|num_hidden_blocks",
        2,
    ),
    (r"hidden_size_per_layer_input", 8),
    (
        r"hidden_size|d_model|n_embd|dim|emb_dim|embed_dim|embedding_size|model_dim|encoder_hidden_size|decoder_hidden_size|d_embed|word_embed_proj_dim|hidden_dim|cross_attention_hidden_size|embedding_dim",
        32,
    ),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"num_labels", 5),
    (r"initializer_range|init_std|initializer_factor", 0.2),
    (r"num_mel_bins", 16),
)
#: What the names don't tell, by model type.
#: Small enough as they are, and of sizes that depend on each other.
_AS_THEY_ARE = frozenset("convnext convnextv2 efficientnet hiera levit mobilevitv2 swin swinv2 donut-swin".split())
OWN: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": {"num_key_value_heads": 4, "adapter_in_dim": 32},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "recurrent_gemma": {"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds_dim": [8, 24],
        "axial_pos_shape": [8, 16],
        "attn_layers": ["local", "lsh"],
        "num_buckets": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
    "esmc": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "head_dim": 8},
    "ernie4_5_moe": {"moe_k": 2},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "xlstm": {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "hidden_size": 64, "embedding_dim": 64, "chunk_size": 8},
}


def small_settings(config: Any, model_type: str) -> dict[str, Any]:
    """The settings of a configuration that is like another one, and small.

    Args:
        config: An instance of the class with its default settings.
        model_type: Its name in transformers.
    """
    if model_type in _AS_THEY_ARE:
        return {}
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    layers = max(2, len(kinds))
    settings = config.to_dict()
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, Mapping) and name.endswith("_config") and "model_type" in value:
            inner = getattr(config, name)
            found[name] = {"model_type": value["model_type"], **small_settings(inner, value["model_type"])}
        elif isinstance(value, int | float):
            small = next((small for pattern, small in _SMALL if re.fullmatch(pattern, name)), None)
            if small is not None:
                found[name] = layers if re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", name) else small
        elif isinstance(value, list) and name in ("layer_types", "mlp_layer_types") and value:
            each = list(dict.fromkeys(value))
            found[name] = (each * layers)[:layers] if name == "mlp_layer_types" else (kinds * layers)[:layers]
    if settings.get("kv_lora_rank"):  # latent attention has as many heads of keys as of queries
        found["num_key_value_heads"] = found["num_attention_heads"]
        if "head_dim" in found:
            found["head_dim"] = found.get("qk_rope_head_dim", 8)
    return {**found, **OWN.get(model_type, {})}
