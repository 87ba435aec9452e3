"""Small parts of transformers' configurations, which several architectures share."""

from __future__ import annotations

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_hidden_layers": 4,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
#: Four small stages, of which detectors take the last three, or all.
STAGES = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
LAST_STAGES = {**STAGES, "out_features": ["stage2", "stage3", "stage4"]}
LAST_STAGE = {**STAGES, "out_features": ["stage4"]}
VIT = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
EACH_LAYER = {"out_indices": [1, 2, 3, 4]}
NECK = {"neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8}
PLAIN_BACKBONE = {"use_timm_backbone": False, "backbone": None, "num_queries": 10}
FEW_QUERIES = {
    "num_queries": 20,
    "decoder_layers": 2,
    "d_model": 32,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [32, 32, 64],
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_in_channels": [32, 32, 32],
    "decoder_ffn_dim": 64,
    "decoder_attention_heads": 4,
}
SHORT_RESNET = {
    "model_type": "rt_detr_resnet",
    "embedding_size": 8,
    "hidden_sizes": [16, 32, 32, 64],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
FEW_BLOCKS = {
    "model_type": "hgnet_v2",
    "embedding_size": 8,
    "hidden_sizes": [16, 32, 32, 64],
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 16, 32, 32],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [16, 32, 32, 64],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [2, 2, 2, 2],
    "out_features": ["stage2", "stage3", "stage4"],
}
TINY_VQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "latent_channels": 32}
PINPOINTS = {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]]}
MERGED_PATCHES = {"window_size": 32, "fullatt_block_indexes": [1]}
POOLED_PATCHES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 64,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 32,
}
MIMI = {
    "upsample_groups": 32,
    "num_filters": 4,
    "upsampling_ratios": [4, 2],
    "codebook_size": 64,
    "codebook_dim": 16,
    "vector_quantization_hidden_dimension": 16,
    "num_quantizers": 4,
}
CONVNEXT = {"hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4}
LW_DETR_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 256,
    "pretrain_image_size": 32,
    "window_block_indices": [0, 2],
    "out_indices": [2, 4],
}
QFORMER = {
    "model_type": "blip_2_qformer",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "encoder_hidden_size": 32,
}
#: Kernel, stride and padding of the convolutions in a block of PP-OCR's neck.
INTRACLASS = {
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
        **{
            f"{part}_{ratio}ratio": [kernel, [1, 1], [side // 2 for side in kernel]]
            for ratio, n in (("long", 7), ("mid", 5), ("short", 3))
            for part, kernel in (
                ("vertical_long_to_small_conv", [n, 1]),
                ("horizontal_small_to_long_conv", [1, n]),
                ("symmetric_conv_long", [n, n]),
            )
        },
    },
    "kernel_list": [3, 2, 2],
    "scale_factor_list": [1, 2, 4, 8],
    "backbone_config": FEW_BLOCKS | {"out_features": ["stage1", "stage2", "stage3", "stage4"]},
    "neck_out_channels": 32,
}
#: Feature maps of images of 64 pixels.
MAPS = {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]], "fpn_hidden_size": 32}
HIERA = {
    "backbone_config": {
        "model_type": "sam2_hiera_det_model",
        "hidden_size": 8,
        "image_size": [64, 64],
        "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [8, 16, 32, 64],
        "num_attention_heads_per_stage": [1, 1, 2, 2],
        "window_size_per_stage": [4, 2, 2, 2],
        "global_attention_blocks": [3],
    },
    "backbone_channel_list": [64, 32, 16, 8],
    **MAPS,
}
REPVIT = {
    "backbone_config": {
        "model_type": "timm_wrapper",
        "architecture": "repvit_m1",
        "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
        "num_classes": 5,
    },
    **MAPS,
}
#: Prompt encoders and mask decoders.
PROMPTS = {
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 32, "patch_size": 8},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 4, "iou_head_hidden_dim": 32},
}
SERIES = {
    "prediction_length": 4,
    "context_length": 12,
    "num_time_features": 2,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "moving_average": 3,
    "lags_sequence": [1, 2, 3],
}
SWIN = {
    "model_type": "swin",
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [2, 2, 2, 2],
    "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
LAST_OF_SWIN = SWIN | {"out_features": ["stage2", "stage3", "stage4"]}
WIDE_SWIN = LAST_OF_SWIN | {"image_size": 224, "window_size": 7, "embed_dim": 32}
FLOW = {"condition_dim": 32, "hidden_size": 32, "num_hidden_layers": 2, "frequency_embedding_size": 32}
TOKENS_APART = {"vision_start_token_id": 1, "audio_start_token_id": 2, "video_token_id": 2, "audio_token_id": 2}
TURNED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
SAM = {"global_attn_indexes": [1], "window_size": 2, "image_size": 64, "downsample_channels": [16, 32], "mlp_dim": 64}
DEPTH_ANYTHING = NECK | {
    "backbone_config": {"model_type": "dinov2", "patch_size": 8, "reshape_hidden_states": False} | VIT | EACH_LAYER,
    "patch_size": 8,
    "reassemble_hidden_size": 32,
    "head_hidden_size": 8,
}
#: The filters of Xcodec's encoder, doubled at each of five strides, and the width of the quantized vectors.
FEW_FILTERS = {"encoder_hidden_size": 2, "quantization_dim": 64, "num_key_value_heads": 4}
FEW_LATENTS = {"upsample_groups": 32, "num_filters": 4, "upsampling_ratios": [4, 2], "latent_stride": 4}
SHALLOW = {"num_filters": 4, "depths": [1] * 7}
PERCEPTION = {
    "model_type": "timm_wrapper",
    "architecture": "vit_pe_core_tiny_patch16_384",
    "do_pooling": True,
    "global_pool": "map",
    "num_classes": 5,
    "model_args": {"img_size": [32, 32], "depth": 2},
}
#: UVDoc's stages, of one block each: input and output channels, dilation, whether it halves the size.
BRIDGE = {
    "model_type": "uvdoc_backbone",
    "resnet_head": [[3, 8], [8, 8]],
    "resnet_configs": [[[8, 8, 1, False]], [[8, 8, 3, True]]],
    "stage_configs": [[[8, 1]], [[8, 2]], [[8, 3], [8, 2]]],
    "out_features": ["stage1", "stage2", "stage3"],
}
_SUPERPOINT = {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 32}
_DETECTOR = {"keypoint_detector_config": {"model_type": "superpoint", **_SUPERPOINT}}
#: A detector, and models that match its keypoints.
KEYPOINTS = {
    "superpoint": _SUPERPOINT,
    "superglue": {
        "gnn_layers_types": ["self", "cross"],
        "hidden_size": 32,
        "keypoint_encoder_sizes": [8, 16, 32],
        **_DETECTOR,
    },
    "lightglue": {"descriptor_dim": 32, **_DETECTOR},
}
