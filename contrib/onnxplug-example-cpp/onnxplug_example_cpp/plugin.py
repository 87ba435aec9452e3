"""The plugin: a domain, the rule that emits its operator, and the library that runs it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from onnxplug import Domain, OpSample, OrtLibrary, PluginInfo, Rule, Unsupported, hookimpl

DOMAIN = "onnxplug.example"
DOUBLE = 11  # onnx.TensorProto.DOUBLE


def leaky_sum(g: Any, node: Any) -> Any:
    """leaky_sum(Tensor x, float leak) -> Tensor"""
    x, leak = node.args
    if x.dtype == DOUBLE and struct.unpack("f", struct.pack("f", leak))[0] != leak:
        raise Unsupported(f"leak={leak} of a float64 tensor: ONNX's float attributes have 32 bits, which round it")
    return g.domain(DOMAIN).LeakySum(x, leak=float(leak))


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translation."""
    return [Rule("example_cpp::leaky_sum", leaky_sum)]


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """The operator's domain."""
    return [Domain(DOMAIN, 1)]


@hookimpl
def onnxplug_runtime() -> list[OrtLibrary]:
    """The kernel: built with the package, beside this file."""
    return [OrtLibrary(Path(__file__).with_name("libexample_ort.so"))]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operator with."""

    def inputs() -> tuple[Any, float]:
        import torch

        import onnxplug_example_cpp  # noqa: F401  (loads the operator)

        return torch.linspace(-3, 3, 12).reshape(3, 4), 0.5

    return [OpSample("example_cpp::leaky_sum", inputs)]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operator's namespace."""
    return PluginInfo(api=1, namespaces=("example_cpp",))
