"""Swin's shifted windows on images of any size."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from onnxplug_torchvision.windows import shifted_window_attention

import onnxplug


@pytest.mark.parametrize(("version", "shift"), list(itertools.product((1, 2), ([0, 0], [2, 1], [2, 0], [0, 1]))))
def test_numbers_are_those_of_torchvision(version: int, shift: list[int]) -> None:
    from torchvision.models import swin_transformer

    heads, channels, window = 2, 8, [4, 3]
    for height, width, biased in itertools.product((1, 4, 5, 8), (2, 3, 7, 9), (False, True)):
        arguments = (
            *(torch.randn(2, height, width, channels), torch.randn(3 * channels, channels)),
            *(torch.randn(channels, channels), torch.randn(1, heads, 12, 12), window, heads, shift),
        )
        options = {
            "qkv_bias": torch.randn(3 * channels) if biased else None,
            "proj_bias": torch.randn(channels) if biased else None,
            "logit_scale": torch.randn(heads, 1, 1) if version == 2 else None,
            "training": False,
        }
        expected = swin_transformer.shifted_window_attention(*arguments, **options)
        torch.testing.assert_close(shifted_window_attention(*arguments, **options), expected, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("example", [(32, 48), (72, 40)])  # the second has a map of one window
def test_images_of_any_size(version: int, example: tuple[int, int]) -> None:
    from torchvision.models import swin_transformer

    block = swin_transformer.SwinTransformerBlockV2 if version == 2 else swin_transformer.SwinTransformerBlock
    merging = swin_transformer.PatchMergingV2 if version == 2 else swin_transformer.PatchMerging
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": [4, 4]}
    model = swin_transformer.SwinTransformer(**sizes, num_classes=5, block=block, downsample_layer=merging).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    images = partial(torch.randn, 2, 3)
    program = onnxplug.to_onnx(model, (images(*example),), dynamic_shapes=({0: "batch", 2: "height", 3: "width"},))
    for height, width in ((32, 48), (16, 16), (72, 28), (40, 100), (12, 33)):
        program.verify(args=(torch.randn(3, 3, height, width),), seeds=())
