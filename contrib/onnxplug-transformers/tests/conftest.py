"""Small models of transformers with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

_STD = 0.15  # of weights: at this width layers keep their signal, and attention is far from uniform
_LLAMA = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": _STD,
}
_PLAIN = {"vocab_size": 100, "hidden_size": 64, "initializer_range": _STD, "tie_word_embeddings": False}
_OF_GPTJ = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "initializer_range": _STD}
#: Settings of models without attention, and of models with state spaces or linear attention beside it.
_MAMBA = {
    "vocab_size": 100,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "initializer_range": _STD,
    "tie_word_embeddings": False,
}
_OF_HEADS = {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 4}
_STATES = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_LIMITS = {"time_step_min": 0.05, "time_step_max": 0.1}  # half of the steps are below the limit
_HYBRID = {**_LLAMA, "max_position_embeddings": 128, "tie_word_embeddings": False}
_DELTA_RULE = {
    **_HYBRID,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}),
    "stablelm": (
        "StableLmForCausalLM",
        "StableLmConfig",
        {**_LLAMA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_LLAMA, "tie_word_embeddings": False}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_LLAMA, "new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {**_PLAIN, "n_layer": 2, "n_head": 4, "seq_length": 64},
    ),
    "falcon_alibi": ("FalconForCausalLM", "FalconConfig", {**_LLAMA, "alibi": True, "tie_word_embeddings": False}),
    "falcon_alibi_heads": (  # slopes that bfloat16 rounds
        "FalconForCausalLM",
        "FalconConfig",
        {**_LLAMA, "hidden_size": 128, "num_attention_heads": 16, "alibi": True, "tie_word_embeddings": False},
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": 100,
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 64,
            "tie_word_embeddings": False,
        },
    ),
    "mpt_long": (
        "MptForCausalLM",
        "MptConfig",
        {
            "vocab_size": 100,
            "d_model": 128,
            "n_layers": 2,
            "n_heads": 16,
            "max_seq_len": 2048,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
        },
    ),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**_OF_GPTJ, "vocab_size": 100}),
    "codegen": ("CodeGenForCausalLM", "CodeGenConfig", {**_OF_GPTJ, "vocab_size": 100}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **_PLAIN,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    "doge": (
        "DogeForCausalLM",
        "DogeConfig",
        {**_LLAMA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "olmoe_with_a_window": (  # which its attention gets, and its mask does not
        "OlmoeForCausalLM",
        "OlmoeConfig",
        {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {**_LLAMA, "kv_channels": 16, "num_experts_per_tok": 2, "num_local_experts": 4},
    ),
    "gpt_neo_windows": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            **_PLAIN,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
            "max_position_embeddings": 64,
        },
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 100,
            "hidden_size": 64,
            "ffn_dim": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 64,
            "init_std": _STD,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_LLAMA, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "phi3_long": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {
            **_LLAMA,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "original_max_position_embeddings": 24,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 24,
                "short_factor": [1.0 + 0.1 * i for i in range(8)],
                "long_factor": [4.0 - 0.3 * i for i in range(8)],
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_LLAMA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 100,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "initializer_range": _STD,
            "tie_word_embeddings": False,
        },
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 6}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {
            **_LLAMA,
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_LLAMA, "head_dim": 16, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_LLAMA, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3_windows": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**_LLAMA, "head_dim": 16, "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_LLAMA,
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 24,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "tie_word_embeddings": False,
        },
    ),
    "mamba": ("MambaForCausalLM", "MambaConfig", {**_MAMBA, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMambaForCausalLM", "FalconMambaConfig", {**_MAMBA, "time_step_rank": 4}),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", {**_MAMBA, **_OF_HEADS}),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            **_HYBRID,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
        },
    ),
    "zamba": (
        "ZambaForCausalLM",
        "ZambaConfig",
        {**_HYBRID, "mamba_d_state": 8, "mamba_dt_rank": 4, "layers_block_type": ["linear_attention", "hybrid"]},
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **_HYBRID,
            **_LIMITS,
            "layers_block_type": ["linear_attention", "hybrid"],
            "n_mamba_heads": 8,
            "mamba_d_state": 8,
            "mamba_ngroups": 2,
            "chunk_size": 4,
            "num_mem_blocks": 1,
        },
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **_HYBRID,
            **_LIMITS,
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "num_hidden_layers": 3,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "head_dim": 8,
        },
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", {**_HYBRID, **_STATES, "attn_layer_indices": [1]}),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {
            **_HYBRID,
            **_STATES,
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "falcon_h1": ("FalconH1ForCausalLM", "FalconH1Config", {**_HYBRID, **_STATES, "mamba_d_ssm": 128}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {**_DELTA_RULE, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DELTA_RULE),
    "olmo_hybrid": (
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        {**_DELTA_RULE, "linear_num_key_heads": 4, "pad_token_id": 0},
    ),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            **_DELTA_RULE,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "qk_head_dim": 16,
            "v_head_dim": 8,
            "head_dim": 8,
            "topk_group": 1,
            "num_expert_group": 1,
            "mlp_layer_types": ["dense", "sparse"],
            "linear_num_heads": 4,
            "pad_token_id": 0,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {**_HYBRID, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        "Lfm2MoeConfig",
        {**_HYBRID, **_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": 100,
            "tie_word_embeddings": False,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 64,
            "init_std": _STD,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 100,
            "tie_word_embeddings": False,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 16,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 100,
            "tie_word_embeddings": False,
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 1,
            "decoder_start_token_id": 2,
            "init_std": _STD,
        },
    ),
}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def decoder() -> Callable[[str], nn.Module]:
    """A model by its name, the same weights on every call."""
    import transformers

    def build(name: str) -> nn.Module:
        model, config, settings = _MODELS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings, use_cache=True))
            with torch.no_grad():
                for parameter in made.parameters():
                    if (
                        parameter.numel() == 1 or parameter.std() < 1e-3
                    ):  # constant as initialised: unit norms, zero biases
                        parameter.add_(0.1 * torch.randn_like(parameter))
        return made.eval()

    return build


@pytest.fixture(scope="session")
def with_images() -> Callable[[str], Any]:
    """A small model of images and text by its kind: token 110 is an image's, and text never ends."""
    return model_with_images


def model_with_images(kind: str) -> Any:
    import transformers

    text = {
        **_LLAMA,
        "vocab_size": 120,
        "hidden_size": 64,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    if kind.startswith("qwen"):
        vision = {"depth": 3, "num_heads": 4, "patch_size": 4, "hidden_size": 32, "initializer_range": _STD}
        of_kind = {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": 64}
        if kind == "qwen2_5_vl":
            of_kind = {"intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
        rotary = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
        config, name = {"qwen2_vl": ("Qwen2VLConfig", "Qwen2VL"), "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VL")}[
            kind
        ]
        made = getattr(transformers, f"{name}ForConditionalGeneration")(
            getattr(transformers, config)(
                text_config={**text, **ends, "rope_parameters": rotary},
                vision_config={**vision, **of_kind},
                image_token_id=110,
                video_token_id=111,
                vision_start_token_id=112,
                vision_end_token_id=113,
                tie_word_embeddings=False,
            )
        )
    elif kind == "gemma3":  # windows are shorter than prompts
        windows = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.Gemma3Config(
            text_config={**text, **ends, **windows, "num_hidden_layers": 3, "head_dim": 16},
            vision_config={**vision, "image_size": 32, "patch_size": 8, "vision_use_head": False},
            mm_tokens_per_image=4,
            image_token_index=110,
            boi_token_index=111,
            eoi_token_index=112,
            tie_word_embeddings=False,
        )
        made = transformers.Gemma3ForConditionalGeneration(config)
        nn.init.normal_(made.model.multi_modal_projector.mm_input_projection_weight, 0, 0.5)
    else:
        vision = {**_LLAMA, "image_size": 32, "patch_size": 4, "hidden_size": 32}
        name = {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}[kind]
        config = getattr(transformers, f"{name}Config")(
            text_config={"model_type": "llama", **text, **ends},
            vision_config=vision,
            image_token_id=110,
            scale_factor=4,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
        made = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        made.lm_head.weight[:3] = 0  # never among the best
    made.generation_config.pad_token_id, made.generation_config.eos_token_id = 0, 1
    return made.eval()


@pytest.fixture
def saved(decoder: Callable[[str], nn.Module], tmp_path: Path) -> Callable[[str], Path]:
    """A folder of ``save_pretrained`` by the model's name: weights, settings of generation and a tokenizer."""

    def save(name: str) -> Path:
        model, folder = decoder(name), tmp_path / name
        settings: Any = model.generation_config
        settings.bos_token_id, settings.eos_token_id, settings.pad_token_id = 1, 2, 0
        head: Any = model.get_output_embeddings()
        with torch.no_grad():
            for key, parameter in model.named_parameters() if model.config.is_encoder_decoder else ():
                if parameter.dim() > 1:  # states that embeddings outweigh would give one token alone
                    parameter.mul_(0.3 if "embed" in key or "shared" in key else 3.0)
            head.weight[:3] = 0  # never among the best: a text goes on until it has all its tokens
        model.save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports a folder by `onnxplug export` with some options, once for several tests; returns the new folder."""
    from onnxplug.cli.app import run

    made: dict[tuple[str, ...], Path] = {}

    def export(folder: Path, *options: str) -> Path:
        key = (folder.name, *options)
        if key not in made:
            output = tmp_path_factory.mktemp("exported") / "onnx"
            assert run(["export", f"transformers:{folder}", "-o", str(output), *options]) == 0
            made[key] = output
        return made[key]

    return export


@pytest.fixture
def save_adapter() -> Callable[..., Path]:
    """Writes the folder of an adapter as PEFT does: random factors of the layers whose names have given endings."""
    return write_adapter


@pytest.fixture
def with_adapter() -> Callable[[Any, Path], Any]:
    """Adds an adapter's products to the weights of a model, as in LoRA's paper: alpha / r * B A."""
    return add_adapter


def write_adapter(model: Any, folder: Path, layers: tuple[str, ...], rank: int = 4, **settings: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors, ranks = {}, settings.get("rank_pattern", {})
    for name, module in model.named_modules():
        if name.endswith(layers):
            width, result = module.weight.shape[:: 1 if type(module).__name__ == "Conv1D" else -1]
            r = next((value for key, value in ranks.items() if name.endswith(key)), rank)
            tensors[f"base_model.model.{name}.lora_A.weight"] = 0.25 * torch.randn(r, width)
            tensors[f"base_model.model.{name}.lora_B.weight"] = 0.25 * torch.randn(result, r)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "bias": "none", "target_modules": list(layers)}
    (folder / "adapter_config.json").write_text(json.dumps({**about, **settings}))
    return folder


def add_adapter(model: Any, folder: Path) -> Any:
    from safetensors.torch import load_file

    about = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for key, a in tensors.items():
        layer, found, _ = key.removeprefix("base_model.model.").partition(".lora_A.weight")
        if found:
            b = tensors[f"base_model.model.{layer}.lora_B.weight"]
            alphas = about.get("alpha_pattern", {}).items()
            alpha = next((value for name, value in alphas if layer.endswith(name)), about["lora_alpha"])
            scale = alpha / (len(a) ** 0.5 if about.get("use_rslora") else len(a))
            module = model.get_submodule(layer)
            with torch.no_grad():
                module.weight.add_(scale * ((b @ a).T if type(module).__name__ == "Conv1D" else b @ a))
    return model


@pytest.fixture
def restore() -> Callable[[Any, Path], None]:
    """Gives a model of transformers the weights of few bits that a file has."""
    return restore_weights


def restore_weights(model: Any, path: Path) -> None:
    import numpy as np
    import onnx_ir as ir

    stored = {str(name): value.const_value.numpy() for name, value in ir.load(path).graph.initializers.items()}
    modules = dict(model.named_modules())
    for name in [name.removesuffix(".levels") for name in stored if name.endswith(".levels")]:
        owner, _, last = name.rpartition(".")
        parts = ["q_proj", "k_proj", "v_proj"] if last == "q_proj_k_proj_v_proj" else [last]
        layers = [modules[f"{owner}.{part}".strip(".")] for part in parts]
        levels, scales = stored[f"{name}.levels"], stored[f"{name}.scales"].astype("f4")
        if levels.shape[1] * levels.shape[2] >= layers[0].weight.shape[1]:  # a byte each
            steps = levels.astype("f4") - 128
        else:
            zeros = stored.get(f"{name}.zeros", np.full((len(scales), (scales.shape[1] + 1) // 2), 0x88, "u1"))
            middles = np.stack([zeros & 15, zeros >> 4], -1).reshape(len(scales), -1)[:, : scales.shape[1]]
            numbers = np.stack([levels & 15, levels >> 4], -1).reshape(*levels.shape[:2], -1)
            steps = numbers.astype("f4") - middles[..., None].astype("f4")
        weight = torch.from_numpy((steps * scales[..., None]).reshape(len(scales), -1))
        with torch.no_grad():
            for layer, part in zip(layers, weight.split([len(layer.weight) for layer in layers]), strict=True):
                layer.weight.copy_(part[:, : layer.weight.shape[1]])


@pytest.fixture
def save_tokenizer() -> Callable[[Path], None]:
    """Saves a tokenizer into a folder."""
    return write_tokenizer


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes for the 100 tokens that the models know: printable ASCII and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]  # the names of bytes in the tokenizer; a blank is "\u0120"
    words = ["<pad>", "<s>", "</s>", "\u0120", *letters]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
