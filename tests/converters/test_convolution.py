"""Convolutions with weights that are inputs, of dynamic size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from tests.support.check import check
from tests.support.tolerances import looser

CASES: dict[str, tuple[Any, tuple[torch.Size | tuple[int, ...], ...], Any, tuple[tuple[int, ...], ...]]] = {
    "1d": (
        lambda x, w: F.conv1d(x, w, padding="same"),
        ((2, 3, 9), (4, 3, 4)),
        {"x": {0: "b", 2: "n"}, "w": {0: "o", 2: "k"}},
        ((1, 3, 7), (2, 3, 1)),
    ),
    "dilation, one axis": (
        lambda x, w: F.conv2d(x, w, padding="same", dilation=(2, 1)),
        ((2, 3, 9, 8), (4, 3, 4, 3)),
        {"x": {0: "b", 2: "n"}, "w": {2: "k"}},
        ((3, 3, 5, 8), (4, 3, 3, 3)),
    ),
    "a single image, groups": (
        lambda x, w: F.conv2d(x, w, padding="same", groups=2),
        ((4, 9, 8), (6, 2, 2, 3)),
        {"x": {1: "n"}, "w": {2: "k", 3: "l"}},
        ((4, 6, 8), (6, 2, 5, 4)),
    ),
    "other channels": (
        lambda x, w: F.conv2d(x, w, padding="same"),
        ((2, 3, 9, 8), (4, 3, 3, 2)),
        {"x": {1: "c"}, "w": {0: "o", 1: "c"}},
        ((2, 1, 9, 8), (7, 1, 3, 2)),
    ),
    "integers": (
        lambda x, w: F.conv1d((x * 5).long(), (w * 5).long(), padding="same"),
        ((2, 3, 9), (4, 3, 4)),
        {"x": {2: "n"}, "w": {2: "k"}},
        ((2, 3, 7), (4, 3, 3)),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", CASES)
def test_same_padding_of_a_dynamic_kernel(name: str, opset: int) -> None:
    function, sizes, shapes, others = CASES[name]

    def model(x: torch.Tensor, w: torch.Tensor) -> Any:
        return function(x, w)

    program = onnxplug.to_onnx(
        model, tuple(map(torch.randn, sizes)), dynamic_shapes=shapes, opset_version=opset, verify=True
    )
    inputs = tuple(map(torch.randn, others))
    torch.testing.assert_close(program(*inputs)[0], model(*inputs), **looser("core"))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_with_a_dynamic_number_of_channels(groups: int, seeded: None) -> None:
    dynamic = ({0: "batch", 2: "n"}, {1: "channels", 2: "k"})
    sizes = ((2, 4, 5), (4, 3, 3)), ((3, 4, 7), (4, 5, 2))
    first, other = (tuple(map(torch.randn, pair)) for pair in sizes)
    check(
        lambda x, w: F.conv_transpose1d(x, w, groups=groups), *first, dynamic=dynamic, others=[other], **looser("core")
    )
