"""Models of diffusers whose Python code decides on sizes, exported by ``to_onnx`` with the package installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug

diffusers = pytest.importorskip("diffusers")


def test_a_batch_of_any_size() -> None:
    """Chroma, whose features of times come from a list as long as the batch."""
    torch.manual_seed(0)
    model = diffusers.ChromaTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=32,
        approximator_layers=1,
    ).eval()
    inputs = {
        "hidden_states": torch.randn(2, 12, 4),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.randn(12, 3),
        "txt_ids": torch.randn(7, 3),
    }
    sizes = ({0: "batch", 1: "n"}, {0: "batch", 1: "text"}, {0: "batch"}, {0: "n"}, {0: "text"})
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=dict(zip(inputs, sizes, strict=True)))
    assert [str(d) for d in program.model.graph.inputs[2].shape] == ["batch"]
    program.verify()


def test_experts() -> None:
    """HiDream's mixture of experts: weights and choices of the model's own gate."""
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    torch.manual_seed(0)
    model = MOEFeedForwardSwiGLU(16, 24, 4, 2, _force_inference_output=True).eval()
    with torch.no_grad():
        model.gate.weight.normal_()
    program = onnxplug.to_onnx(model, (torch.randn(2, 5, 16),), dynamic_shapes=({0: "batch", 1: "tokens"},))
    program.verify()


def test_positions_in_a_film() -> None:
    """Cosmos, whose positions are divided by their mean length, and which makes tensors of sizes in an export."""
    torch.manual_seed(0)
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        text_embed_dim=32,
        adaln_lora_dim=32,
        max_size=(8, 32, 32),
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".pos_emb_" in name:
                parameter.normal_()
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 4, 6),
        "timestep": torch.randn(1),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "padding_mask": torch.randn(1, 1, 4, 6),
    }
    film, image = {2: "frames", 3: "height", 4: "width"}, {2: "height", 3: "width"}
    sizes = dict(zip(inputs, (film, {}, {1: "text"}, image), strict=True))
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=sizes)
    assert [str(d) for d in program.model.graph.inputs[0].shape] == ["1", "4", "frames", "height", "width"]
    program.verify()


def test_causal_attention_over_frames() -> None:
    """HunyuanVideo 1.5's autoencoder, whose mask has a loop over frames, height and width."""
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
    ).eval()
    film = torch.randn(1, 3, 3, 16, 24)
    program = onnxplug.to_onnx(model, (film,), dynamic_shapes=({3: "height", 4: "width"},))
    assert list(map(str, program.model.graph.inputs[0].shape)) == ["1", "3", "3", "height", "width"]
    cases = program.verify().cases
    assert len({tuple(case.sizes.values()) for case in cases}) > 2


def test_texts_of_two_kinds() -> None:
    """OmniGen's positions turn otherwise in long texts, by a branch on the largest position."""
    from diffusers.models.transformers.transformer_omnigen import OmniGenSuScaledRotaryEmbedding

    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 3.0, 5.0, 6.0]}
    model = OmniGenSuScaledRotaryEmbedding(8, 64, original_max_position_embeddings=16, rope_scaling=factors)
    inputs = torch.randn(2, 6, 8), torch.arange(6).expand(2, 6)
    program = onnxplug.to_onnx(model, inputs, dynamic_shapes=({0: "batch", 1: "n"}, {0: "batch", 1: "n"}))
    for length in (1, 15, 16, 17, 40):
        case = torch.randn(3, length, 8), torch.arange(length).expand(3, length)
        torch.testing.assert_close(program(*case), model(*case))


def test_places_in_long_texts() -> None:
    """OmniGen's frequencies are rounded before positions of thousands are multiplied by them."""
    from diffusers.models.transformers.transformer_omnigen import OmniGenSuScaledRotaryEmbedding

    factors = {"short_factor": [1.0, 1.1, 1.2, 1.37], "long_factor": [1.03, 3.0, 5.0, 6.0]}
    model = OmniGenSuScaledRotaryEmbedding(8, 131072, original_max_position_embeddings=4096, rope_scaling=factors)
    inputs = torch.randn(1, 6, 8), torch.arange(6)[None]
    program = onnxplug.to_onnx(model, inputs, dynamic_shapes=({1: "n"}, {1: "n"}))
    for length in (4096, 30000):
        case = torch.randn(1, length, 8), torch.arange(length)[None]
        torch.testing.assert_close(program(*case), model(*case))


def test_captions_of_other_lengths() -> None:
    """Lumina 2, which has a loop over the batch: each caption has its own length, the patches follow it."""
    torch.manual_seed(0)
    model = diffusers.Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        axes_dim_rope=(4, 4, 8),
        axes_lens=(30, 16, 16),
        cap_feat_dim=24,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)

    def inputs(height: int, width: int, lengths: list[int], text: int) -> dict[str, torch.Tensor]:
        batch = len(lengths)
        return {
            "hidden_states": torch.randn(batch, 4, height, width),
            "timestep": torch.rand(batch),
            "encoder_hidden_states": torch.randn(batch, text, 24),
            "encoder_attention_mask": torch.arange(text) < torch.tensor(lengths)[:, None],
        }

    sizes = ({0: "batch", 2: "height", 3: "width"}, {0: "batch"}, {0: "batch", 1: "text"}, {0: "batch", 1: "text"})
    example = inputs(8, 4, [5, 3], 6)
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=dict(zip(example, sizes, strict=True)))
    assert [str(d) for d in program.model.graph.inputs[0].shape] == ["batch", "4", "height", "width"]
    for case in (inputs(4, 8, [7, 7], 7), inputs(6, 6, [0, 1, 4], 9), inputs(2, 2, [1], 1)):
        program.verify(kwargs=case)


def _embedding(**settings: Any) -> torch.nn.Module:
    from diffusers.models.embeddings import PatchEmbed

    torch.manual_seed(0)
    embedding: torch.nn.Module = PatchEmbed(16, 16, 2, 3, 16, interpolation_scale=2, **settings).eval()
    return embedding


def test_positions_of_patches() -> None:
    """PixArt's positions, which are kept for one height and width and computed for others."""
    model, shapes = _embedding(), ({0: "batch", 2: "height", 3: "width"},)
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=shapes)
    assert list(map(str, program.model.graph.inputs[0].shape)) == ["batch", "3", "height", "width"]
    for sizes in ((1, 16, 16), (3, 16, 8), (2, 2, 34)):
        program.verify(args=(torch.randn(sizes[0], 3, *sizes[1:]),), seeds=())
    for side in (2, 3):  # the other side is the one for which positions are kept
        program = onnxplug.to_onnx(model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({side: "side"},))
        for size in (16, 6):
            program.verify(args=(torch.randn(2, 3, *((size, 16) if side == 2 else (16, size))),), seeds=())
    static = onnxplug.to_onnx(model, (torch.randn(2, 3, 16, 16),))
    assert not any(node.op_type == "Sin" for node in static.model.graph)


def test_other_positions_of_patches() -> None:
    """Positions that were changed are right for one height and width alone."""
    model = _embedding()
    model.pos_embed = model.pos_embed * 2
    shapes = ({2: "height", 3: "width"},)
    with pytest.raises(onnxplug.CaptureError, match="height"):
        onnxplug.to_onnx(model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=shapes)
