"""``YOLO(...).export(format="onnx")`` of each task, from its configuration and with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.libraries.compare import assert_same

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "detect, static": ("yolo11n.yaml", {}),
    "detect, dynamic": ("yolo11n.yaml", {"dynamic": True}),
    "detect without nms, dynamic": ("yolo26n.yaml", {"dynamic": True}),
    "segment": ("yolo11n-seg.yaml", {"dynamic": True}),
    "pose": ("yolo11n-pose.yaml", {"dynamic": True}),
    "obb": ("yolo11n-obb.yaml", {"dynamic": True}),
    "classify": ("yolo11n-cls.yaml", {"dynamic": True}),
    "detect of old": ("yolov8n.yaml", {"dynamic": True, "opset": 17}),
    "detect, two images": ("yolo11n.yaml", {"batch": 2, "simplify": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_export(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ultralytics import YOLO

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config, options = CASES[name]
    yolo = YOLO(config)
    seen: list[nn.Module] = []
    export = torch.onnx.export

    def spied(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(model)
        return export(model, *args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", spied)
    file = yolo.export(format="onnx", imgsz=64, **{"simplify": False, **options})
    batch = options.get("batch", 1)
    other = (torch.rand(3, 3, 96, 64),) if options.get("dynamic") else (torch.rand(batch, 3, 64, 64),)
    assert_same(file, seen[0], (torch.rand(batch, 3, 64, 64),), other)
