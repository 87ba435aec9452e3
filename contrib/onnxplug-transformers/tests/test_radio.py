"""C-RADIO's images: of any size, and any number of them in one row, whose sizes are an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "mlp_ratio": 2.0,
    "patch_size": 4,
    "max_img_size": 20,
    "num_cls_tokens": 2,
    "num_registers": 1,
    "summary_idxs": [0, 1],
}


class Radio(nn.Module):
    """The summary, features and states of C-RADIO."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        from transformers import RadioConfig, RadioModel

        self.model = RadioModel(RadioConfig(**_SIZES, attn_implementation=attention)).eval()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    def forward(self, pixel_values: Any, image_grid_hw: Any = None) -> Any:
        return tuple(self.model(pixel_values, image_grid_hw).values())[:3]


def row(*sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The patches of some images, and their sizes."""
    grid = torch.tensor(sizes)
    return torch.randn(int(grid.prod(-1).sum()), 48), grid


#: A table of 5 x 5 is made smaller, larger, cut on either side and left as it is.
ROWS = [row((2, 4), (6, 2)), row((5, 5)), row((1, 1), (7, 9), (5, 3)), row((3, 5), (3, 5)), row((12, 1))]


def test_images_of_any_size() -> None:
    """The branches of transformers depend on which side is longer."""
    axes = {0: "batch", 2: 4 * torch.export.Dim("rows", min=1), 3: 4 * torch.export.Dim("columns", min=1)}
    model = Radio()
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 12, 16),), dynamic_shapes=(axes,))
    for batch, rows, columns in ((1, 16, 12), (3, 20, 20), (2, 4, 32), (1, 24, 24), (2, 4, 4)):
        images = torch.randn(batch, 3, rows, columns)
        with torch.no_grad():
            expected = model(images)
        torch.testing.assert_close(program(images), expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_images_in_one_row(attention: str) -> None:
    model = Radio(attention)
    program = onnxplug.to_onnx(model, ROWS[0], dynamic_shapes=({0: "patches"}, {0: "images"}))
    for case in ROWS:
        with torch.no_grad():
            expected = model(*case)
        torch.testing.assert_close(program(*case), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_those_of_transformers(dtype: torch.dtype) -> None:
    """Positions are resized in float32, whatever the dtype."""
    from onnxplug_transformers.packed_images import images_of_any_size
    from onnxplug_transformers.radio_images import radio_images_of_any_size

    model = Radio().to(dtype)
    for patches, grid in ROWS:
        case = patches.to(dtype), grid
        with torch.no_grad():
            expected = model(*case)
            with images_of_any_size(), radio_images_of_any_size():
                result = model(*case)
        bound = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(result, expected, **bound)


@pytest.mark.parametrize("change", [1, -1])
def test_other_numbers_of_patches_are_refused(change: int) -> None:
    """They are refused, as by transformers."""
    patches, grid = row((2, 4), (3, 2))
    other = torch.randn(patches.shape[0] + change, 48)
    model = Radio()
    program = onnxplug.to_onnx(model, (patches, grid), dynamic_shapes=({0: "patches"}, {0: "images"}))
    with pytest.raises(Exception, match=r"split|size"):
        model(other, grid)
    with pytest.raises(Exception, match=r"indices element out of data bounds|out of bounds"):
        program(other, grid)


class Omni(nn.Module):
    """The tokens of images that the text model of Nemotron H Omni reads."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config

        text = {"model_type": "nemotron_h", "vocab_size": 99, "hidden_size": 32, "layers_block_type": ["attention"]}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
        config = NemotronH_Omni_Reasoning_V3_Config(
            vision_config={"model_type": "radio", "video_temporal_patch_size": 2, **_SIZES},
            text_config=text,
            audio_config=None,
            vision_hidden_size=32,
            projector_hidden_size=48,
        )
        self.model = NemotronH_Omni_Reasoning_V3(config).eval()

    def forward(self, pixel_values: Any, image_grid_hw: Any) -> Any:
        return torch.cat(self.model.get_image_features(pixel_values, image_grid_hw).pooler_output)


def test_tokens_of_nemotron_h_omni() -> None:
    """A token for each square of two by two patches; sides that are odd are refused, as by transformers."""
    model = Omni()
    program = onnxplug.to_onnx(model, row((2, 4), (6, 2)), dynamic_shapes=({0: "patches"}, {0: "images"}))
    for case in (row((4, 4), (2, 2), (4, 8)), row((2, 2)), row((8, 6), (2, 10))):
        with torch.no_grad():
            expected = model(*case)
        torch.testing.assert_close(program(*case)[0], expected)
    odd = row((2, 4), (4, 3))
    with pytest.raises(RuntimeError):
        model(*odd)
    with pytest.raises(Exception, match=r"indices element out of data bounds|out of bounds"):
        program(*odd)
