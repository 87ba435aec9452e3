"""Small transformers of diffusers, and the description of a model of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.small import Small

#: Settings of the models whose classes have them.
COMMON: Mapping[str, Any] = {
    **dict.fromkeys(
        """num_layers num_single_layers num_single_dit_layers num_mmdit_layers num_refiner_layers mmdit_layers num_text_blocks
        num_visual_blocks n_layers n_refiner_layers depth dit_depth n_controlnet_blocks transformer_num_layers layers_per_block
        num_res_blocks num_enc_blocks num_dec_blocks num_hidden_layers""".split(),
        1,
    ),
    **dict.fromkeys("num_attention_heads n_heads num_heads dit_heads nheads num_cross_attention_heads".split(), 2),
    **dict.fromkeys("attention_head_dim head_dim cross_attention_head_dim".split(), 16),
    **dict.fromkeys("in_channels out_channels in_visual_dim out_visual_dim".split(), 4),
    **dict.fromkeys(
        """hidden_size dim model_dim dit_dim embed_dim token_dim joint_attention_dim pooled_projection_dim text_embed_dim text_dim
        caption_channels cross_attention_dim caption_projection_dim time_embed_dim freq_dim cap_feat_dim condition_dim in_text_dim
        in_text_dim2 time_dim text_in_dim context_in_dim timestep_embed_dim cross_attention_dim_t5 text_encoder_dim adaln_lora_dim
        time_proj_dim timestep_guidance_channels timestep_channels timestep_features_dim dit_text_dim""".split(),
        32,
    ),
    **dict.fromkeys("ffn_dim ff_dim intermediate_size ffn_hidden_size ff_inner_dim".split(), 48),
    **dict.fromkeys(
        "axes_dims_rope rope_axes_dim axes_dims axes_dim_rope axes_dim rope_dim_list rope_dim".split(), (4, 4, 8)
    ),
    **dict.fromkeys("norm_num_groups groups".split(), 8),
    "axes_lens": (64, 64, 64),
    "sample_size": 16,
    "multiple_of": 16,
    "block_out_channels": (16, 32),
}

PIXELS, _FILM, _FRAMES, PATCHES = (
    "hidden_states: batch 4 height width",
    "hidden_states: batch 4 frames height width",
    "hidden_states: batch frames 4 height width",
    "hidden_states: batch tokens 4",
)
STEP, TEXT = "timestep: batch < 1000", "encoder_hidden_states: batch text 32"
MASK, POOLED = "encoder_attention_mask: batch text mask", "pooled_projections: batch 32"
IDS = "img_ids: tokens 3; txt_ids: text 3"
_IDS_OF_4 = "img_ids: tokens 4; txt_ids: text 4"


def row(
    name: str, *inputs: str, sizes: Mapping[str, int] = {}, constants: Mapping[str, Any] = {}, **settings: Any
) -> tuple[str, Small]:
    """A model by its class name; films are small: attention is over all pixels, and four times the sizes are drawn."""
    if any("frames 4 height" in text or "frames height" in text for text in inputs):
        sizes = {"height": 4, "width": 6, **sizes}
    return name, Small(f"diffusers:{name}", "; ".join(inputs), settings, sizes, constants)


_WAN = {"rope_max_seq_len": 64}
TRANSFORMERS = dict(
    [
        row(
            "AceStepTransformer1DModel",
            "hidden_states: batch length 8",
            "context_latents: batch length 16",
            TEXT,
            "timestep: batch image; timestep_r: batch image",
            in_channels=24,
            audio_acoustic_hidden_dim=8,
            num_hidden_layers=2,
            num_key_value_heads=1,
        ),
        row("AuraFlowTransformer2DModel", PIXELS, TEXT, STEP, pos_embed_max_size=256),
        row("CogVideoXTransformer3DModel", _FRAMES, TEXT, STEP, use_rotary_positional_embeddings=True),
        row("ConsisIDTransformer3DModel", _FRAMES, TEXT, STEP, use_rotary_positional_embeddings=True),
        row("DiTTransformer2DModel", "hidden_states: batch 4 16 16", STEP, "class_labels: batch < 1000"),
        row(
            "HunyuanDiT2DModel",
            PIXELS,
            "timestep: batch image",
            "encoder_hidden_states: batch 7 32; text_embedding_mask: batch 7 mask",
            "encoder_hidden_states_t5: batch 5 32; text_embedding_mask_t5: batch 5 mask",
            "image_meta_size: batch 6; style: batch < 1",
            num_layers=2,
            text_len=7,
            text_len_t5=5,
            patch_size=2,
        ),
        row("LatteTransformer3DModel", "hidden_states: batch 4 4 16 16", TEXT, STEP, patch_size=2, video_length=4),
        row("PixArtTransformer2DModel", PIXELS, TEXT, STEP, out_channels=8),
        row(
            "PriorTransformer",
            "hidden_states: batch 32; proj_embedding: batch 32",
            STEP,
            "encoder_hidden_states: batch 7 32",
            embedding_dim=32,
            num_embeddings=7,
        ),
        row("SanaTransformer2DModel", PIXELS, TEXT, STEP, MASK),
        row(
            "StableAudioDiTModel",
            "hidden_states: batch 4 10",
            "timestep: batch image; global_hidden_states: batch 1 24",
            TEXT,
            "rotary_embedding: 2 11 8",
            num_key_value_attention_heads=1,
            global_states_input_dim=24,
            cross_attention_input_dim=32,
        ),
        row(
            "Transformer2DModel",
            "hidden_states: batch 32 height width",
            TEXT,
            in_channels=32,
            out_channels=32,
            cross_attention_dim=32,
            sample_size=None,
            caption_channels=None,
        ),
        row("AllegroTransformer3DModel", _FILM, TEXT, STEP, cross_attention_dim=32),
        row("AnyFlowTransformer3DModel", _FRAMES, TEXT, "timestep: batch frames; r_timestep: batch frames", **_WAN),
        row(
            "BriaTransformer2DModel",
            PATCHES,
            TEXT,
            "timestep: batch",
            IDS,
            guidance_embeds=False,
        ),
        row(
            "ChromaTransformer2DModel",
            PATCHES,
            TEXT,
            "timestep: batch image",
            IDS,
            approximator_num_channels=8,
            approximator_hidden_dim=32,
        ),
        row("ChronoEditTransformer3DModel", _FILM, TEXT, STEP, rope_temporal_skip_len=2, **_WAN),
        row(
            "CogView3PlusTransformer2DModel",
            PIXELS,
            TEXT,
            STEP,
            "original_size: batch 2; target_size: batch 2; crop_coords: batch 2",
            pos_embed_max_size=16,
        ),
        row(
            "CogView4Transformer2DModel",
            PIXELS,
            TEXT,
            STEP,
            "original_size: batch 2; target_size: batch 2; crop_coords: batch 2",
            rope_axes_dim=(16, 16),
        ),
        row(
            "CosmosTransformer3DModel",
            "hidden_states: 1 4 frames height width; padding_mask: 1 1 height width",
            "timestep: 1; encoder_hidden_states: 1 text 32",
            max_size=(8, 32, 32),
        ),
        row(
            "EasyAnimateTransformer3DModel",
            _FILM,
            TEXT,
            STEP,
            patch_size=2,
            attention_head_dim=16,
        ),
        row(
            "ErnieImageTransformer2DModel",
            PIXELS,
            STEP,
            "text_bth: batch text 32; text_lens: batch < 7",
        ),
        row("FluxTransformer2DModel", PATCHES, TEXT, POOLED, "timestep: batch image", IDS),
        row(
            "Flux2Transformer2DModel",
            PATCHES,
            TEXT,
            "timestep: batch image; guidance: batch image",
            _IDS_OF_4,
            axes_dims_rope=(4, 4, 4, 4),
        ),
        row(
            "Flux3Transformer2DModel",
            PATCHES,
            TEXT,
            "timestep: batch image",
            _IDS_OF_4,
            axes_dims_rope=(4, 4, 4, 4),
        ),
        row(
            "GlmImageTransformer2DModel",
            "hidden_states: batch 4 16 24",
            TEXT,
            "prior_token_id: batch 96 < 99; timestep: batch < 1000",
            "target_size: batch 2; crop_coords: batch 2; prior_token_drop: batch 96 flags",
            prior_vq_quantizer_codebook_size=99,
        ),
        row("HeliosTransformer3DModel", _FILM, TEXT, STEP),
        row(
            "HiDreamImageTransformer2DModel",
            "hidden_states: batch 4 16 24; timesteps: batch < 1000; encoder_hidden_states_t5: batch text 32",
            "encoder_hidden_states_llama3: 2 batch text 32; pooled_embeds: batch 16",
            patch_size=2,
            caption_channels=[32, 32],
            text_emb_dim=16,
            llama_layers=(0, 1),
            force_inference_output=True,
        ),
        row("HunyuanVideoTransformer3DModel", _FILM, TEXT, STEP, MASK, POOLED, "guidance: batch"),
        row(
            "HunyuanVideo15Transformer3DModel",
            _FILM,
            TEXT,
            "timestep: batch image",
            MASK,
            "encoder_hidden_states_2: batch 5 32; encoder_attention_mask_2: batch 5 mask; image_embeds: batch 6 32",
            text_embed_2_dim=32,
            image_embed_dim=32,
        ),
        row(
            "HunyuanImageTransformer2DModel",
            PIXELS,
            TEXT,
            "timestep: batch image",
            MASK,
            rope_axes_dim=(8, 8),
        ),
        row(
            "Ideogram4Transformer2DModel",
            "hidden_states: batch length 4; timestep: batch image; encoder_hidden_states: batch length 32",
            "position_ids: batch length 3 < 9; segment_ids: batch length < 2; indicator: batch length < 4",
            adaln_dim=32,
            llm_features_dim=32,
            mrope_section=(4, 2, 2),
        ),
        row("JoyImageEditTransformer3DModel", _FILM, TEXT, STEP),
        row(
            "Kandinsky5Transformer3DModel",
            "hidden_states: batch 2 8 12 4",
            TEXT,
            POOLED,
            "timestep: batch; text_rope_pos: text < 7",
            constants={"visual_rope_pos": [[0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]},
        ),
        row(
            "Krea2Transformer2DModel",
            "hidden_states: batch 12 4; encoder_hidden_states: batch 7 2 32; timestep: batch image; position_ids: 19 3 < 9",
            num_key_value_heads=1,
            text_hidden_dim=32,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=48,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
        ),
        row(
            "LongCatAudioDiTTransformer",
            "hidden_states: batch length 8; encoder_attention_mask: batch text mask; timestep: batch image",
            TEXT,
            latent_dim=8,
        ),
        row(
            "LongCatImageTransformer2DModel",
            PATCHES,
            TEXT,
            "timestep: batch image",
            IDS,
        ),
        row(
            "LTXVideoTransformer3DModel",
            PATCHES,
            TEXT,
            STEP,
            MASK,
            "video_coords: batch 3 tokens image",
        ),
        row(
            "LTX2VideoTransformer3DModel",
            PATCHES,
            TEXT,
            "audio_hidden_states: batch length 4; audio_encoder_hidden_states: batch text 32; timestep: batch tokens < 1000",
            "audio_timestep: batch length < 1000",
            MASK,
            "audio_encoder_attention_mask: batch text mask",
            "video_coords: batch 3 tokens 2 image; audio_coords: batch 1 length 2 image",
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=2,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=16,
        ),
        row(
            "Lumina2Transformer2DModel",
            PIXELS,
            TEXT,
            "timestep: batch image",
            MASK,
            num_kv_heads=1,
        ),
        row(
            "MiniMaxMusic3Transformer1DModel",
            "hidden_states: batch 4 length; timestep: batch image; encoder_hidden_states: batch length 32",
            rotary_dim=8,
            fourier_embedding_dim=16,
        ),
        row("MiniMaxMusic3RVQDepthDecoder", "inputs_embeds: batch length 32", audio_vocab_size=99, num_codebooks=2),
        row("MochiTransformer3DModel", _FILM, TEXT, STEP, MASK),
        row("MotifVideoTransformer3DModel", _FILM, TEXT, STEP, MASK),
        row(
            "NucleusMoEImageTransformer2DModel",
            "hidden_states: batch 12 4",
            TEXT,
            "timestep: batch image",
            constants={"img_shapes": [(1, 3, 4)]},
            num_experts=4,
            moe_intermediate_dim=16,
            out_channels=1,
        ),
        row(
            "OmniGenTransformer2DModel",
            "hidden_states: batch 4 16 24; timestep: batch image; input_ids: batch 7 < 99",
            "attention_mask: batch 104 104 < 2; position_ids: batch 104 < 9",
            constants={"input_img_latents": [], "input_image_sizes": {}},
            vocab_size=99,
            pad_token_id=0,
            num_key_value_heads=1,
            pos_embed_max_size=24,
            rope_scaling={"long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "type": "su"},
        ),
        row("OvisImageTransformer2DModel", PATCHES, TEXT, "timestep: batch image", IDS),
        row("PRXTransformer2DModel", PIXELS, TEXT, "timestep: batch image", axes_dim=(8, 8)),
        row(
            "QwenImageTransformer2DModel",
            "hidden_states: batch 12 4",
            TEXT,
            "encoder_hidden_states_mask: batch text mask; timestep: batch image",
            constants={"img_shapes": [[(1, 3, 4)]]},
            out_channels=1,
        ),
        row("SanaVideoTransformer3DModel", _FILM, TEXT, STEP, **_WAN),
        row(
            "SD3Transformer2DModel",
            PIXELS,
            TEXT,
            POOLED,
            STEP,
            pos_embed_max_size=24,
        ),
        row("SkyReelsV2Transformer3DModel", _FILM, TEXT, STEP, **_WAN),
        row(
            "StableAudio3DiTModel",
            "hidden_states: batch 8 length; timestep: batch image; global_hidden_states: batch 32",
            TEXT,
            io_channels=8,
            cond_token_dim=32,
            global_cond_dim=32,
            num_memory_tokens=4,
        ),
        row(
            "TransformerTemporalModel",
            "hidden_states: 4 32 height width",
            constants={"num_frames": 2},
            in_channels=32,
            out_channels=32,
            sample_size=None,
        ),
        row("WanTransformer3DModel", _FILM, TEXT, STEP, **_WAN),
        row(
            "WanVACETransformer3DModel",
            _FILM,
            TEXT,
            STEP,
            "control_hidden_states: batch 6 frames height width; control_hidden_states_scale: 1",
            vace_layers=[0],
            vace_in_channels=6,
            **_WAN,
        ),
    ]
)
