"""SuperPoint, SuperGlue and LightGlue: any number of images, of keypoints in each, and of pairs that are done early."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from onnxplug_transformers.keypoints import any_number_of_keypoints, lightly_matched
from torch import nn

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "matching": ({"rtol": 1e-4, "atol": 1e-4}, "four layers of attention, over other numbers of hidden keypoints")
}
_SUPERPOINT = {"encoder_hidden_sizes": [8, 8, 16, 16], "decoder_hidden_size": 16, "descriptor_decoder_dim": 32}
_MORE: dict[str, dict[str, Any]] = {
    "SuperPointForKeypointDetection": {},
    "SuperGlueForKeypointMatching": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "keypoint_encoder_sizes": [8, 16, 32],
        "gnn_layers_types": ["self", "cross"],
        "sinkhorn_iterations": 5,
    },
    "LightGlueForKeypointMatching": {"descriptor_dim": 32, "num_attention_heads": 4, "num_hidden_layers": 4},
}


def _model(name: str, **more: Any) -> nn.Module:
    import transformers

    settings: dict[str, Any] = {**_SUPERPOINT, **more}
    if name != "SuperPointForKeypointDetection":
        settings = {**_MORE[name], "keypoint_detector_config": {"model_type": "superpoint", **settings}}
    config = getattr(transformers, name.partition("For")[0] + "Config")(**settings)
    model: nn.Module = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def _images(name: str, count: int, height: int, width: int) -> torch.Tensor:
    images = torch.rand(2 * count, 3, height, width)
    images[-1] = 0.5  # it has fewer keypoints than the other images
    return images if name == "SuperPointForKeypointDetection" else images.reshape(count, 2, 3, height, width)


@pytest.mark.parametrize("limit", [-1, 0, 5])
def test_keypoints_are_those_that_an_image_alone_has(limit: int) -> None:
    model = _model("SuperPointForKeypointDetection", max_keypoints=limit)
    for images in (_images("SuperPointForKeypointDetection", 2, 64, 48), torch.rand(1, 3, 32, 72)):
        with torch.no_grad():
            expected = model(images)
            with any_number_of_keypoints():
                results = model(images)
                as_tuple = model(images, return_dict=False)
        assert limit <= 0 or len(set(expected.mask.sum(1).tolist())) <= 2
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value)
        assert len(as_tuple) == len(expected)


def test_labels_are_left_to_the_model() -> None:
    with any_number_of_keypoints(), pytest.raises(ValueError, match="does not support training"):
        _model("SuperPointForKeypointDetection")(torch.rand(1, 3, 32, 32), labels=torch.zeros(1))


@pytest.mark.parametrize("name", ["SuperPointForKeypointDetection", "LightGlueForKeypointMatching"])
def test_a_class_of_the_user(name: str) -> None:
    model = _model(name)
    model.__class__ = type("Own", (type(model),), {"__module__": __name__})
    images = _images(name, 2, 32, 40)
    program = onnxplug.to_onnx(model, kwargs={"pixel_values": images}, dynamic_shapes={"pixel_values": {0: "batch"}})
    program.verify(args=(), kwargs={"pixel_values": _images(name, 1, 32, 40)}, seeds=())


@pytest.mark.parametrize("name", list(_MORE))
def test_any_number_of_images_and_keypoints(name: str) -> None:
    model = _model(name)
    images = _images(name, 2, 48, 64)
    rank = images.dim()
    axes = {0: "batch", rank - 2: "height", rank - 1: "width"}
    program = onnxplug.to_onnx(model, kwargs={"pixel_values": images}, dynamic_shapes={"pixel_values": axes})
    blank = torch.zeros_like(_images(name, 1, 32, 40))
    for others in (images, _images(name, 3, 64, 56), _images(name, 1, 32, 40), blank):
        program.verify(args=(), kwargs={"pixel_values": others}, seeds=())


def test_all_layers_and_all_keypoints() -> None:
    """LightGlue that neither stops early nor drops keypoints."""
    torch.manual_seed(0)
    name = "LightGlueForKeypointMatching"
    model: Any = _model(name)
    model.depth_confidence = model.width_confidence = -1
    model.filter_threshold = 1e-5
    images = _images(name, 2, 48, 64)
    with torch.no_grad():
        assert (model(images).matches >= 0).any()
    axes = {0: "batch", 3: "height", 4: "width"}
    program = onnxplug.to_onnx(model, kwargs={"pixel_values": images}, dynamic_shapes={"pixel_values": axes})
    for others in (images, _images(name, 3, 64, 56), _images(name, 1, 32, 40)):
        program.verify(args=(), kwargs={"pixel_values": others}, seeds=())


def _weigh(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Gives a model weights with which pairs of images are done at different layers."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
            if "token_confidence" in name or "matchability" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.4 + ("bias" in name))
            elif "final_projection" in name:
                parameter.mul_(1 + 10 * torch.rand(()))
    model.depth_confidence, model.width_confidence = (0.3 + 0.65 * torch.rand(2)).tolist()
    model.filter_threshold = 10 ** (-1 - 4 * torch.rand(()).item())


def _points(number: int) -> dict[str, Any]:
    """Keypoints of pairs of images, of which some have fewer."""
    pairs, count = 1 + number % 4, (1, 2, 5, 9, 17)[number % 5]
    counts = torch.randint(0, count + 1, (pairs, 2, 1)) if number % 3 else torch.full((pairs, 2, 1), count)
    return {
        "keypoints": 64 * torch.rand(pairs, 2, count, 2),
        "descriptors": torch.randn(pairs, 2, count, 32),
        "height": 48,
        "width": 64,
        "mask": (torch.arange(count) < counts).int(),
    }


def test_pairs_that_are_done_early() -> None:
    model = _model("LightGlueForKeypointMatching")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    layers: Counter[int] = Counter()
    matched = 0
    for number in range(60):
        _weigh(model, weights)
        arguments = _points(number)
        with torch.no_grad():
            results = lightly_matched(model, **arguments)
            try:
                expected = model._match_image_pair(**arguments)
            except (IndexError, RuntimeError):  # transformers' own: some pairs are done and others reach the last layer
                continue
        for result, value in zip(results[:3], expected[:3], strict=True):
            torch.testing.assert_close(result, value, **LOOSER["matching"][0])
        layers.update(expected[2].flatten().tolist())
        matched += int((expected[0] >= 0).sum())
    assert min(layers[1], layers[2], layers[3], matched) > 20


class Matching(nn.Module):
    """The matching of a LightGlue model, of given keypoints."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, keypoints: torch.Tensor, descriptors: torch.Tensor, mask: torch.Tensor) -> Any:
        chosen = (mask.sum((0, 1)) > 0).nonzero()[:, 0]  # their number depends on the values
        keypoints, descriptors, mask = (x.index_select(2, chosen) for x in (keypoints, descriptors, mask))
        return self.model._match_image_pair(keypoints, descriptors, 48, 64, mask=mask)[:3]


@pytest.mark.parametrize("seed", range(2))
def test_an_exported_model_stops_early(seed: int) -> None:
    torch.manual_seed(seed)
    model = _model("LightGlueForKeypointMatching")
    _weigh(model, {name: parameter.detach().clone() for name, parameter in model.named_parameters()})

    def drawn(number: int) -> tuple[torch.Tensor, ...]:
        points = _points(number)
        return points["keypoints"], points["descriptors"], points["mask"]

    axes = {0: "batch", 2: "points"}
    program = onnxplug.to_onnx(Matching(model), drawn(7), dynamic_shapes=(axes, axes, axes))
    compared = 0
    for number in range(8):
        args = drawn(number)
        try:
            Matching(model)(*args)
        except (IndexError, RuntimeError):
            continue
        program.verify(args=args, seeds=())
        compared += 1
    assert compared > 2
