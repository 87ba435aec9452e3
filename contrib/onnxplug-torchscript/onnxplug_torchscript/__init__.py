"""An onnxplug plugin: ``to_onnx`` takes models of TorchScript, and the command line files of ``torch.jit.save``."""

from __future__ import annotations

from onnxplug import ModelSource, PluginInfo, hookimpl


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What the plugin says about itself."""
    return PluginInfo()


@hookimpl
def onnxplug_sources() -> list[ModelSource]:
    """ScriptModules and ScriptFunctions, and files of ``torch.jit.save``; of others with such names an error says what they are."""
    return [
        ModelSource(
            suffixes=(".pt", ".ts", ".torchscript", ".pth", ".bin", ".ckpt", ".safetensors"),
            load="onnxplug_torchscript.files:load",
            accepts="onnxplug_torchscript.files:is_script",
            module="onnxplug_torchscript.module:from_script",
            help="FILE is one of torch.jit.save.",
        )
    ]
