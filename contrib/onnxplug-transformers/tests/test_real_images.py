"""Rows of images, some of them padding, with masks of pixels: any batch, any number of images and of padding images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

#: A limit of torch, not of the package.
_NOT_WITH_29 = pytest.mark.xfail(
    torch.__version__.startswith("2.9."),
    strict=True,
    reason="torch 2.9 asks for the number of data-dependent rows in attention",
)
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_VISION, "vocab_size": 99, "num_key_value_heads": 2, "max_position_embeddings": 256}
_VISION |= {"patch_size": 4, "image_size": 16}
_RESAMPLER = {"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 4}
_RESAMPLER |= {"num_key_value_heads": 2, "resampler_head_dim": 8}
_IMAGE = 98
_TOKENS = 4  # of an image of 16 x 16
KINDS = ["Idefics2", "Idefics3", "SmolVLM", "ModernVBert"]
_CAPTURED = [kind if kind == "ModernVBert" else pytest.param(kind, marks=_NOT_WITH_29) for kind in KINDS]
#: Rows and columns of pixels that the mask of an image shows; ``None`` for an image that is padding.
_Row = Sequence[tuple[int, int] | None]


def _model(kind: str) -> nn.Module:
    import transformers

    settings: dict[str, Any] = {"vision_config": _VISION, "image_token_id": _IMAGE, "tie_word_embeddings": False}
    if kind == "Idefics2":
        settings |= {"text_config": {"model_type": "mistral", **_TEXT}, "perceiver_config": _RESAMPLER}
    elif kind == "ModernVBert":
        settings["vision_config"] = {"model_type": "siglip_vision_model", **_VISION}
        settings |= {"text_config": {"model_type": "modernbert", **_TEXT, "pad_token_id": 0}, "pixel_shuffle_factor": 2}
    else:
        settings |= {"text_config": {"model_type": "llama", **_TEXT}, "scale_factor": 2, "pad_token_id": 0}
    model: nn.Module = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings))
    model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


class States(nn.Module):
    """A model's states of tokens; SmolVLM, and with transformers 5.24 every model, also returns features by row."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = _model(kind)

    def forward(
        self, pixel_values: torch.Tensor, input_ids: torch.Tensor, pixel_attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = {"pixel_values": pixel_values, "pixel_attention_mask": pixel_attention_mask, "input_ids": input_ids}
        states: torch.Tensor = self.model(**given).last_hidden_state
        return states


def _inputs(*rows: _Row, height: int = 16, width: int = 16, text: int = 5, tokens: int = _TOKENS) -> dict[str, Any]:
    """Each row has its images' tokens and text; a row may have more images than another row."""
    batch, images = len(rows), max(map(len, rows))
    pixels = torch.zeros(batch, images, 3, height, width)
    mask = torch.zeros(batch, images, height, width, dtype=torch.bool)
    ids = torch.randint(1, _IMAGE, (batch, tokens * images + text))
    for index, row in enumerate(rows):
        ids[index, : tokens * sum(size is not None for size in row)] = _IMAGE
        for image, size in enumerate(row):
            if size is not None:
                pixels[index, image] = torch.randn(3, height, width)
                mask[index, image, : size[0], : size[1]] = True
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "input_ids": ids}


_DYNAMIC: dict[str, Any] = {
    "pixel_values": {0: "batch", 1: "images"},
    "pixel_attention_mask": {0: "batch", 1: "images"},
    "input_ids": {0: "batch", 1: "sequence"},
}
_EXAMPLE: tuple[_Row, ...] = ([(16, 16), (12, 8)], [(16, 16), None])


@pytest.mark.parametrize("kind", _CAPTURED)
def test_any_number_of_images(kind: str) -> None:
    torch.manual_seed(0)
    model = States(kind)
    program = onnxplug.to_onnx(model, kwargs=_inputs(*_EXAMPLE), dynamic_shapes=_DYNAMIC)
    cases: list[tuple[_Row, ...]] = [
        ([(16, 16)],),
        ([None, (8, 16), (16, 4)], [None], [(16, 16), (9, 7), (16, 13)], [(4, 4)]),
        ([(5, 6), None, None, (16, 16)],),
    ]
    for case in cases:
        program.verify(kwargs=_inputs(*case, text=7), seeds=())
    holes = _inputs([(16, 16), (16, 16)], [(16, 16)])
    holes["pixel_attention_mask"][0, 0, :, :4] = False  # no patch of the first column
    holes["pixel_attention_mask"][0, 1, :4] = False
    holes["pixel_attention_mask"][1, 0] &= torch.rand(16, 16) < 0.98
    program.verify(kwargs=holes, seeds=())
    hidden = _inputs([(16, 16), (0, 0)], [(0, 0)])  # images without a patch that the mask shows
    program.verify(kwargs=hidden, seeds=())


@pytest.mark.parametrize("kind", _CAPTURED)
def test_padding_alone(kind: str) -> None:
    """If all images are padding, some models take the first image, and others refuse it."""
    torch.manual_seed(0)
    model = States(kind)
    program = onnxplug.to_onnx(model, kwargs=_inputs(*_EXAMPLE), dynamic_shapes=_DYNAMIC)
    inputs = _inputs([None, None], [None, None])
    if kind in ("SmolVLM", "ModernVBert"):
        inputs["input_ids"][1, 2 : 2 + _TOKENS] = _IMAGE
        inputs["pixel_attention_mask"][0, 0, :8] = True
        program.verify(kwargs=inputs, seeds=())
        return
    with pytest.raises(RuntimeError, match="reshape"), torch.no_grad():
        model(**inputs)
    with pytest.raises(onnxplug.OnnxplugError, match="out of data bounds"):
        program(**inputs)


@_NOT_WITH_29
def test_images_of_any_size() -> None:
    """Idefics2's number of tokens is the same for any size, with a table of 4 x 4; without a mask all is shown."""
    torch.manual_seed(0)
    model = States("Idefics2")
    sizes = {3: "height", 4: "width"}
    dynamic = {**_DYNAMIC, "pixel_values": {**_DYNAMIC["pixel_values"], **sizes}}
    dynamic["pixel_attention_mask"] = {**_DYNAMIC["pixel_attention_mask"], 2: "height", 3: "width"}
    program = onnxplug.to_onnx(model, kwargs=_inputs(*_EXAMPLE, height=16, width=24), dynamic_shapes=dynamic)
    cases: list[tuple[tuple[int, int], tuple[_Row, ...]]] = [
        ((30, 9), ([(30, 9)], [None], [(13, 8)])),
        ((4, 4), ([(4, 4), (4, 3)],)),
        ((40, 28), ([(40, 28), (28, 24)], [(12, 28), (40, 12)])),
    ]
    for (height, width), rows in cases:
        program.verify(kwargs=_inputs(*rows, height=height, width=width), seeds=())
    without = {name: value for name, value in _inputs(*_EXAMPLE).items() if name != "pixel_attention_mask"}
    del dynamic["pixel_attention_mask"]
    program = onnxplug.to_onnx(model, kwargs=without, dynamic_shapes=dynamic)
    inputs = _inputs([None, (1, 1)], [(1, 1), (1, 1)], [None, None], height=20, width=13)
    del inputs["pixel_attention_mask"]
    program.verify(kwargs=inputs, seeds=())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_features(kind: str) -> None:
    """The features of images and masks at random."""
    from onnxplug_transformers.real_images import any_number_of_real_images

    torch.manual_seed(0)
    model: Any = _model(kind)
    for count in range(1, 6):
        inputs = _inputs(*([(16, 16)] * 3 for _ in range(count)))
        pixels = inputs["pixel_values"] * (torch.rand(count, 3) < 0.6)[:, :, None, None, None]
        pixels[0, 0, 0, 0, 0] = 1
        mask = torch.rand(count, 3, 16, 16) < (0.3 if count % 2 else 0.99)
        for given in (mask, mask.long(), None):
            with torch.no_grad():
                before = model.get_image_features(pixels, given)
                with any_number_of_real_images():
                    after = model.get_image_features(pixels, given)
            assert [x.shape for x in after.pooler_output] == [x.shape for x in before.pooler_output]
            assert torch.equal(torch.cat(after.pooler_output), torch.cat(before.pooler_output))
            assert torch.equal(after.last_hidden_state, before.last_hidden_state)


@_NOT_WITH_29
@pytest.mark.parametrize("kind", ["SmolVLM", "Idefics2"])
def test_static_batch(kind: str) -> None:
    """With a static batch, SmolVLM's features of each row are outputs of their own."""
    torch.manual_seed(0)
    model = _model(kind)
    dynamic = {"pixel_values": {1: "images"}, "pixel_attention_mask": {1: "images"}, "input_ids": {1: "sequence"}}
    program = onnxplug.to_onnx(model, kwargs=_inputs(*_EXAMPLE), dynamic_shapes=dynamic)
    program.verify(kwargs=_inputs([(16, 16), (9, 9), None, (9, 9)], [None, (16, 16)], text=9), seeds=())
    program.verify(kwargs=_inputs([(16, 16)], [None]), seeds=())
