"""Encoders of images packed in one row of patches: any number of images, of any sizes, which are an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

_SIZES = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "intermediate_size": 48,
    "out_hidden_size": 40,
    "initializer_range": 0.15,
}
#: Module, configuration, encoder, and settings.
_ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2_vl": (
        "Qwen2VLVisionConfig",
        "Qwen2VisionTransformerPretrainedModel",
        {"embed_dim": 32, "hidden_size": 40, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLVisionConfig",
        "Qwen2_5_VisionTransformerPretrainedModel",
        {"window_size": 24, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        "Qwen3VLVisionConfig",
        "Qwen3VLVisionModel",
        {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    ),
    "glm4v": ("Glm4vVisionConfig", "Glm4vVisionModel", {"image_size": 32}),
}


class Encoder(nn.Module):
    """The states that the text model reads."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.encoder(pixel_values, grid_thw=image_grid_thw).pooler_output
        return states


def made(kind: str, attention: str) -> Encoder:
    from importlib import import_module

    config, name, settings = _ENCODERS[kind]
    place = f"transformers.models.{kind}"
    about = getattr(import_module(f"{place}.configuration_{kind}"), config)(**{**_SIZES, **settings})
    about._attn_implementation = attention
    encoder = getattr(import_module(f"{place}.modeling_{kind}"), name)._from_config(about)
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.numel() == 1 or parameter.std() < 1e-3:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return Encoder(encoder).eval()


def images(*grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = torch.tensor(grid)
    return torch.randn(int(sizes.prod(-1).sum()), 96), sizes


@pytest.mark.parametrize(
    ("kind", "attention"),
    [
        ("qwen2_vl", "sdpa"),
        ("qwen2_5_vl", "sdpa"),
        pytest.param("qwen2_5_vl", "eager", marks=pytest.mark.long),
        ("qwen3_vl", "sdpa"),
        pytest.param("glm4v", "sdpa", marks=pytest.mark.long),
    ],
)
@pytest.mark.long
def test_images_of_any_size(kind: str, attention: str) -> None:
    model = made(kind, attention)
    example = images((1, 8, 12), (1, 4, 6))
    dynamic = {"pixel_values": {0: "4 * cells"}, "image_grid_thw": {0: "images"}}
    program = onnxplug.to_onnx(model, example, dynamic_shapes=dynamic)
    frames = 1 if kind == "glm4v" else 2  # transformers' own fails on several frames there
    for case in (example, images((1, 6, 10)), images((1, 2, 2), (frames, 4, 18), (1, 14, 6))):
        with torch.no_grad():
            expected = model(*case)
            alone = torch.cat(
                [model(x, g[None]) for x, g in zip(case[0].split(case[1].prod(-1).tolist()), case[1], strict=True)]
            )
        torch.testing.assert_close(alone, expected)  # images do not see one another
        (states,) = program(*case)
        torch.testing.assert_close(states, expected)


@pytest.mark.parametrize(
    "kind", ["qwen2_vl", *[pytest.param(k, marks=pytest.mark.long) for k in ("qwen2_5_vl", "glm4v")]]
)
def test_sizes_that_transformers_refuses(kind: str) -> None:
    """More and fewer patches than the sizes say, and rows and columns that squares don't divide."""
    model = made(kind, "sdpa")
    dynamic = {"pixel_values": {0: "4 * cells"}, "image_grid_thw": {0: "images"}}
    program = onnxplug.to_onnx(model, images((1, 8, 12), (1, 4, 6)), dynamic_shapes=dynamic)
    patches, sizes = images((1, 4, 6))
    for case in (
        (patches[:16], sizes),
        (torch.cat([patches, patches]), sizes),
        images((1, 3, 4)),
        images((1, 4, 5), (1, 2, 2)),
        images((1, 3, 4), (1, 2, 6)),
    ):
        with pytest.raises((RuntimeError, IndexError)), torch.no_grad():
            model(*case)
        with pytest.raises(Exception, match=r"out of data bounds|out of bounds"):
            program(*case)


_FURTHER: dict[str, Any] = {
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
_CONVOLVED = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_key_value_heads": 2,
}
_WINDOWED = {"num_hidden_layers": 3, "layer_types": ["window_attention", "full_attention", "window_attention"]}
#: Configuration, encoder, settings, the shape of a row of the input, and how many frames the images of a call have, by image.
_PARTS_OF_THEIR_OWN: dict[str, tuple[str, str, dict[str, Any], tuple[int, ...], list[tuple[int, ...]]]] = {
    "kimi_k25": (
        "Kimi_K25VisionConfig",
        "Kimi_K25VisionModel",
        {"num_hidden_layers": 2},
        (3, 4, 4),
        [(1, 1), (1,), (3, 3, 3), (2,), (1, 1, 1)],
    ),
    "lfm3_vl": (
        "Lfm3VlVisionConfig",
        "Lfm3VlVisionModel",
        _CONVOLVED,
        (96,),
        [(1, 1), (1,), (3, 1, 2), (2,), (1, 1, 1)],
    ),
    **{
        f"muse_{name.lower()}": (
            f"Muse{name}VisionConfig",
            f"Muse{name}VisionModel",
            _WINDOWED,
            (96,),
            [(1, 1), (1,), (3, 1, 2), (2,), (1, 1, 1)],
        )
        for name in ("Spark", "Glimmer")
    },
    "inkling2": (
        "Inkling2VisionConfig",
        "Inkling2VisionModel",
        {"num_hidden_layers": 2, "posemb_grid_size": 6, "projection_hidden_dim": 40, "text_hidden_size": 24},
        (8, 8, 3),
        [(1, 1), (1,), (3, 1, 2), (2,), (1, 1, 1)],
    ),
}


def outputs(encoder: Any, rows: torch.Tensor, sizes: torch.Tensor) -> list[torch.Tensor]:
    states = encoder(rows, sizes)
    return [states[name] for name in ("last_hidden_state", "pooler_output") if states.get(name) is not None]


@pytest.mark.parametrize("kind", _PARTS_OF_THEIR_OWN)
@pytest.mark.long
def test_encoders_with_parts_of_their_own(kind: str) -> None:
    """Their own loops over the images: frames that are pooled, convolutions, blocks of patches, a class token for each image."""
    from importlib import import_module

    config, name, settings, shape, frames = _PARTS_OF_THEIR_OWN[kind]
    place = f"transformers.models.{kind}"
    about = getattr(import_module(f"{place}.configuration_{kind}"), config)(**{**_FURTHER, **settings})
    encoder = getattr(import_module(f"{place}.modeling_{kind}"), name)._from_config(about)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 1 else 0.2))
    encoder.eval()
    grids = ([(8, 12), (4, 6)], [(6, 10)], [(2, 2), (4, 18), (14, 6)], [(2, 8)], [(4, 4), (4, 4), (10, 2)])
    cases = []
    for grid, counts in zip(grids, frames, strict=True):
        sizes = torch.tensor([(count, *sides) for count, sides in zip(counts, grid, strict=True)])
        cases.append((torch.randn(int(sizes.prod(-1).sum()), *shape), sizes))
    rows = "tokens" if kind == "inkling2" else "4 * cells"  # Inkling 2 has the pixels of a token together
    program = onnxplug.to_onnx(encoder, cases[0], dynamic_shapes=({0: rows}, {0: "images"}))
    for case in cases:
        with torch.no_grad():
            expected = outputs(encoder, *case)
            each = [
                outputs(encoder, *one)
                for one in zip(case[0].split(case[1].prod(-1).tolist()), case[1][:, None], strict=True)
            ]
        found = program(*case)
        for computed, together, *alone in zip(found, expected, *each, strict=True):
            torch.testing.assert_close(torch.cat(alone), together)  # images do not see one another
            torch.testing.assert_close(computed, together)
    if kind == "kimi_k25":
        mixed = torch.randn(36, *shape), torch.tensor([[2, 2, 6], [1, 6, 2]])
        if hasattr(encoder, "temporal_merge"):  # transformers 5.24 takes images of different numbers of frames
            torch.testing.assert_close(program(*mixed), outputs(encoder, *mixed))
            return
        for call in (encoder, program):  # before, transformers joined the images' indices
            with pytest.raises(Exception, match=r"Sizes of tensors must match|out of data bounds|out of bounds"):
                call(*mixed)


def test_squares_of_each_image() -> None:
    """VideoLLaMA 3 averages squares of patches, whose side each image has of its own."""
    from transformers.models.video_llama_3 import configuration_video_llama_3, modeling_video_llama_3

    about = configuration_video_llama_3.VideoLlama3VisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=4
    )
    torch.manual_seed(3)
    encoder = modeling_video_llama_3.VideoLlama3VisionModel._from_config(about).eval()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 1 else 0.2))
    cases = []
    for grid, sides in (
        ([(1, 8, 12), (2, 4, 6)], [2, 1]),
        ([(1, 6, 9)], [3]),
        ([(1, 4, 8), (3, 2, 6), (1, 3, 5), (1, 9, 6)], [4, 2, 1, 3]),
    ):
        rows, sizes = images(*grid)
        cases.append((rows[:, :48], sizes, torch.tensor(sides)))
    program = onnxplug.to_onnx(encoder, cases[0], dynamic_shapes=({0: "patches"}, {0: "images"}, {0: "images"}))
    for case in cases:
        with torch.no_grad():
            torch.testing.assert_close(program(*case)[0], encoder(*case).last_hidden_state)
    refused = torch.randn(12, 48), torch.tensor([[1, 3, 4]]), torch.tensor([2])
    for call in (encoder, program):
        with pytest.raises(Exception, match=r"is invalid|out of data bounds|out of bounds"):
            call(*refused)


class Joined(nn.Module):
    """The tokens of all images of a strip."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, target_sizes: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.model.get_image_features(pixel_values, target_sizes).pooler_output)


@pytest.mark.parametrize("mode", ["16x", pytest.param("4x", marks=pytest.mark.long)])
def test_images_in_a_strip(mode: str) -> None:
    """MiniCPM-V's patches lie beside one another; windows of them become one token, twice or more."""
    from transformers.models.minicpmv4_6 import configuration_minicpmv4_6, modeling_minicpmv4_6

    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 24,
        "patch_size": 4,
    }
    text = {"model_type": "qwen3", "vocab_size": 99, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 1}
    config = configuration_minicpmv4_6.MiniCPMV4_6Config(
        vision_config=vision, text_config=text, insert_layer_id=0, downsample_mode=mode, merger_times=2
    )
    torch.manual_seed(4)
    model = Joined(modeling_minicpmv4_6.MiniCPMV4_6Model._from_config(config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 1 else 0.2))
    cases = []
    for sizes in ([(8, 16), (16, 8)], [(8, 8)], [(16, 16), (8, 24), (8, 8)]):
        target_sizes = torch.tensor(sizes)
        cases.append((torch.randn(1, 3, 4, 4 * int(target_sizes.prod(-1).sum())), target_sizes))
    program = onnxplug.to_onnx(model, cases[0], dynamic_shapes=({3: "4 * patches"}, {0: "images"}))
    for case in cases:
        with torch.no_grad():
            torch.testing.assert_close(program(*case)[0], model(*case))
    refused = torch.randn(1, 3, 4, 4 * 64), torch.tensor([[2, 32]])
    for call in (model, program):
        with pytest.raises(Exception, match=r"must be divisible|is invalid|out of data bounds|out of bounds"):
            call(*refused)


class Merged(nn.Module):
    """States of images or of videos, two frames of which ERNIE 4.5 VL puts together."""

    def __init__(self, model: Any, *, of_videos: bool) -> None:
        super().__init__()
        self.model, self.of_videos = model, of_videos

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        made = self.model.get_video_features if self.of_videos else self.model.get_image_features
        return torch.cat(made(pixel_values, image_grid_thw).pooler_output)


@pytest.mark.parametrize("of_videos", [False, True])
@pytest.mark.long
def test_two_frames_put_together(of_videos: bool) -> None:
    from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as ernie

    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "intermediate_size": 48}
    text = {"vocab_size": 99, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 1, "moe_num_experts": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": [16, 8], "moe_k": 1}
    places = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 1]}
    config = ernie.Ernie4_5_VLMoeConfig(vision_config=vision, text_config={**text, **heads, "rope_parameters": places})
    torch.manual_seed(2)
    inner = ernie.Ernie4_5_VLMoeModel._from_config(config)
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 1 else 0.2))
    model = Merged(inner, of_videos=of_videos).eval()
    frames = [(2, 4), (6,), (2, 8, 2), (3, 2)] if of_videos else [(1, 1), (1,), (1, 1, 1), (1, 1)]
    grids = ([(8, 12), (4, 6)], [(6, 10)], [(2, 2), (4, 18), (14, 6)], [(2, 2), (4, 4)])
    cases = []
    for grid, counts in zip(grids, frames, strict=True):
        sizes = torch.tensor([(count, *sides) for count, sides in zip(counts, grid, strict=True)])
        cases.append((torch.randn(int(sizes.prod(-1).sum()), 48), sizes))
    program = onnxplug.to_onnx(model, cases[0], dynamic_shapes=({0: "4 * cells"}, {0: "images"}))
    for case in cases:
        with torch.no_grad():
            torch.testing.assert_close(program(*case)[0], model(*case))


class States(nn.Module):
    """The states of an encoder whose patches have an axis for the batch before them, as in PaddleOCR-VL."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.encoder(pixel_values[None], grid_thw=image_grid_thw).last_hidden_state
        return states


@pytest.mark.long
def test_patches_after_a_batch() -> None:
    from transformers.models.paddleocr_vl import configuration_paddleocr_vl, modeling_paddleocr_vl

    about = configuration_paddleocr_vl.PaddleOCRVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=4,
        initializer_range=0.15,
    )
    encoder = modeling_paddleocr_vl.PaddleOCRVisionModel._from_config(about)
    model = States(encoder).eval()
    cases = []
    for grid in ([(1, 4, 6), (1, 4, 4)], [(1, 6, 4), (1, 2, 8)]):
        sizes = torch.tensor(grid)
        cases.append((torch.randn(int(sizes.prod(-1).sum()), 3, 4, 4), sizes))
    program = onnxplug.to_onnx(model, cases[0], dynamic_shapes=({0: "patches"}, None))
    for case in cases:
        (states,) = program(*case)
        with torch.no_grad():
            torch.testing.assert_close(states, model(*case))


class Read(nn.Module):
    """The states that the text model reads, of all images together or of each image."""

    def __init__(self, model: Any, *, of_each: bool) -> None:
        super().__init__()
        self.model, self.of_each = model, of_each

    def forward(self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> torch.Tensor:
        states = self.model.get_image_features(pixel_values, image_grid_thw).pooler_output
        return torch.stack([one.sum(0) for one in states]) if self.of_each else torch.cat(states)


@pytest.mark.long
@pytest.mark.parametrize("of_each", [False, True])
def test_states_of_any_number_of_images(of_each: bool) -> None:
    """States are split and joined; a model that reads each image's states is refused: it would fix their number."""
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    _, _, settings = _ENCODERS["qwen2_vl"]
    text = {"hidden_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = modeling_qwen2_vl.Qwen2VLConfig(
        vision_config={**_SIZES, **settings, "depth": 1},
        text_config={**text, "vocab_size": 99, "intermediate_size": 48},
    )
    model = Read(modeling_qwen2_vl.Qwen2VLModel._from_config(config), of_each=of_each).eval()
    example = images((1, 8, 12), (1, 4, 6))
    dynamic = {"pixel_values": {0: "4 * cells"}, "image_grid_thw": {0: "images"}}
    if of_each:
        with pytest.raises(onnxplug.CaptureError, match="of each image, of which there may be any number"):
            onnxplug.to_onnx(model, example, dynamic_shapes=dynamic)
        return
    program = onnxplug.to_onnx(model, example, dynamic_shapes=dynamic)
    for case in (example, images((1, 6, 10)), images((1, 2, 2), (2, 4, 18), (1, 14, 6))):
        with torch.no_grad():
            expected = model(*case)
        torch.testing.assert_close(program(*case)[0], expected)


def test_attention_elsewhere_is_as_before() -> None:
    """The exchanged parts are for encoders of packed images alone, and for the time of a capture."""
    from onnxplug_transformers.packed_images import images_of_any_size
    from transformers import AttentionInterface
    from transformers.models.qwen2_vl import modeling_qwen2_vl

    owner = modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel
    before = AttentionInterface.get_interface, modeling_qwen2_vl.is_flash_attention_requested, owner.forward
    config = modeling_qwen2_vl.Qwen2VLTextConfig(attn_implementation="sdpa")
    with images_of_any_size():
        assert not modeling_qwen2_vl.is_flash_attention_requested(config)
        interface = modeling_qwen2_vl.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
    assert interface is modeling_qwen2_vl.ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert before == (AttentionInterface.get_interface, modeling_qwen2_vl.is_flash_attention_requested, owner.forward)
