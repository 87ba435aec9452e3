"""Encoders of images padded to one number of patches: any number of images, of any sizes, which are an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
}


def _stirred(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


class Siglip2(nn.Module):
    """The states of SigLIP 2's encoder."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Siglip2VisionConfig, Siglip2VisionModel

        self.model = Siglip2VisionModel(Siglip2VisionConfig(**_SIZES, num_patches=16))

    def forward(self, pixel_values: Any, pixel_attention_mask: Any, spatial_shapes: Any) -> Any:
        return self.model(pixel_values, pixel_attention_mask, spatial_shapes)[:2]


class Lfm2Vl(nn.Module):
    """The states of the images that the text model reads."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import Lfm2VlConfig, Lfm2VlModel

        text = {**_SIZES, "vocab_size": 99, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
        config = Lfm2VlConfig(vision_config={**_SIZES, "num_patches": 16}, text_config=text, downsample_factor=2)
        self.model = Lfm2VlModel(config)

    def forward(self, pixel_values: Any, pixel_attention_mask: Any, spatial_shapes: Any) -> Any:
        return torch.cat(
            self.model.get_image_features(pixel_values, spatial_shapes, pixel_attention_mask).pooler_output
        )


def images(length: int, *sizes: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Patches, their masks and sizes."""
    shapes = torch.tensor(sizes)
    mask = (torch.arange(length) < shapes.prod(-1)[:, None]).long()
    return torch.randn(len(sizes), length, 48), mask, shapes


DYNAMIC = ({0: "images", 1: "patches"}, {0: "images", 1: "patches"}, {0: "images"})


@pytest.mark.parametrize("kind", [Siglip2, Lfm2Vl])
def test_images_of_any_size(kind: type[nn.Module]) -> None:
    """Positions come from a table of 4 x 4, which is made smaller, larger and both."""
    model = _stirred(kind())
    program = onnxplug.to_onnx(model, images(12, (2, 4), (6, 2)), dynamic_shapes=DYNAMIC)
    cases = [images(24, (4, 4), (2, 2), (4, 6)), images(40, (20, 2)), images(8, (2, 2))]
    if kind is Siglip2:
        cases += [images(15, (1, 1), (3, 5), (1, 13)), images(12, (2, 4), (6, 2))]
    for case in cases:
        with torch.no_grad():
            expected = model(*case)
        torch.testing.assert_close(program(*case), tuple(expected) if kind is Siglip2 else (expected,))


@pytest.mark.parametrize("kind", [Siglip2, Lfm2Vl])
def test_sizes_that_transformers_refuses(kind: type[nn.Module]) -> None:
    model = kind().eval()
    program = onnxplug.to_onnx(model, images(12, (2, 4), (6, 2)), dynamic_shapes=DYNAMIC)
    cases = [(*images(12, (2, 4))[:2], torch.tensor([[4, 4]])), (*images(12, (2, 4))[:2], torch.tensor([[0, 4]]))]
    if kind is Lfm2Vl:
        cases += [images(12, (3, 4)), (*images(12, (2, 4))[:2], torch.tensor([[2, 2]]))]
    for case in cases:
        with pytest.raises(Exception, match=r"."), torch.no_grad():
            model(*case)
        with pytest.raises(Exception, match=r"out of data bounds|out of bounds"):
            program(*case)


def test_packed_images_with_such_positions() -> None:
    from transformers import Cosmos3EdgeVisionConfig, Cosmos3EdgeVisionModel

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Cosmos3EdgeVisionModel(Cosmos3EdgeVisionConfig(**_SIZES, num_patches=16))

        def forward(self, pixel_values: Any, grid_thw: Any) -> Any:
            return self.model(pixel_values, grid_thw).last_hidden_state

    def packed(*grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = torch.tensor(grid)
        return torch.randn(int(sizes.prod(-1).sum()), 48), sizes

    model = _stirred(Encoder())
    program = onnxplug.to_onnx(model, packed((1, 4, 6), (2, 2, 4)), dynamic_shapes=({0: "4 * cells"}, {0: "images"}))
    for case in (packed((1, 2, 2)), packed((3, 6, 2), (1, 10, 4), (1, 4, 4))):
        with torch.no_grad():
            torch.testing.assert_close(program(*case)[0], model(*case))
