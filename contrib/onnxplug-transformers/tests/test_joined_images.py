"""Models that list the tokens of each image, and join them at once: any number of images, with or without parts."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug


class _Tower(nn.Module):
    """Four states of each image of 4 by 4 pixels."""

    def forward(self, pixel_values: Tensor, **_: Any) -> Any:
        states = pixel_values.reshape(pixel_values.shape[0], 4, 12)
        return SimpleNamespace(last_hidden_state=states, hidden_states=None, attentions=None)


class Joined(nn.Module):
    """The tokens of all images, by the method of a model that has only the parts that the method needs."""

    def __init__(self, place: str, name: str) -> None:
        super().__init__()
        kind = getattr(importlib.import_module(f"transformers.models.{place}.modeling_{place}"), name)
        self.model: Any = object.__new__(kind)
        nn.Module.__init__(self.model)
        self.model.config = SimpleNamespace(return_dict=True)
        self.model.vision_tower = self.model.vision_model = _Tower()
        self.model.multi_modal_projector = nn.Linear(12, 6)
        self.model.view_separator, self.model.image_newline = (nn.Parameter(torch.randn(6)) for _ in range(2))

    def forward(self, pixel_values: Tensor, pixel_values_local: Any = None, num_local_patches: Any = None) -> Tensor:
        found = self.model.get_image_features(pixel_values, pixel_values_local, num_local_patches)
        return torch.cat(found.pooler_output)


_MODELS = {
    "deepseek_ocr2": "DeepseekOcr2Model",
    "unlimited_ocr": "UnlimitedOcrModel",
    "step3p7": "Step3p7Model",
}
_WITH_PARTS = ("deepseek_ocr2", "step3p7")


def _case(*parts: int) -> tuple[Tensor, ...]:
    return torch.randn(len(parts), 3, 4, 4), torch.randn(sum(parts), 3, 4, 4), torch.tensor(parts)


@pytest.mark.parametrize("place", _MODELS)
def test_any_number_of_images(place: str) -> None:
    torch.manual_seed(0)
    model = Joined(place, _MODELS[place]).eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 4, 4),), dynamic_shapes=({0: "images"},))
    for images in (1, 2, 5):
        program.verify(args=(torch.randn(images, 3, 4, 4),), seeds=())


@pytest.mark.parametrize("place", _WITH_PARTS)
def test_any_numbers_of_parts(place: str) -> None:
    """Numbers that don't fit the parts are refused, as by PyTorch; Step 3.7 itself takes the parts that there are."""
    torch.manual_seed(0)
    model = Joined(place, _MODELS[place]).eval()
    dynamic = ({0: "images"}, {0: "parts"}, {0: "images"})
    program = onnxplug.to_onnx(model, _case(2, 1), dynamic_shapes=dynamic)
    for parts in ((1, 3), (0, 2), (2, 0, 0, 3), (4,), (0, 1, 0)):
        program.verify(args=_case(*parts), seeds=())
    images, of_parts, _ = _case(1, 3)
    for wrong in ([2, 1], [3, 2], [5, -1], [4], [1, 3, 0]):
        with pytest.raises(Exception, match=r"out of|indices|bounds|images|dimension"):
            program(images, of_parts, torch.tensor(wrong))


def test_parts_are_joined_as_in_a_loop() -> None:
    from onnxplug_transformers.joined_images import _with_parts

    torch.manual_seed(0)
    for _ in range(50):
        images, of_part, of_image = (int(torch.randint(1, 6, ())) for _ in range(3))
        numbers = torch.randint(0, 4, (images,))
        parts, whole = torch.randn(int(numbers.sum()), of_part, 3), torch.randn(images, of_image, 3)
        expected = [
            torch.cat([mine.flatten(0, 1), image])
            for mine, image in zip(parts.split(numbers.tolist()), whole, strict=True)
        ]
        torch.testing.assert_close(_with_parts(parts, numbers, whole), torch.cat(expected), rtol=0, atol=0)


class Llava(nn.Module):
    """LLaVA's tokens of all images."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaModel

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
        text = LlamaConfig(**sizes, vocab_size=99)
        self.model = LlavaModel(LlavaConfig(vision_config=vision, text_config=text, image_token_id=98))

    def forward(self, pixel_values: Tensor) -> Tensor:
        return torch.cat(self.model.get_image_features(pixel_values, return_dict=True).pooler_output)


def test_images_of_llava() -> None:
    torch.manual_seed(0)
    model = Llava().eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, 3, 16, 16),), dynamic_shapes=({0: "images"},))
    for images in (1, 3):
        program.verify(args=(torch.randn(images, 3, 16, 16),), seeds=())


class _EachImage(Joined):
    def forward(self, pixel_values: Tensor, *_: Any) -> Any:  # type: ignore[override]
        tokens: Mapping[str, Any] = self.model.get_image_features(pixel_values)
        return tokens["pooler_output"]


def test_results_of_each_image() -> None:
    """There is a result for each image: a dynamic number of images is refused, a static number exported."""
    torch.manual_seed(0)
    model, images = _EachImage("deepseek_ocr2", "DeepseekOcr2Model").eval(), torch.randn(2, 3, 4, 4)
    with pytest.raises(onnxplug.OnnxplugError, match="states of each image"):
        onnxplug.to_onnx(model, (images,), dynamic_shapes=({0: "images"},))
    onnxplug.to_onnx(model, (images,)).verify(args=(torch.randn(2, 3, 4, 4),), seeds=())
