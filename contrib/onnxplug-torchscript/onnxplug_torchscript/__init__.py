"""An onnxplug plugin: ``to_onnx`` takes TorchScript models, and the command line takes files of ``torch.jit.save``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from onnxplug import ModelSource, PluginInfo, hookimpl


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description of itself."""
    return PluginInfo()


@hookimpl
def onnxplug_sources() -> list[ModelSource]:
    """ScriptModules, ScriptFunctions, and files of ``torch.jit.save``; other files of these suffixes are errors."""
    return [
        ModelSource(
            suffixes=(".pt", ".ts", ".torchscript", ".pth", ".bin", ".ckpt", ".safetensors"),
            load="onnxplug_torchscript.files:load",
            accepts="onnxplug_torchscript.files:is_script",
            module="onnxplug_torchscript.module:from_script",
            help="FILE is one of torch.jit.save.",
        )
    ]


@hookimpl
def onnxplug_patches() -> list[Callable[[Any], contextlib.AbstractContextManager[None]]]:
    """Replaces ScriptModules within an ordinary module, which torch.export can't capture."""
    return [_interpreted_parts]


def _interpreted_parts(module: Any) -> contextlib.AbstractContextManager[None]:
    import torch

    if not any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return contextlib.nullcontext()
    from onnxplug_torchscript.module import interpreted_parts

    return interpreted_parts(module)
