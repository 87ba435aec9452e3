"""``timm.utils.onnx.onnx_export``, as ``onnx_export.py`` of timm calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.libraries.compare import assert_same
from tests.models.vision import timm_model

#: Families whose small model is exported in seconds.
FAMILIES = """
byobnet convnext efficientnet edgenext ghostnet lcnetv2 levit mambaout maxxvit mobilevit naflexvit nfnet repghost resnet
swin_transformer_v2_cr vision_transformer vision_transformer_relpos vision_transformer_sam
""".split()


@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_export(family: str, tmp_path: Path) -> None:
    from timm.utils.onnx import onnx_export

    model, (images,) = timm_model(family)
    file = str(tmp_path / "model.onnx")
    onnx_export(model, file, images, check_forward=False)
    assert_same(file, model, (images,), (torch.rand_like(images[:1]),))
