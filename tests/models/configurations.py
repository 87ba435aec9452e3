"""Small configurations of transformers' architectures: by the names of their settings, and the few that need their own."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

VOCABULARY = 99

#: Settings by their names (``*`` stands for any characters), and their small values: the first line that has the name.
_SMALL: tuple[tuple[str, Any], ...] = (
    ("*vocab_size vocab_size_per_layer_input n_vocab n_words", VOCABULARY),
    ("pad_token_id", 0),
    ("bos_token_id cls_token_id decoder_start_token_id bos_index", 1),
    ("eos_token_id sep_token_id eos_index", 2),
    ("*_token_id *_token_index pad_index unk_index mask_index", 3),
    ("num_key_value_heads num_kv_heads kv_heads num_global_key_value_heads swa_num_key_value_heads", 2),
    ("*num_heads *num_attention_heads num_hidden_heads n_head n_heads *attention_heads num_query_heads", 4),
    ("qk_head_dim", 16),
    ("head_dim global_head_dim swa_head_dim swa_v_head_dim d_head attention_head_dim dim_head kv_channels d_kv", 8),
    ("qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim", 8),
    ("*_rank", 16),
    ("rotary_dim rope_dim", 4),
    ("n_group topk_group num_expert_group", 1),
    ("num_experts_per_tok num_experts_per_token top_k moe_top_k moe_topk router_top_k zero_expert_num", 2),
    ("num_experts num_local_experts n_routed_experts num_routed_experts moe_num_experts ffn_num_experts", 4),
    ("n_shared_experts num_shared_experts moe_num_shared_experts", 1),
    ("first_k_dense_replace num_nextn_predict_layers num_dense_layers num_mtp_layers", 1),
    ("linear_num_key_heads", 2),
    ("linear_num_value_heads", 4),
    ("linear_key_head_dim linear_value_head_dim", 8),
    ("mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_head mamba_head_dim mamba_headdim", 8),
    ("mamba_d_ssm", 64),
    ("mamba_n_groups mamba_ngroups n_groups", 1),
    ("*d_state *state_size", 8),
    ("mamba_dt_rank time_step_rank", 4),
    ("*chunk_size chunk_length index_block_size", 8),
    ("chunk_left_context chunk_right_context", 2),
    ("lru_width attention_hidden_size conv_dim", 32),
    ("*ffn_dim *intermediate_size *ffn_hidden_size *mlp_dim n_inner d_ff dim_ff d_inner inner_dim", 64),
    ("max_position_embeddings n_positions max_*_positions max_seq_len max_sequence_length n_ctx seq_length", 128),
    ("sliding_window* *window_size attention_window swa_window local_attention", 8),
    ("*num_layers *num_hidden_layers n_layer n_layers *coder_layers num_blocks n_blocks", 2),
    ("hidden_size_per_layer_input", 8),
    (
        "hidden_size encoder_hidden_size decoder_hidden_size cross_attention_hidden_size d_model n_embd dim emb_dim embed_dim embedding_size embedding_dim model_dim d_embed hidden_size_global audio_hidden_size adapter_in_dim adapter_out_dim adapter_input_size",
        32,
    ),
    ("word_embed_proj_dim hidden_dim", 32),
    ("image_size img_size", 32),
    ("patch_size", 8),
    ("num_labels", 5),
    ("initializer_range init_std initializer_factor", 0.2),
    ("num_mel_bins", 16),
)
_LAYERS = frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
#: Small enough as they are, and of sizes that depend on each other.
_AS_THEY_ARE = frozenset("convnext convnextv2 efficientnet hiera levit mobilevitv2 swin swinv2 donut-swin".split())
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_ZAMBA = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_hidden_layers": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
#: What the names don't tell, by model type, or by kind and model type.
OWN: Mapping[str, Mapping[str, Any]] = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blt": {"encoder_hash_byte_group_vocab": 101, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "qwen4_exp_text": _INDEXER,
    "shieldgemma2": {
        "image_token_index": VOCABULARY - 1,
        "yes_token_index": 5,
        "no_token_index": 6,
        "mm_tokens_per_image": 4,
    },
    "imagegpt": {"image_size": 8},
    "neomme": {"head_dim": 32},
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
    "perceiver": {"d_latents": 32, "num_latents": 16, "num_self_attends_per_block": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 1440000},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 4, "depths": [1] * 7},
    "vibevoice_semantic_tokenizer_encoder": {"num_filters": 4, "depths": [1] * 7},
    "masked reformer": {"is_decoder": False},
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
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "xlstm": {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "hidden_size": 64, "embedding_dim": 64, "chunk_size": 8},
}


def small_settings(config: Any, model_type: str, kind: str = "") -> dict[str, Any]:
    """The settings of a configuration that is like another one, and small.

    Args:
        config: An instance of the class with its default settings.
        model_type: Its name in transformers.
        kind: The kind of model, where its settings depend on that.
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
        inner = getattr(config, name, None) if isinstance(value, Mapping) else None
        if hasattr(inner, "to_dict"):
            found[name] = {"model_type": inner.model_type, **small_settings(inner, inner.model_type)}
        elif isinstance(value, int | float):
            small = next((small for names, small in _SMALL if any(fnmatchcase(name, n) for n in names.split())), None)
            if small is not None:
                found[name] = layers if name in _LAYERS else small
        elif isinstance(value, list) and name in ("layer_types", "mlp_layer_types") and value:
            each = list(dict.fromkeys(value))
            found[name] = (each * layers)[:layers] if name == "mlp_layer_types" else (kinds * layers)[:layers]
    if settings.get("kv_lora_rank"):  # latent attention has as many heads of keys as of queries
        found["num_key_value_heads"] = found["num_attention_heads"]
        if "head_dim" in found:
            found["head_dim"] = found.get("qk_rope_head_dim", 8)
    return {**found, **OWN.get(model_type, {}), **OWN.get(f"{kind} {model_type}", {})}
