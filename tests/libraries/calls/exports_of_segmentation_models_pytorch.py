"""Models of segmentation_models.pytorch, exported as its documentation does: ``torch.onnx.export`` with dynamic axes."""

from __future__ import annotations

from pathlib import Path

import pytest
import segmentation_models_pytorch as smp
import torch

from tests.libraries.compare import assert_same

MODELS = {
    "Unet": "mobilenet_v2",
    "UnetPlusPlus": "timm-mobilenetv3_small_minimal_100",
    "MAnet": "mobilenet_v2",
    "Linknet": "mobilenet_v2",
    "FPN": "efficientnet-b0",
    "PSPNet": "resnet18",
    "PAN": "resnet18",
    "DeepLabV3": "resnet18",
    "DeepLabV3Plus": "resnet18",
    "UPerNet": "tu-test_convnext",
    "Segformer": "mit_b0",
}


@pytest.mark.parametrize("name", MODELS)
def test_export(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = smp.create_model(name, encoder_name=MODELS[name], encoder_weights=None, classes=2).eval()
    file, images = str(tmp_path / "model.onnx"), torch.rand(2, 3, 128, 160)
    axes = {"input": {0: "batch_size"}, "output": {0: "batch_size"}}
    names = {"input_names": ["input"], "output_names": ["output"], "dynamic_axes": axes}
    torch.onnx.export(
        model, images, file, export_params=True, opset_version=17, do_constant_folding=True, **names, dynamo=False
    )
    assert_same(file, model, (images,), (torch.rand(3, 3, 128, 160),))
