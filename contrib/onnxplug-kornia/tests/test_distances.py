"""The distance transform of images and volumes of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

pytest.importorskip("kornia")

from kornia.contrib import DistanceTransform, distance_transform

#: Tolerances that are looser than torch.testing's, with their reasons.
LOOSER = {"distances": ({"rtol": 1e-5, "atol": 1e-5}, "rounding adds up over the rounds")}


def dots(*shape: int, count: int = 1) -> Tensor:
    """Zeros, and ones at random places."""
    image = torch.zeros(shape)
    image.flatten()[torch.randperm(image.numel())[:count]] = 1
    return image


def images(axes: int) -> Iterator[tuple[Tensor]]:
    """Images, or volumes, of several sizes and kinds."""
    example, large = ((9, 11), (40, 33)) if axes == 2 else ((5, 7, 6), (14, 9, 20))
    flat, smallest = (1,) * (axes - 1), (1,) * axes
    yield (dots(2, 3, *example, count=9),)
    yield (torch.zeros(1, 3, *example),)
    yield (torch.ones(1, 3, *example),)
    yield (dots(1, 3, *large),)
    yield (dots(1, 1, *large, count=5).expand(2, 3, *large),)
    yield (torch.rand(2, 3, *example) * 0.9,)
    yield (torch.randn(2, 3, *large),)
    yield (dots(2, 3, *flat, 17),)
    yield (torch.ones(2, 3, *smallest),)
    yield (torch.full((1, 3, *smallest), 0.5),)
    for value in (float("nan"), float("inf"), -float("inf"), 1e-42):
        yield (dots(1, 3, *large, count=40) * value,)
    # Around walls of NaN, through passages as wide as the kernel, a pixel is further away than the image is long.
    walls = torch.zeros(1, 3, *large)
    walls[..., 0, 0] = 1
    walls[..., 3::8, :-3] = float("nan")
    walls[..., 7::8, 3:] = float("nan")
    yield (walls,)


def named(axes: int) -> dict[int, str]:
    return {0: "batch", **dict(zip(range(2, 2 + axes), ("height", "width", "depth")[:axes], strict=True))}


@pytest.mark.parametrize(
    ("axes", "kernel_size", "h"), [(2, 3, 0.35), (2, 5, 0.2), (2, 7, 0.45), (3, 3, 0.35), (3, 5, 0.3)]
)
def test_any_size(compare: Callable[..., Any], axes: int, kernel_size: int, h: float) -> None:
    program = compare(DistanceTransform(kernel_size, h), images(axes), ({**named(axes)},), **LOOSER["distances"][0])
    assert any(node.op_type == "Loop" for node in program.model.graph)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    model = DistanceTransform()
    inputs = [image.to(dtype) for (image,) in images(2)]
    program = onnxplug.to_onnx(model, (inputs[0],), dynamic_shapes=(named(2),))
    for image in inputs:
        torch.testing.assert_close(program(image)[0], model(image))


def test_the_function_for_static_sizes(compare: Callable[..., Any]) -> None:
    """A loop too: an unrolled one has 19 nodes for each round."""
    inputs = [(dots(1, 2, 30, 20, count=3),), (torch.zeros(1, 2, 30, 20),)]
    program = compare(lambda image: distance_transform(image, 5), inputs)
    assert len(program.model.graph) < 20


def test_behind_weights(compare: Callable[..., Any]) -> None:
    """The image depends on parameters that have gradients."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sigmoid(), DistanceTransform())
    compare(model, [(torch.randn(1, 1, 12, 13),), (torch.randn(2, 1, 20, 5),)], (named(2),), **LOOSER["distances"][0])


@pytest.mark.parametrize(
    ("options", "message"), [((4,), "odd kernel_size"), ((3, 0.0), "h above 0"), ((3, 5.0), "too large")]
)
def test_refused(options: Any, message: str) -> None:
    with pytest.raises(onnxplug.OnnxplugError, match=message):
        onnxplug.to_onnx(lambda image: distance_transform(image, *options), (torch.zeros(1, 1, 5, 5),))
