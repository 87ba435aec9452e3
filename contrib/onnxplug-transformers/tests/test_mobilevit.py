"""MobileViT on images of any size: its patches, and maps whose sides are no multiples of a patch's."""

from __future__ import annotations

import pytest
import torch

import onnxplug


@pytest.mark.long
def test_images_of_any_size() -> None:
    from transformers.models.mobilevit import modeling_mobilevit

    sizes = {"hidden_sizes": [8, 12, 16], "neck_hidden_sizes": [4, 4, 8, 12, 16, 16, 24], "image_size": 64}
    config = modeling_mobilevit.MobileViTConfig(**sizes, num_attention_heads=2, mlp_ratio=1.0, expand_ratio=1.0)
    torch.manual_seed(0)
    model = modeling_mobilevit.MobileViTModel._from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    program = onnxplug.to_onnx(
        model, (torch.randn(2, 3, 64, 96),), dynamic_shapes={"pixel_values": {0: "batch", 2: "height", 3: "width"}}
    )
    for size in ((2, 64, 96), (1, 96, 64), (3, 72, 100)):  # sides of the last map: 2, 3 and 4
        x = torch.randn(size[0], 3, *size[1:])
        with torch.no_grad():
            expected = model(x).last_hidden_state
        torch.testing.assert_close(program(x)[0], expected)
