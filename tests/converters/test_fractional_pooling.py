"""Fractional pools of images and volumes of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onnxplug


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("spatial", [2, 3])
def test_dynamic_sizes(spatial: int, opset: int) -> None:
    pool = F.fractional_max_pool2d_with_indices if spatial == 2 else F.fractional_max_pool3d_with_indices

    def model(x: torch.Tensor, samples: torch.Tensor) -> Any:
        return pool(x, 2, output_size=(3, 2, 4)[:spatial], _random_samples=samples)

    program = onnxplug.to_onnx(
        model,
        (torch.randn(2, 3, 8, 9, 7)[..., *[0] * (3 - spatial)], torch.rand(2, 3, spatial)),
        dynamic_shapes={"x": {0: "b", 2: "n", 3: "m"}, "samples": {0: "b"}},
        opset_version=opset,
        verify=True,
    )
    x, samples = torch.randn(1, 3, 5, 12, 7)[..., *[0] * (3 - spatial)], torch.rand(1, 3, spatial)
    values, places = program(x, samples)
    wanted = model(x, samples)
    torch.testing.assert_close(values, wanted[0])
    assert torch.equal(places, wanted[1])


def test_a_layer_of_volumes() -> None:
    """The layer has its samples itself; a single volume without a batch."""
    layer = nn.FractionalMaxPool3d(2, output_size=(2, 3, 2), _random_samples=torch.rand(1, 3, 3))
    shapes = ({1: "n", 2: "m"},)
    program = onnxplug.to_onnx(layer.eval(), (torch.randn(3, 8, 9, 7),), dynamic_shapes=shapes, verify=True)
    x = torch.randn(3, 5, 6, 7)
    torch.testing.assert_close(program(x)[0], layer(x))
