"""kornia's modules, networks and functions by ``torch.onnx.export``, and ``to_onnx`` of a chain of modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kornia
import onnx
import pytest
import torch
from torch import nn

from tests.libraries.compare import assert_same

MODULES: dict[str, Any] = {
    "Grayscale": lambda: kornia.color.RgbToGrayscale(),
    "RgbToHsv": lambda: kornia.color.RgbToHsv(),
    "RgbToLab": lambda: kornia.color.RgbToLab(),
    "GaussianBlur2d": lambda: kornia.filters.GaussianBlur2d((3, 3), (1.5, 1.5)),
    "Sobel": lambda: kornia.filters.Sobel(),
    "MedianBlur": lambda: kornia.filters.MedianBlur((3, 3)),
    "Laplacian": lambda: kornia.filters.Laplacian(5),
    "UnsharpMask": lambda: kornia.filters.UnsharpMask((3, 3), (1.5, 1.5)),
    "AdjustBrightness": lambda: kornia.enhance.AdjustBrightness(0.2),
    "Normalize": lambda: kornia.enhance.Normalize(torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.2, 0.2, 0.3])),
    "Hflip": lambda: kornia.geometry.transform.Hflip(),
    "Rot180": lambda: kornia.geometry.transform.Rot180(),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, tmp_path: Path) -> None:
    module, file = MODULES[name]().eval(), str(tmp_path / "module.onnx")
    axes = {"image": {0: "batch", 2: "height", 3: "width"}}
    options = {"input_names": ["image"], "dynamic_axes": axes, "opset_version": 17}
    torch.onnx.export(module, (torch.rand(2, 3, 20, 24),), file, **options, dynamo=False)
    assert_same(file, module, (torch.rand(2, 3, 20, 24),), (torch.rand(3, 3, 33, 18),))


FUNCTIONS: dict[str, tuple[Any, Any]] = {
    "warp_affine": (
        lambda x, m: kornia.geometry.transform.warp_affine(x, m, (10, 12)),
        lambda n: (torch.rand(n, 3, 12, 14), torch.eye(2, 3).repeat(n, 1, 1) + 0.05 * torch.rand(n, 2, 3)),
    ),
    "warp_perspective": (
        lambda x, m: kornia.geometry.transform.warp_perspective(x, m, (10, 12)),
        lambda n: (torch.rand(n, 3, 12, 14), torch.eye(3).repeat(n, 1, 1) + 0.001 * torch.rand(n, 3, 3)),
    ),
    "resize": (lambda x: kornia.geometry.transform.resize(x, (9, 17)), lambda n: (torch.rand(n, 3, 12, 14),)),
    "spatial_soft_argmax2d": (
        lambda x: kornia.geometry.subpix.spatial_soft_argmax2d(x),
        lambda n: (torch.rand(n, 3, 12, 14),),
    ),
    "harris_response": (lambda x: kornia.feature.harris_response(x), lambda n: (torch.rand(n, 1, 12, 14),)),
    "axis_angle_to_rotation_matrix": (
        lambda x: kornia.geometry.conversions.axis_angle_to_rotation_matrix(x),
        lambda n: (torch.randn(n, 3),),
    ),
    "ssim": (lambda x, y: kornia.metrics.ssim(x, y, 5), lambda n: (torch.rand(n, 3, 12, 14), torch.rand(n, 3, 12, 14))),
}


class _OfOne(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x0: torch.Tensor) -> Any:
        return self.function(x0)


class _OfTwo(_OfOne):
    def forward(self, x0: torch.Tensor, x1: torch.Tensor) -> Any:
        return self.function(x0, x1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, tmp_path: Path) -> None:
    function, inputs = FUNCTIONS[name]
    names = ["x0", "x1"][: len(inputs(2))]
    model, file = (_OfTwo if "x1" in names else _OfOne)(function).eval(), str(tmp_path / "function.onnx")
    axes = {name: {0: "batch"} for name in names}
    torch.onnx.export(model, inputs(2), file, input_names=names, dynamic_axes=axes, opset_version=17, dynamo=False)
    assert_same(file, model, inputs(2), inputs(3))


@pytest.mark.parametrize("name", ["HardNet", "TFeat", "HyNet", "SOSNet"])
def test_descriptors(name: str, tmp_path: Path) -> None:
    model, file = getattr(kornia.feature, name)(pretrained=False).eval(), str(tmp_path / "descriptor.onnx")
    options = {"input_names": ["patches"], "dynamic_axes": {"patches": {0: "count"}}, "opset_version": 17}
    torch.onnx.export(model, (torch.rand(2, 1, 32, 32),), file, **options, dynamo=False)
    assert_same(file, model, (torch.rand(2, 1, 32, 32),), (torch.rand(5, 1, 32, 32),))


def test_sequential(tmp_path: Path) -> None:
    chain = kornia.core.ImageSequential(kornia.color.RgbToGrayscale(), kornia.filters.BoxBlur((3, 3)))
    file = tmp_path / "chain.onnx"
    chain.to_onnx(str(file), pseudo_shape=[1, 3, 16, 18])
    onnx.checker.check_model(onnx.load(file))
    assert_same(file, chain, (torch.rand(1, 3, 16, 18),), (torch.rand(3, 3, 21, 19),))
