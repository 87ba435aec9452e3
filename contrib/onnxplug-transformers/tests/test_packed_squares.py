"""Packed images whose squares of patches become tokens image by image: any number of images, of any sizes, which are an input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "initializer_range": 0.15,
}


def _drawn(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.4 if parameter.dim() == 1 else 0.2))
    return model.eval()


class Marked(nn.Module):
    """HunYuan-VL's states of patches and tokens of images, which have marks behind each row and around them."""

    def __init__(self, attention: str = "sdpa", mode: str = "bilinear") -> None:
        super().__init__()
        from transformers.models.hunyuan_vl import configuration_hunyuan_vl, modeling_hunyuan_vl

        config = configuration_hunyuan_vl.HunYuanVLVisionConfig(
            **_SIZES, max_image_size=20, text_hidden_size=24, interpolate_mode=mode
        )
        config._attn_implementation = attention
        self.encoder = modeling_hunyuan_vl.HunYuanVLVisionTransformer(config)

    def forward(self, pixel_values: Tensor, grid_thw: Tensor) -> Any:
        outputs = self.encoder(pixel_values, grid_thw=grid_thw)
        return outputs.last_hidden_state, outputs.pooler_output


class Joined(nn.Module):
    """PaddleOCR-VL's tokens of squares of patches."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.paddleocr_vl import configuration_paddleocr_vl, modeling_paddleocr_vl

        vision = configuration_paddleocr_vl.PaddleOCRVisionConfig(**_SIZES)
        config = configuration_paddleocr_vl.PaddleOCRVLConfig(
            vision_config=vision, text_config={"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        )
        self.projector = modeling_paddleocr_vl.PaddleOCRProjector(config)

    def forward(self, image_features: Tensor, image_grid_thw: Tensor) -> Any:
        return self.projector(image_features, image_grid_thw)


def _case(width: int, *grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    sizes = torch.tensor(grid)
    return torch.randn(int(sizes.prod(-1).sum()), width), sizes


_DYNAMIC = ({0: "patches"}, {0: "images"})


@pytest.mark.parametrize(("attention", "mode"), [("sdpa", "bilinear"), ("eager", "bicubic")])
def test_tokens_with_marks(attention: str, mode: str) -> None:
    """One square; odd sizes, whose last row and column are in no square; more cells than the table has, and fewer."""
    torch.manual_seed(0)
    model = _drawn(Marked(attention, mode))
    program = onnxplug.to_onnx(model, _case(48, (1, 4, 6), (1, 2, 4)), dynamic_shapes=_DYNAMIC)
    cases = [
        _case(48, (1, 2, 2)),
        _case(48, (1, 5, 3), (1, 2, 7), (1, 8, 4)),
        _case(48, (1, 3, 3), (1, 3, 3), (1, 2, 2), (1, 4, 10)),
    ]
    for case in cases:
        program.verify(args=case, seeds=())
    pixels, sizes = _case(48, (1, 4, 6), (1, 2, 4))
    for wrong in ([[1, 4, 6], [1, 1, 8]], [[1, 4, 6], [2, 2, 2]], [[1, 4, 6]], [[1, 4, 6], [1, 4, 4]]):
        with pytest.raises(Exception, match=r"out of|indices|bounds|incompatible|broadcast"):
            program(pixels, torch.tensor(wrong))
    program.verify(args=(pixels, sizes), seeds=())


def test_tokens_of_squares() -> None:
    """One square, several frames, unequal images; sizes that transformers refuses are refused."""
    torch.manual_seed(0)
    model = _drawn(Joined())
    program = onnxplug.to_onnx(model, _case(32, (1, 4, 6), (1, 2, 4)), dynamic_shapes=_DYNAMIC)
    for grid in ([(1, 2, 2)], [(1, 2, 8), (3, 4, 2), (1, 6, 6)], [(2, 2, 4), (1, 2, 2), (2, 4, 4), (1, 8, 2)]):
        program.verify(args=_case(32, *grid), seeds=())
    states, _ = _case(32, (1, 4, 6), (1, 2, 4))
    for wrong in ([[1, 4, 6]], [[1, 4, 6], [1, 4, 4]], [[2, 3, 4], [1, 2, 4]], [[1, 8, 3], [1, 2, 4]]):
        with pytest.raises(Exception, match=r"out of|indices|bounds"):
            program(states, torch.tensor(wrong))
        with pytest.raises((RuntimeError, ValueError)), torch.no_grad():
            model(states, torch.tensor(wrong))


def test_patched_results_are_those_of_transformers() -> None:
    from onnxplug_transformers.packed_images import images_of_any_size
    from onnxplug_transformers.packed_squares import squares_of_any_number

    torch.manual_seed(0)
    for model, width, side in ((Marked(), 48, 1), (Marked("eager", "bicubic"), 48, 1), (Joined(), 32, 2)):
        _drawn(model)
        cases = []
        for _ in range(20):
            grid = torch.randint(1, 6, (int(torch.randint(1, 5, ())), 3)) * side + (2 - side)
            grid[:, 0] = torch.randint(1, side + 1, grid[:, 0].shape)
            cases.append(_case(width, *map(tuple, grid.tolist())))
        with torch.no_grad():
            expected = [model(*case) for case in cases]
            with images_of_any_size(), squares_of_any_number():
                got = [model(*case) for case in cases]
        torch.testing.assert_close(got, expected)


def test_another_interpolation_is_left_to_transformers() -> None:
    """transformers resizes the table image by image, so that a dynamic number of images is refused."""
    torch.manual_seed(0)
    model, case = _drawn(Marked(mode="nearest")), _case(48, (1, 4, 6), (1, 2, 4))
    with pytest.raises(onnxplug.CaptureError):
        onnxplug.to_onnx(model, case, dynamic_shapes=_DYNAMIC)
