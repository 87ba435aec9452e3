"""Models of diffusers whose Python code has a loop over the batch, exported by ``to_onnx`` with the package installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

diffusers = pytest.importorskip("diffusers")

_FILM, _TEXT = {0: "batch", 2: "frames", 3: "height", 4: "width"}, {0: "batch", 1: "text"}


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _stirred(model: nn.Module) -> nn.Module:
    """A model all of whose parameters change its results."""
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    return model.eval()


def _masks(rows: Sequence[str]) -> Tensor:
    return torch.tensor([[int(letter) for letter in row] for row in rows])


def test_norm_of_frames_in_chunks() -> None:
    """Mochi's autoencoder, whose norms take eight frames of all films at a time."""
    from diffusers.models.autoencoders.autoencoder_kl_mochi import MochiChunkedGroupNorm3D

    norm = _stirred(MochiChunkedGroupNorm3D(8, 4))
    program = onnxplug.to_onnx(norm, (torch.randn(2, 8, 5, 3, 2),), dynamic_shapes=({0: "batch", 2: "frames"},))
    assert list(map(str, program.model.graph.inputs[0].shape)) == ["batch", "8", "frames", "3", "2"]
    for sizes in ((1, 1), (2, 4), (3, 7)):
        program.verify(args=(torch.randn(sizes[0], 8, sizes[1], 3, 2),), seeds=())


def test_mochi() -> None:
    """Each text has valid tokens of its own, not only the first tokens; padding comes last."""
    model = _stirred(
        diffusers.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=4,
            text_embed_dim=16,
            time_embed_dim=4,
        )
    )

    def inputs(sizes: tuple[int, int, int], masks: Sequence[str]) -> dict[str, Any]:
        mask = _masks(masks)
        return {
            "hidden_states": torch.randn(len(mask), 4, *sizes),
            "encoder_hidden_states": torch.randn(*mask.shape, 16),
            "timestep": torch.randint(0, 1000, (len(mask),)),
            "encoder_attention_mask": mask.bool(),
        }

    example = inputs((2, 4, 6), ["11100", "11111"])
    shapes = dict(zip(example, (_FILM, _TEXT, {0: "batch"}, _TEXT), strict=True))
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=shapes)
    assert list(map(str, program.model.graph.inputs[0].shape)) == ["batch", "4", "frames", "height", "width"]
    for case in (
        inputs((2, 4, 6), ["11100", "11111"]),
        inputs((1, 2, 2), ["010110", "000000", "001111"]),
        inputs((3, 6, 4), ["1"]),
    ):
        program.verify(kwargs=case, seeds=())


def test_hunyuan_video() -> None:
    """Images or none, and the tokens of two texts, each with a mask of its own."""
    model = _stirred(
        diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=12,
            image_embed_dim=8,
            rope_axes_dim=(4, 4, 8),
        )
    )

    def inputs(sizes: tuple[int, int, int], masks: Sequence[str], others: Sequence[str], image: Any) -> dict[str, Any]:
        mask, other = _masks(masks), _masks(others)
        return {
            "hidden_states": torch.randn(len(mask), 4, *sizes),
            "timestep": torch.rand(len(mask)),
            "encoder_hidden_states": torch.randn(*mask.shape, 16),
            "encoder_attention_mask": mask,
            "encoder_hidden_states_2": torch.randn(*other.shape, 12),
            "encoder_attention_mask_2": other,
            "image_embeds": torch.randn(len(mask), 3, 8) * torch.tensor(image)[:, None, None],
        }

    other, image = {0: "batch", 1: "text_2"}, {0: "batch"}
    example = inputs((2, 4, 6), ["11100", "11111"], ["10", "11"], [1.0, 1.0])
    shapes = dict(zip(example, (_FILM, {0: "batch"}, _TEXT, _TEXT, other, other, image), strict=True))
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=shapes)
    assert list(map(str, program.model.graph.inputs[0].shape)) == ["batch", "4", "frames", "height", "width"]
    for case in (
        inputs((2, 4, 6), ["11100", "11111"], ["10", "11"], [0.0, 0.0]),
        inputs((1, 2, 3), ["011010", "100000", "001111"], ["101", "000", "011"], [0.0, 1.0, 0.0]),
        inputs((3, 2, 2), ["1"], ["1"], [0.0]),
    ):
        program.verify(kwargs=case, seeds=())


def _hidream() -> nn.Module:
    return _stirred(
        diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            caption_channels=[12, 16],
            text_emb_dim=8,
            num_routed_experts=3,
            num_activated_experts=2,
            axes_dims_rope=(4, 4, 8),
            max_resolution=(16, 16),
            llama_layers=(0, 1),
            force_inference_output=True,
        )
    )


@pytest.mark.parametrize("sizes", [(8, 12), (8, 8)])
def test_hidream(sizes: tuple[int, int]) -> None:
    """Images of one size, which are padded unless they are squares."""

    def inputs(batch: int, text: int, sizes: tuple[int, int]) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn(batch, 4, *sizes),
            "timesteps": torch.randint(0, 1000, (batch,)),
            "encoder_hidden_states_t5": torch.randn(batch, text, 12),
            "encoder_hidden_states_llama3": torch.randn(2, batch, text, 16),
            "pooled_embeds": torch.randn(batch, 8),
        }

    model, example, batch = _hidream(), inputs(2, 5, sizes), {0: "batch"}
    shapes = dict(zip(example, (batch, batch, _TEXT, {1: "batch", 2: "text"}, batch), strict=True))
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=shapes)
    assert str(program.model.graph.inputs[0].shape[0]) == "batch"
    for case in (inputs(3, 7, sizes), inputs(1, 1, sizes)):
        program.verify(kwargs=case, seeds=())
