"""Small configurations of transformers' architectures: by the names of settings, and some architectures' own."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from tests.models.parts import (
    BRIDGE,
    CONVNEXT,
    DEPTH_ANYTHING,
    EACH_LAYER,
    FEW_BLOCKS,
    FEW_FILTERS,
    FEW_LATENTS,
    FEW_QUERIES,
    FLOW,
    HIERA,
    INDEXER,
    INTRACLASS,
    KEYPOINTS,
    LAST_OF_SWIN,
    LAST_STAGE,
    LAST_STAGES,
    LW_DETR_VIT,
    MAPS,
    MERGED_PATCHES,
    MIMI,
    NECK,
    PERCEPTION,
    PINPOINTS,
    PLAIN_BACKBONE,
    POOLED_PATCHES,
    PROMPTS,
    QFORMER,
    REPVIT,
    ROPE,
    SAM,
    SERIES,
    SHALLOW,
    SHORT_RESNET,
    STAGES,
    SWIN,
    TINY_VQ,
    TOKENS_APART,
    TURNED,
    VIT,
    WIDE_SWIN,
    ZAMBA,
)

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
    ("out_hidden_size text_hidden_size projector_hidden_size", 32),
    ("depth", 2),
    ("word_embed_proj_dim hidden_dim output_channels fpn_hidden_size", 32),
    ("num_pos_feats", 16),
    ("image_size img_size", 32),
    ("patch_size", 8),
    ("num_labels", 5),
    ("initializer_range init_std initializer_factor", 0.2),
    ("num_mel_bins", 16),
)
_LAYERS = frozenset(("num_hidden_layers", "n_layer", "n_layers", "num_layers"))
#: Model types whose configurations are small as they are, with sizes that depend on each other.
_AS_THEY_ARE = frozenset(
    "convnext convnextv2 efficientnet hiera levit mobilevitv2 swin swinv2 donut-swin hgnet_v2 resnet rt_detr_resnet "
    "d_fine deimv2 rt_detr rt_detr_v2 pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 pp_ocrv5_mobile_det pp_ocrv5_server_det "
    "pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv5_mobile_rec pp_ocrv5_server_rec slanet efficientloftr swin2sr "
    "mask2former data2vec-vision superglue timm_wrapper gemma3n_vision maskformer-swin edgetam edgetam_vision_model".split()
)
#: Settings that the names don't decide, by model type, or by kind and model type.
OWN: Mapping[str, Mapping[str, Any]] = {
    "conditional_detr": {**PLAIN_BACKBONE, "backbone_config": LAST_STAGE},
    "dab-detr": {**PLAIN_BACKBONE, "backbone_config": LAST_STAGE},
    "deformable_detr": {**PLAIN_BACKBONE, "backbone_config": LAST_STAGES, "num_feature_levels": 4},
    "detr": {
        **PLAIN_BACKBONE,
        "backbone_config": STAGES | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    },
    "table-transformer": {**PLAIN_BACKBONE, "backbone_config": LAST_STAGE},
    "rt_detr": {**FEW_QUERIES, "backbone_config": SHORT_RESNET},
    "rt_detr_v2": {**FEW_QUERIES, "backbone_config": SHORT_RESNET},
    "d_fine": {**FEW_QUERIES, "backbone_config": FEW_BLOCKS},
    "deimv2": {**FEW_QUERIES, "backbone_config": FEW_BLOCKS},
    "pp_doclayout_v2": {
        **FEW_QUERIES,
        "backbone_config": FEW_BLOCKS,
        "class_thresholds": [0.5, 0.4],
        "class_order": [1, 0],
        "reading_order_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "coordinate_size": 6,
            "shape_size": 4,
        },
    },
    "pp_doclayout_v3": {
        **FEW_QUERIES,
        "backbone_config": FEW_BLOCKS | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "x4_feat_dim": 16,
    },
    "pp_ocrv5_server_det": INTRACLASS,
    "pp_ocrv6_medium_det": INTRACLASS,
    "pp_ocrv6_small_det": {
        "backbone_config": {
            "model_type": "pp_lcnet_v3",
            "scale": 0.25,
            "divisor": 16,
            "out_features": ["stage2", "stage3", "stage4", "stage5"],
        },
        "layer_list_out_channels": [16, 32, 64, 128],
    },
    "omdet-turbo": {
        "backbone_config": LAST_OF_SWIN,
        "text_projection_in_dim": 32,
        "text_projection_out_dim": 32,
        "class_embed_dim": 32,
        "task_encoder_hidden_dim": 64,
        "apply_layernorm_after_vision_backbone": False,
        "encoder_in_channels": [32, 64, 128],
        "num_queries": 20,
        "decoder_num_layers": 2,
        "encoder_hidden_dim": 64,
        "d_model": 64,
        "vision_features_channels": [64, 64, 64],
        "decoder_hidden_dim": 64,
        "image_size": 64,
    },
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), SERIES),
    "bridgetower": {
        "hidden_size": 64,
        "vision_config": {"hidden_size": 64, "num_hidden_layers": 2, "patch_size": 8, "image_size": 32},
        "text_config": {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 128,
        },
    },
    "clvp_encoder": {"hidden_size": 128, "projection_dim": 32},  # at least 32 features of a head are rotated
    "clvp": {"projection_dim": 32},
    "audioflamingo3_encoder": {"max_source_positions": 40},
    "fun_asr_nano": {
        "adaptor_config": {
            "hidden_size": 32,
            "intermediate_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "projector_hidden_size": 32,
        }
    },
    "moonshine_streaming": {"num_key_value_heads": 4},
    "gradium_phonon_tts": {"flow_head_config": FLOW},
    "pocket_tts": {"flow_head_config": FLOW},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16, "upsample_initial_channel": 32}},
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    "clap_audio_model": {
        "num_mel_bins": 64,
        "spec_size": 128,
        "hidden_size": 128,
        "patch_embeds_hidden_size": 16,
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [2, 2, 4, 4],
        "window_size": 4,
    },
    "sam2_vision_model": HIERA,
    "sam2_video": {"image_size": 64},
    "edgetam": {"vision_config": {"model_type": "edgetam_vision_model", **REPVIT}, **PROMPTS},
    "edgetam_video": {"image_size": 64},
    "edgetam_vision_model": REPVIT,
    "sam3_vision_model": MAPS,
    "chmv2": NECK
    | {
        "backbone_config": {
            "model_type": "dinov3_vit",
            "patch_size": 8,
            "reshape_hidden_states": True,
            "return_class_token": True,
        }
        | VIT
        | EACH_LAYER,
        "post_process_channels": [8, 8, 16, 16],
        "number_output_channels": 16,
    },
    "depth_pro": {
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [16, 16],
        "scaled_images_feature_dims": [16, 16, 16],
    },
    "pp_doclayout_v4": {**FEW_QUERIES, "backbone_config": FEW_BLOCKS},
    "segmentation detr": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "lw_detr": {
        "backbone_config": {"model_type": "lw_detr_vit", **LW_DETR_VIT},
        "projector_scale_factors": [1.0],
        "num_queries": 8,
        "group_detr": 1,
    },
    "timesfm2_5": {"context_length": 512},  # 16384 are 512 patches, with a Python loop for each
    "rf_detr": {"num_queries": 5},
    "grounding-dino": {"num_queries": 10, "backbone_config": WIDE_SWIN},
    "mm-grounding-dino": {"num_queries": 10, "backbone_config": WIDE_SWIN},
    "oneformer": {
        "backbone_config": SWIN,
        "num_queries": 10,
        "decoder_layers": 3,
        "conv_dim": 32,
        "mask_dim": 32,
    },
    "owlvit": {"projection_dim": 32},
    "owlv2": {"projection_dim": 32},
    "mask2former": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_queries": 10,
        "backbone_config": SWIN | {"image_size": 224, "window_size": 7},
    },
    "kosmos-2.5": {"latent_query_num": 8},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640, "image_size": 64},
    "segmentation beit": VIT | EACH_LAYER | {"patch_size": 8},
    "segmentation data2vec-vision": VIT | {"patch_size": 8, "out_indices": [1, 2, 3, 4]},
    "segmentation upernet": {
        "hidden_size": 16,
        "auxiliary_channels": 16,
        "backbone_config": STAGES | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    },
    "dpt": VIT | NECK | {"patch_size": 8, "backbone_out_indices": [0, 1, 2, 3]},
    "depth_anything": DEPTH_ANYTHING,
    "prompt_depth_anything": DEPTH_ANYTHING,
    "tipsv2_dpt": NECK
    | {
        "backbone_config": {"model_type": "tipsv2_vision_model", "patch_size": 8, "reshape_hidden_states": False}
        | VIT
        | EACH_LAYER
    },
    "zoedepth": NECK
    | {
        "backbone_config": {"model_type": "beit", "patch_size": 8, "reshape_hidden_states": False} | VIT | EACH_LAYER,
        "bottleneck_features": 8,
        "attractors": [4, 2, 1, 1],
        "num_attractors": [4, 2, 1, 1],
        "bin_embedding_dim": 8,
    },
    "vitpose": {
        "backbone_config": {"model_type": "vitpose_backbone"} | VIT | {"patch_size": [8, 8], "image_size": [32, 32]}
    },
    "swin2sr": {"image_size": 16, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "sapiens2": {
        "head_config": {
            "upsample_out_channels": [8, 8],
            "upsample_kernel_sizes": [4, 4],
            "conv_out_channels": [8],
            "conv_kernel_sizes": [1],
        }
    },
    "vitmatte": {
        "backbone_config": {"model_type": "vitdet", "num_channels": 4, "patch_size": 16, "out_features": ["stage4"]}
        | VIT,
        "hidden_size": 32,
        "convstream_hidden_sizes": [8, 8, 16],
        "fusion_hidden_sizes": [16, 8, 8, 8],
    },
    **KEYPOINTS,
    "blip-2": {
        "image_token_index": 3,
        "num_query_tokens": 4,
        "qformer_config": {**QFORMER, "vocab_size": VOCABULARY, "use_qformer_text_input": True},
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "instructblip": {"image_token_index": 3, "num_query_tokens": 4},
    "instructblipvideo": {"video_token_index": 3, "num_query_tokens": 4},
    "chameleon": {"vocabulary_map": {"<image>": 3, **{f"IMGIMG{chr(65 + code)}Z": 10 + code for code in range(8)}}},
    "chameleon_vqgan": {**TINY_VQ, "num_embeddings": 8, "embed_dim": 8},
    "emu3": {
        "vocabulary_map": {
            "<image>": 3,
            "<|extra_200|>": 5,
            **{f"<|visual token {code:06}|>": 10 + code for code in range(8)},
        }
    },
    "emu3_vqgan": {**TINY_VQ, "codebook_size": 8, "latent_channels": 4, "embed_dim": 4},
    "janus_vqgan": {**TINY_VQ, "num_embeddings": 8, "projection_dim": 32},
    "janus_vision_model": {"projection_dim": 32},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
    "deepseek_ocr2_sam_vision_model": SAM,
    "unlimited_ocr_sam_vision_model": SAM,
    "sam_vision_model": {"global_attn_indexes": [1], "window_size": 2, "mlp_dim": 64},
    "diffusion_gemma": {"canvas_length": 8},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"} | POOLED_PATCHES},
    "gemma4_unified": {
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        }
    },
    "gemma4_vision": POOLED_PATCHES,
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {**TURNED["rope_parameters"], "mrope_section": [1, 1, 2]},
        "moe_k": 2,
    },
    **dict.fromkeys(
        "glm4v_text glm_ocr_text paddleocr_vl_text qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text".split(), TURNED
    ),
    "glm4v_moe_text": {"rope_parameters": {**TURNED["rope_parameters"], "partial_rotary_factor": 1.0}},
    "hunyuan_vl_text": {**TURNED, "head_dim": 8},
    "exaone4_5_vision": MERGED_PATCHES,
    "qwen2_5_vl_vision": MERGED_PATCHES,
    "qwen2_5_omni_vision_encoder": MERGED_PATCHES,
    "florence_vision": {
        "projection_dim": 32,
        "depths": [1, 1, 1, 1],
        "embed_dim": [16, 32, 32, 64],
        "num_heads": [2, 2, 2, 4],
        "num_groups": [2, 2, 2, 4],
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0},
    "granite4_vision": {
        **PINPOINTS,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 8, "image_size": 32, "hidden_size": 64}
        | {"num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64},
    },
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "minicpm_ocr": {"insert_layer_id": 0, "image_token_id": 3},
    "minicpmv4_6": {"insert_layer_id": 0, "image_token_id": 3},
    "minicpmv4_7": {"insert_layer_id": 0, "image_token_id": 3},
    "minicpm_ocr_vision": {"insert_layer_id": 0},
    "minicpmv4_6_vision": {"insert_layer_id": 0},
    "minicpmv4_7_vision": {"insert_layer_id": 0},
    "mllama_vision_model": {
        "intermediate_layers_indices": [0],
        "vision_output_dim": 64,
        "num_global_layers": 1,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "moshi": {"num_codebooks": 2},
    "molmo2_adapter": {"vision_feature_layer": [-1, 0]},
    "molmo2": {"image_patch_id": 3},
    "molmo2_vision": {"num_position_embeddings": 16},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [8] * 4, "depths": [1] * 4},
    "mimi": MIMI,
    "mimi_decoder": MIMI,
    "mimi_encoder": MIMI,
    "vjepa2": {"crop_size": 32, "frames_per_clip": 8, "pred_hidden_size": 32},
    "gemma3n_vision": {"model_args": {"channel_multiplier": 0.125}},
    "sam2_hiera_det_model": {name: value for name, value in HIERA["backbone_config"].items() if name != "model_type"},
    "univnet": {
        "model_in_channels": 8,
        "model_hidden_channels": 8,
        "kernel_predictor_hidden_channels": 8,
        "resblock_kernel_sizes": [3, 3],
        "resblock_stride_sizes": [4, 2],
        "resblock_dilation_sizes": [[1, 3], [1, 3]],
    },
    "backbones convnext": CONVNEXT,
    "backbones convnextv2": CONVNEXT,
    "bros": {"hidden_size": 128},
    "dia_decoder": {"cross_hidden_size": 32, "cross_num_key_value_heads": 4, "cross_head_dim": 8},
    "backbones focalnet": {"hidden_sizes": [192, 384, 768, 768]},
    "backbones vitpose_backbone": {**VIT, "patch_size": [8, 8], "image_size": [32, 32], "num_experts": 1},
    "backbones lw_detr_vit": LW_DETR_VIT,
    "lilt": {"hidden_size": 48},
    "glm_image_text": TURNED,
    "nemo_speechlm": {"audio_token_id": 3},
    "qwen2_audio_encoder": {"max_source_positions": 40},
    "moss_transcribe_diarize": {"audio_chunk_size": 480000},
    "moss_transcribe_diarize_audio": {"max_source_positions": 40},
    "mistral4": {"head_dim": 16},
    "radio": {"video_temporal_patch_size": 2},
    "llama4_vision_model": {
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "intermediate_size": 128,
        "vision_output_dim": 32,
    },
    "qwen2_5_omni_thinker": TOKENS_APART,
    "qwen3_omni_moe_thinker": TOKENS_APART,
    "nemotron_h_omni": {"vision_hidden_size": 32, "image_token_id": 3},
    "perception_lm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 192, "img_size": [32, 32], "depth": 2, "global_pool": ""},
        }
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "kimi_k25": {"projection_hidden_size": 32},
    "fast_vlm": {
        "vision_config": {
            "model_type": "timm_wrapper",
            "architecture": "fastvit_t8",
            "do_pooling": True,
            "global_pool": "avg",
            "hidden_size": 768,
            "model_args": {"inference_mode": True},
        }
    },
    "pp_formulanet_vision": {
        "post_conv_in_channels": 32,
        "post_conv_mid_channels": 32,
        "post_conv_out_channels": 32,
        "decoder_hidden_size": 32,
    },
    "paligemma": {"projection_dim": 32},
    "step3p5": {"sliding_window": 8},
    "vipllava": {"vision_feature_layers": [-1, 0]},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32, "max_2d_position_embeddings": 200},
    "audio-spectrogram-transformer": {"max_length": 80, "num_mel_bins": 32},
    "align_vision_model": {"initializer_range": 0.02},  # 55 convolutions: larger weights lose all digits
    "glpn": {"initializer_range": 0.02},  # larger weights give sigmoids below 1e-7, which ONNX Runtime's kernel rounds
    "whisper": {"max_source_positions": 40},
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "speecht5": {"speech_decoder_prenet_dropout": 0.0},  # the dropout is active in evaluation too
    "slanext_vision": {"output_channels": 256},  # its neck takes no other number
    "vits": {"use_stochastic_duration_prediction": False, "noise_scale": 0.0},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "blt": {"encoder_hash_byte_group_vocab": 101, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "qwen4_exp_text": INDEXER,
    "shieldgemma2": {
        "image_token_index": VOCABULARY - 1,
        "yes_token_index": 5,
        "no_token_index": 6,
        "mm_tokens_per_image": 4,
    },
    "yolos": {"image_size": [32, 48]},
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
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": 4},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": 4},
    "nemotron3_diarization_audio": {"num_key_value_heads": 4},  # values have as many heads as queries
    "neucodec": FEW_FILTERS,
    "xcodec2": FEW_FILTERS,
    **dict.fromkeys((f"pocket_tts_audio_tokenizer{half}" for half in ("", "_encoder", "_decoder")), FEW_LATENTS),
    "pe_video_encoder": {"vision_config": PERCEPTION},
    "seggpt": {
        "image_size": [64, 32],
        "num_hidden_layers": 4,
        "merge_index": 0,
        "intermediate_hidden_state_indices": [1, 2, 3],
        "pretrain_image_size": 32,
        "decoder_hidden_size": 8,
    },
    "t5gemma2_text": {"dropout_rate": 0.0},
    "backbones timm_backbone": {"backbone": "test_resnet"},
    "pretraining hiera": {
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [1, 2, 2, 4],
        "decoder_hidden_size": 32,
        "decoder_depth": 2,
        "decoder_num_heads": 4,
    },
    "tvp": {"backbone_config": LAST_STAGE, "max_img_size": 64, "visual_prompt_size": 8, "num_frames": 4},
    "uvdoc": {"backbone_config": BRIDGE, "bridge_connector": [8, 8], "out_point_positions2D": [[8, 8], [8, 2]]},
    "perceiver": {"d_latents": 32, "num_latents": 16, "num_self_attends_per_block": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 1440000},
    "vibevoice_acoustic_tokenizer": {**SHALLOW, "vae_std": 0.0},  # no noise
    "vibevoice_acoustic_tokenizer_encoder": SHALLOW,
    "vibevoice_acoustic_tokenizer_decoder": SHALLOW,
    "vibevoice_semantic_tokenizer_encoder": SHALLOW,
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
    "zamba": ZAMBA,
    "zamba2": ZAMBA,
    "xmod": {"default_language": "en_XX"},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "xlstm": {"qk_dim_factor": 0.5, "v_dim_factor": 1.0, "hidden_size": 64, "embedding_dim": 64, "chunk_size": 8},
}


def small_settings(config: Any, model_type: str, kind: str = "") -> dict[str, Any]:
    """The settings of a small configuration that is like another configuration.

    Args:
        config: The class, or an instance of it with its default settings.
        model_type: Its name in transformers.
        kind: The kind of model, where its settings depend on that.
    """
    own = {**OWN.get(model_type, {}), **OWN.get(f"{kind} {model_type}", {})}
    if model_type in _AS_THEY_ARE:
        return own
    if isinstance(config, type):
        config = config()
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    layers = max(2, len(kinds))
    settings = config.to_dict()
    results: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, bool) or value is None:
            continue
        inner = getattr(config, name, None) if isinstance(value, Mapping) else None
        if hasattr(inner, "to_dict"):
            results[name] = {"model_type": inner.model_type, **small_settings(inner, inner.model_type)}
        elif isinstance(value, int | float):
            small = next((small for names, small in _SMALL if any(fnmatchcase(name, n) for n in names.split())), None)
            if small is not None:
                results[name] = layers if name in _LAYERS else small
        elif isinstance(value, list) and name in ("layer_types", "mlp_layer_types") and value:
            each = list(dict.fromkeys(value))
            results[name] = (each * layers)[:layers] if name == "mlp_layer_types" else (kinds * layers)[:layers]
        elif isinstance(value, Mapping) and "mrope_section" in value:  # half a head, or half its rotated part
            half = int(results.get("head_dim", 8) * value.get("partial_rotary_factor", 1)) // 2
            results[name] = {**value, "mrope_section": [half - half // 3 * 2, half // 3, half // 3]}
    if settings.get("kv_lora_rank"):  # latent attention has as many heads of keys as of queries
        results["num_key_value_heads"] = results["num_attention_heads"]
        if "head_dim" in results:
            results["head_dim"] = results.get("qk_rope_head_dim", 8)
    return {**results, **own}
