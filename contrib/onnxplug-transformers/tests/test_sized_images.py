"""Pixtral and models with its encoder: any number of images, padded to one size, whose own sizes are an input or absent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 32,
    "initializer_range": 0.15,
}
_TEXT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


class Pixtral(nn.Module):
    """The encoder's last states, and the states before the last layer."""

    def __init__(self, attention: str = "sdpa") -> None:
        super().__init__()
        from transformers import PixtralVisionConfig, PixtralVisionModel

        config = PixtralVisionConfig(**_VISION)
        config._attn_implementation = attention
        self.model = PixtralVisionModel(config)

    def forward(self, pixel_values: Tensor, image_sizes: Tensor | None = None) -> Any:
        outputs = self.model(pixel_values, image_sizes, output_hidden_states=True)
        return outputs.last_hidden_state, outputs.hidden_states[1]


class Tokens(nn.Module):
    """The tokens of images that the text model reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers
        from transformers import MistralConfig, PixtralVisionConfig

        settings: dict[str, Any] = {"vision_config": PixtralVisionConfig(**_VISION)}
        if kind == "LightOnOcr":
            settings["text_config"] = transformers.Qwen3Config(**_TEXT, head_dim=8)
        else:
            settings["text_config"] = MistralConfig(**_TEXT)
        if kind == "Llava":
            settings |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        else:
            settings["spatial_merge_size"] = 2
        self.model = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings))

    def forward(self, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        found = self.model.get_image_features(pixel_values=pixel_values, image_sizes=image_sizes, return_dict=True)
        return torch.cat(found.pooler_output)


def _images(height: int, width: int, *sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    return torch.randn(len(sizes), 3, height, width), torch.tensor(sizes)


_DYNAMIC = ({0: "images", 2: "height", 3: "width"}, {0: "images"})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_images_of_their_own_sizes(attention: str) -> None:
    """Sizes between the patches, of no patch, beyond the pixels, and of a single patch."""
    torch.manual_seed(0)
    program = onnxplug.to_onnx(Pixtral(attention).eval(), _images(16, 24, (8, 24), (16, 12)), dynamic_shapes=_DYNAMIC)
    cases = [
        _images(32, 20, (32, 8), (13, 20), (4, 7)),
        _images(8, 8, (8, 8)),
        _images(9, 30, (99, 6), (3, 8), (8, 99)),
    ]
    for case in [*cases, _images(12, 12, (4, 5)), _images(12, 12, (-4, 8), (12, -5), (-99, 8))]:
        program.verify(args=case, seeds=())


def test_images_without_sizes() -> None:
    torch.manual_seed(0)
    model, images = Pixtral().eval(), torch.randn(2, 3, 16, 24)
    program = onnxplug.to_onnx(model, (images,), dynamic_shapes=({0: "images", 2: "height", 3: "width"},))
    for shape in ((3, 3, 8, 16), (1, 3, 21, 15), (1, 3, 4, 7)):
        program.verify(args=(torch.randn(shape),), seeds=())


def test_too_few_sizes_are_refused() -> None:
    """PyTorch leaves out the images without sizes; further sizes are ignored by both."""
    torch.manual_seed(0)
    dynamic = (_DYNAMIC[0], {0: "sizes"})
    program = onnxplug.to_onnx(Pixtral().eval(), _images(16, 24, (8, 24), (16, 12)), dynamic_shapes=dynamic)
    images, sizes = _images(16, 24, (16, 8), (4, 24), (8, 8), (16, 24))
    program.verify(args=(images[:2], sizes), seeds=())
    with pytest.raises(Exception, match=r"out of|indices|bounds"):
        program(images, sizes[:1])


@pytest.mark.parametrize("kind", ["Mistral3", "LightOnOcr", "Llava"])
def test_tokens_of_models(kind: str) -> None:
    """Squares of patches become tokens, and patches that fill no square are left out."""
    torch.manual_seed(0)
    model = Tokens(kind).eval()
    program = onnxplug.to_onnx(model, _images(16, 24, (8, 24), (16, 12)), dynamic_shapes=_DYNAMIC)
    for case in (
        _images(32, 20, (32, 8), (13, 20), (8, 9)),
        _images(8, 16, (8, 16)),
        _images(24, 28, (12, 20), (20, 28)),
    ):
        program.verify(args=case, seeds=())
    if kind != "Llava":
        with pytest.raises(Exception, match=r"out of|indices|bounds"):
            program(*_images(8, 8, (8, 8), (4, 8)))


def test_patched_results_are_those_of_transformers() -> None:
    from onnxplug_transformers.packed_images import images_of_any_size
    from onnxplug_transformers.sized_images import sized_images_of_any_number

    torch.manual_seed(0)
    cases = []
    for _ in range(40):
        images, height, width = torch.randint(1, 5, ()).item(), *torch.randint(16, 40, (2,)).tolist()
        sizes = [
            (torch.randint(8, height + 1, ()).item(), torch.randint(16, width + 1, ()).item()) for _ in range(images)
        ]
        cases.append(_images(height, width, *sizes))
    for model in (Pixtral().eval(), Pixtral("eager").eval(), Tokens("Mistral3").eval(), Tokens("LightOnOcr").eval()):
        with torch.no_grad():
            expected = [model(*case) for case in cases]
            with images_of_any_size(), sized_images_of_any_number():
                got = [model(*case) for case in cases]
        torch.testing.assert_close(got, expected)
