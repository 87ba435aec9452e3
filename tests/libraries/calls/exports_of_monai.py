"""``monai.networks.utils.convert_to_onnx``, and the networks by ``torch.onnx.export`` as ``monai.bundle onnx_export`` calls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import monai.networks.nets as nets
import pytest
import torch

from tests.libraries.compare import assert_same

_UNET = {"in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2)}
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "UNet": (lambda: nets.UNet(2, **_UNET), (1, 32, 32)),
    "UNet of volumes": (lambda: nets.UNet(3, **_UNET, num_res_units=1), (1, 16, 16, 16)),
    "BasicUNet": (lambda: nets.BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 16, 4)), (1, 32, 32)),
    "AttentionUnet": (lambda: nets.AttentionUnet(2, 1, 2, (4, 8, 16), (2, 2)), (1, 32, 32)),
    "SegResNet": (lambda: nets.SegResNet(2, 8, 1, 2), (1, 32, 32)),
    "DynUNet": (lambda: nets.DynUNet(2, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2], filters=[4, 8, 16]), (1, 32, 32)),
    "VNet": (lambda: nets.VNet(2, 1, 2), (1, 32, 32)),
    "DenseNet": (lambda: nets.DenseNet(2, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2)), (1, 32, 32)),
    "SENet154": (
        lambda: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=3, layers=(1, 1, 1, 1)),
        (1, 32, 32),
    ),
    "EfficientNetBN": (
        lambda: nets.EfficientNetBN("efficientnet-b0", False, spatial_dims=2, in_channels=1),
        (1, 64, 64),
    ),
    "ViT": (lambda: nets.ViT(1, (32, 32), (16, 16), 32, 48, 2, 4, spatial_dims=2), (1, 32, 32)),
    "UNETR": (lambda: nets.UNETR(1, 2, (32, 32), 4, 32, 48, 4, spatial_dims=2), (1, 32, 32)),
    "SwinUNETR": (lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), (1, 64, 64)),
    "AutoEncoder": (lambda: nets.AutoEncoder(2, 1, 1, (4, 8), (2, 2)), (1, 32, 32)),
    "HighResNet": (lambda: nets.HighResNet(2, 1, 2), (1, 32, 32)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_convert_to_onnx(name: str, tmp_path: Path) -> None:
    from monai.networks.utils import convert_to_onnx

    torch.manual_seed(0)
    make, size = NETWORKS[name]
    model, file = make().eval(), str(tmp_path / "model.onnx")
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "batch"}, "y": {0: "batch"}}}
    if name in ("ViT", "UNETR", "SwinUNETR"):  # several outputs, or a model that fixes the batch in a trace
        names["output_names"] = ["y"]
    convert_to_onnx(model, [torch.rand(2, *size)], filename=file, use_trace=True, opset_version=17, **names)
    assert_same(file, model, (torch.rand(2, *size),), (torch.rand(3, *size),))
