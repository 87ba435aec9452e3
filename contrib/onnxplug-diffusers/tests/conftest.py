"""Tiny pipelines with random weights. Without torchvision's compiled kernels, kernels of the checkout replace them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

with contextlib.suppress(ImportError):
    from tests.support.vision_kernels import define_vision_kernels

    define_vision_kernels()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def pipeline(tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a pipeline by the name of its kind."""
    return lambda kind: save_pipeline(tmp_path / kind, kind)


_CLIP = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 99,
    "pad_token_id": 1,
}
_UNET = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "sample_size": 16,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
}


def _encoder(kind: str, **settings: Any) -> Any:
    import transformers

    if kind == "t5":
        config: Any = transformers.T5Config(
            vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, is_encoder_decoder=False
        )
        return transformers.T5EncoderModel(config)
    return getattr(transformers, kind)(transformers.CLIPTextConfig(**_CLIP, **settings))


def models_of(kind: str) -> dict[str, Any]:
    """Models of diffusers and transformers by their names in the pipeline."""
    import diffusers

    vae = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        layers_per_block=1,
        use_quant_conv=kind != "flux",
        use_post_quant_conv=kind != "flux",
    )
    if kind == "stable-diffusion":
        return {"text_encoder": _encoder("CLIPTextModel"), "unet": diffusers.UNet2DConditionModel(**_UNET), "vae": vae}
    if kind == "latent-consistency":
        unet = diffusers.UNet2DConditionModel(**_UNET, time_cond_proj_dim=16)
        return {"text_encoder": _encoder("CLIPTextModel"), "unet": unet, "vae": vae}
    if kind in ("stable-diffusion-xl", "refiner"):
        settings = {
            **_UNET,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": (5 if kind == "refiner" else 6) * 8 + 24,
            "cross_attention_dim": 64,
            "transformer_layers_per_block": (1, 2),
            "use_linear_projection": True,
        }
        second = _encoder("CLIPTextModelWithProjection", projection_dim=24, hidden_act="gelu")
        unet = diffusers.UNet2DConditionModel(**settings)
        if kind == "refiner":
            return {"text_encoder_2": second, "unet": unet, "vae": vae}
        return {"text_encoder": _encoder("CLIPTextModel"), "text_encoder_2": second, "unet": unet, "vae": vae}
    if kind == "stable-diffusion-3":
        transformer: Any = diffusers.SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pooled_projection_dim=48,
            pos_embed_max_size=24,
        )
        encoders = {f"text_encoder{n}": _encoder("CLIPTextModelWithProjection", projection_dim=24) for n in ("", "_2")}
        return {**encoders, "text_encoder_3": _encoder("t5"), "transformer": transformer, "vae": vae}
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    return {
        "text_encoder": _encoder("CLIPTextModel"),
        "text_encoder_2": _encoder("t5"),
        "transformer": transformer,
        "vae": vae,
    }


CLASSES = {
    "stable-diffusion": "StableDiffusionPipeline",
    "latent-consistency": "LatentConsistencyModelPipeline",
    "stable-diffusion-xl": "StableDiffusionXLPipeline",
    "refiner": "StableDiffusionXLImg2ImgPipeline",
    "stable-diffusion-3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
}


def save_pipeline(folder: Path, kind: str) -> Path:
    """A folder as a pipeline's ``save_pretrained`` writes it, with the configuration of a tokenizer alone."""
    import diffusers

    index: dict[str, Any] = {"_class_name": CLASSES[kind], "_diffusers_version": diffusers.__version__}
    for name, model in models_of(kind).items():
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases are constant as initialised
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        library = type(model).__module__.partition(".")[0]
        index[name] = [library, type(model).__name__]
    flow = kind in ("flux", "stable-diffusion-3")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler() if flow else diffusers.DDIMScheduler()
    scheduler.save_pretrained(folder / "scheduler")
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    index |= {"safety_checker": [None, None], "image_encoder": [None, None]}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    index["tokenizer"] = ["transformers", "CLIPTokenizer"]
    if kind == "refiner":
        index["requires_aesthetics_score"] = True
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
