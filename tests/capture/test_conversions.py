"""``module.to(...)`` in a ``forward``."""

from __future__ import annotations

import torch
from torch import nn

import onnxplug


class Router(nn.Module):
    """Converts its layer in every call, as routers of mixtures of experts do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(self.dtype)
        return torch.as_tensor(self.classifier(x.to(self.dtype)))


def test_a_conversion_that_changes_nothing_is_no_write() -> None:
    before = nn.Module._apply
    model = Router(torch.float32).eval()
    program = onnxplug.to_onnx(model, (torch.randn(2, 4),), dynamic_shapes=({0: "batch"},), verify=True)
    assert [value.name for value in program.model.graph.outputs] == ["output"]
    assert nn.Module._apply is before


def test_layers_that_are_copies() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(Router(torch.float32), nn.Linear(3, 4)) for _ in range(4)))
    onnxplug.to_onnx(model.eval(), (torch.randn(2, 4),), dynamic_shapes=({0: "batch"},), verify=True)
