"""Images and the tiles that they are cut into: any number of images, whose sizes are an input."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils import output_capturing

import onnxplug

pytestmark = pytest.mark.skipif(
    not hasattr(output_capturing, "select_hidden_states"), reason="this version of transformers is left as it is"
)

_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIDE, _IMAGE = 16, 98
_GRIDS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
_DYNAMIC: dict[str, Any] = {
    "pixel_values": {0: "images", 1: "tiles"},
    "image_sizes": {0: "images"},
    "input_ids": {1: "sequence"},
}
KINDS = ["LlavaNext", "LlavaOnevision", pytest.param("LlavaNextVideo", marks=pytest.mark.long), "Granite4Vision"]


def _model(kind: str) -> Any:
    import transformers

    text = {**_SIZES, "vocab_size": 99, "num_key_value_heads": 2, "max_position_embeddings": 512}
    vision = {**_SIZES, "model_type": "clip_vision_model", "image_size": _SIDE, "patch_size": 4}
    settings: dict[str, Any] = {"vision_config": vision, "image_grid_pinpoints": _GRIDS, "image_token_id": _IMAGE}
    if kind == "Granite4Vision":
        vision |= {"model_type": "siglip_vision_model", "hidden_size": 64}  # the query's heads are of 64
        query = {**_SIZES, "model_type": "blip_2_qformer", "encoder_hidden_size": 32, "num_hidden_layers": 1}
        settings |= {
            "text_config": {"model_type": "granite", **text},
            "qformer_config": query,
            "downsample_rate": "1/2",
        }
        settings |= {
            "deepstack_layer_map": [[-1, 0]],
            "spatial_vision_layer": -2,
            "spatial_target_layers": [0, 1, 0, 1],
        }
        settings["vision_feature_select_strategy"] = "full"
    elif kind == "LlavaOnevision":
        vision["model_type"] = "siglip_vision_model"
        settings |= {"text_config": {"model_type": "llama", **text}, "vision_aspect_ratio": "anyres_max_2"}
        settings |= {"image_grid_pinpoints": _GRIDS, "image_token_index": _IMAGE}
    else:
        settings |= {"text_config": {"model_type": "llama", **text}, "image_token_index": _IMAGE}
    model: Any = getattr(transformers, f"{kind}Model")(getattr(transformers, f"{kind}Config")(**settings))
    model.config.use_cache = model.config.text_config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


class States(nn.Module):
    """The states of the text. Granite's features are a tensor for each image."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = _model(kind)

    def forward(self, pixel_values: Any, image_sizes: Any, input_ids: Any) -> Any:
        outputs = self.model(pixel_values=pixel_values, image_sizes=image_sizes, input_ids=input_ids)
        return outputs.last_hidden_state


def _inputs(model: Any, *sizes: tuple[int, int], text: int = 5, more: int = 0) -> dict[str, torch.Tensor]:
    """One text with all images, and ``more`` tiles of padding."""
    from transformers.image_processing_utils import select_best_resolution

    best = [select_best_resolution(size, _GRIDS) for size in sizes]
    tiles = max(height * width for height, width in best) // _SIDE**2 + 1 + more
    pixels = torch.randn(len(sizes), tiles, 3, _SIDE, _SIDE)
    image_sizes = torch.tensor(sizes)
    with torch.no_grad():
        outputs = model.get_image_features(pixels, image_sizes, return_dict=True)
    tokens = outputs.pooler_output if "pooler_output" in outputs else outputs.deepstack_features[0][1]
    ids = torch.cat([torch.full((1, sum(map(len, tokens))), _IMAGE), torch.randint(1, 98, (1, text))], 1)
    return {"pixel_values": pixels, "image_sizes": image_sizes, "input_ids": ids}


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_any_size(kind: str) -> None:
    torch.manual_seed(0)
    model = States(kind)
    example = _inputs(model.model, (20, 30), (31, 17))
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=_DYNAMIC)
    for sizes in [((16, 16),), ((100, 1), (1, 100), (3, 3)), ((640, 480), (23, 71), (480, 641), (32, 32), (5, 16))]:
        program.verify(kwargs=_inputs(model.model, *sizes, text=8, more=len(sizes) - 1), seeds=())


class Features(nn.Module):
    """LLaVA-OneVision's tokens of all images; each text has one or several images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _model("LlavaOnevision")

    def forward(self, pixel_values: Any, image_sizes: Any, batch_num_images: Any = None) -> Any:
        kwargs = {"batch_num_images": batch_num_images, "return_dict": True}
        return torch.cat(self.model.get_image_features(pixel_values, image_sizes, **kwargs).pooler_output)


def test_texts_of_several_images() -> None:
    """An image is cut into tiles where it is its text's only image; images of many tiles are made smaller."""
    torch.manual_seed(0)
    model = Features()

    def case(sizes: list[tuple[int, int]], *numbers: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(len(sizes), 5, 3, _SIDE, _SIDE), torch.tensor(sizes), torch.tensor(numbers)

    dynamic = ({0: "images", 1: "tiles"}, {0: "images"}, {0: "texts"})
    program = onnxplug.to_onnx(model, case([(20, 30), (31, 17), (32, 32)], 2, 1), dynamic_shapes=dynamic)
    for given in (
        case([(32, 32)], 1),
        case([(32, 32), (8, 30), (5, 16), (31, 30)], 1, 1, 1, 1),
        case([(640, 480), (23, 71), (480, 641), (32, 32), (5, 16)], 1, 3, 0, 1),
        case([(32, 32), (16, 16)], 2),
        case([(100, 1), (1, 100)], 1, 1),
    ):
        program.verify(args=given, seeds=())
    pixels, sizes, _ = case([(32, 32), (8, 30)], 2)
    with pytest.raises(onnxplug.OnnxplugError, match="out of data bounds"):
        program(pixels, sizes, torch.tensor([1]))  # PyTorch leaves out the second image


class _Fewer(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, shown: torch.Tensor) -> torch.Tensor:
        from onnxplug_transformers.tiled_images import _fewer

        return _fewer(shown, self.most)


@pytest.mark.parametrize(("count", "side"), [(9, 27), (1, 14), (4, 7)])
def test_sizes_of_smaller_images(count: int, side: int) -> None:
    """The sizes are Python's, also where a quotient is an integer but for its last bit."""
    most = count * side**2
    sizes = [(high, wide) for high in range(1, 300, 3) for wide in range(1, 300, 7)]
    sizes += [(times * side, side) for times in range(1, 7) for side in range(1, 700)]
    expected = []
    for high, wide in sizes:
        ratio = math.sqrt(high * wide / most)
        expected.append([int(high // ratio), int(wide // ratio)] if ratio > 1.1 else [high, wide])
    shown = torch.tensor(sizes)
    (got,) = onnxplug.to_onnx(_Fewer(most), (shown[:9],), dynamic_shapes=({0: "images"},))(shown)
    assert got.tolist() == expected
    assert sum(ratio > 1.1 for ratio in (shown.prod(-1) / most).sqrt().tolist()) > 100


def test_tiles_in_one_row() -> None:
    torch.manual_seed(0)
    model = States("LlavaNext")

    def inputs(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
        made = _inputs(model.model, *sizes)
        counts = (3 if size != (32, 32) else 5 for size in sizes)
        made["pixel_values"] = torch.cat([x[:count] for x, count in zip(made["pixel_values"], counts, strict=True)])
        return made

    dynamic = {**_DYNAMIC, "pixel_values": {0: "tiles"}}
    program = onnxplug.to_onnx(model, kwargs=inputs((16, 30), (32, 32)), dynamic_shapes=dynamic)
    program.verify(kwargs=inputs((32, 16), (15, 31), (32, 32)), seeds=())
    short = inputs((32, 16), (15, 31))
    for pixels in (short["pixel_values"][:5], torch.cat([short["pixel_values"]] * 2)):
        wrong = {**short, "pixel_values": pixels}
        with pytest.raises(Exception, match=r"."), torch.no_grad():
            model(**wrong)
        with pytest.raises(onnxplug.OnnxplugError, match="out of data bounds"):
            program(**wrong)


def test_sizes_that_transformers_refuses() -> None:
    torch.manual_seed(0)
    model = States("LlavaNext")
    example = _inputs(model.model, (20, 30), (31, 17))
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=_DYNAMIC)
    few = {**example, "pixel_values": example["pixel_values"][:, :2]}
    for wrong in (few, {**example, "image_sizes": torch.tensor([[20, 30], [0, 17]])}):
        with pytest.raises(Exception, match=r"."), torch.no_grad():
            model(**wrong)
        with pytest.raises(onnxplug.OnnxplugError, match="out of data bounds"):
            program(**wrong)


def test_grids_and_padding() -> None:
    """Grids and padding for random sizes, with ties and with products that rounding makes smaller by one."""
    from onnxplug_transformers.tiled_images import _padding, best_grids
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    random.seed(0)
    tables = [_GRIDS, [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]]
    tables.append(
        [[384 * height, 384 * width] for height in range(1, 9) for width in range(1, 9) if height * width < 10]
    )
    for table, side in zip(tables, (16, 336, 384), strict=True):
        sizes = [
            (random.randint(1, limit), random.randint(1, limit)) for limit in (9, 60, 800, 5000) for _ in range(500)
        ]
        sizes += [(size, size) for size in range(1, 200)] + [(9_999_999, 7), (7, 9_999_999)]
        grids = best_grids(torch.tensor(sizes), table, side)
        best = [select_best_resolution(size, table) for size in sizes]
        assert grids.tolist() == [[height // side, width // side] for height, width in best]
        for cells in (side // 14 or 4, 27):
            padding = _padding(torch.tensor(sizes), grids * cells)
            shown = (grids * cells - 2 * padding).tolist()
            for size, grid, (rows, columns) in zip(sizes, (grids * cells).tolist(), shown, strict=True):
                assert tuple(unpad_image(torch.empty(1, *grid), size).shape[1:]) == (rows, columns), (size, grid)


def test_a_version_of_transformers_without_a_name_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxplug_transformers

    monkeypatch.delattr(output_capturing, "select_hidden_states")
    monkeypatch.delitem(sys.modules, "onnxplug_transformers.tiled_images", raising=False)
    monkeypatch.delattr(onnxplug_transformers, "tiled_images", raising=False)
    (patch,) = (p for p in onnxplug_transformers.onnxplug_patches() if "tiled_images" in p.__qualname__)
    with patch():
        pass
    assert "onnxplug_transformers.tiled_images" not in sys.modules
