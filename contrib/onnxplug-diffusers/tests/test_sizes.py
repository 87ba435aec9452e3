"""Models of diffusers whose Python code decides on sizes, exported by ``to_onnx`` with the package installed."""

from __future__ import annotations

import pytest
import torch

import onnxplug

diffusers = pytest.importorskip("diffusers")


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
