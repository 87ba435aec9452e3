"""Patches of the hook onnxplug_patches that are functions of the captured module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.capture.patching import patched
from onnxplug.testing import IsolatedRegistry


class Packed(nn.Parameter):
    """A weight in bytes with its factor as an attribute, as libraries of quantisation have: torch.export loses the attribute."""

    factor: torch.Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Packed(torch.randint(-9, 9, (4,), dtype=torch.int8), requires_grad=False)
        self.weight.factor = torch.tensor(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.weight.factor


class Plugin:
    @staticmethod
    @onnxplug.hookimpl
    def onnxplug_patches() -> list[Any]:
        return [plain_weights, contextlib.nullcontext, contextlib.nullcontext()]


@contextlib.contextmanager
def plain_weights(module: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for layer in module.modules():
            if isinstance(layer, Layer):
                layer.register_buffer("factor", layer.weight.factor, persistent=False)
                stack.callback(delattr, layer, "factor")
                stack.enter_context(patched(layer, "forward", lambda x, layer=layer: x * layer.weight * layer.factor))
        yield


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_function_with_a_parameter_gets_the_module(strict: bool | None) -> None:
    model = nn.Sequential(Layer(), nn.ReLU(), Layer()).eval()
    registry = IsolatedRegistry()
    registry.add_plugin(Plugin, name="packed", distribution="onnxplug-packed", version="1")
    with registry.active():
        program = onnxplug.to_onnx(model, (torch.randn(2, 4),), dynamic_shapes=({0: "rows"},), strict=strict)
    for rows in (2, 5):
        x = torch.randn(rows, 4) * rows
        torch.testing.assert_close(program(x)[0], model(x))
    stored = program.model.graph.initializers
    assert {name: str(value.dtype) for name, value in stored.items() if name.startswith("0.")} == {
        "0.weight": "INT8",
        "0.factor": "FLOAT",
    }
    assert not [layer for layer in model if hasattr(layer, "factor") or "forward" in vars(layer)]
