"""An onnxplug plugin in the place of ``torch.onnx.export``: its signature and arguments, and programs that call it."""

from __future__ import annotations

from typing import Any

from onnxplug import PluginInfo, hookimpl


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description of itself."""
    return PluginInfo()


@hookimpl
def onnxplug_commands(app: Any) -> None:
    """``onnxplug run``."""
    from onnxplug.cli.options import plugin_options
    from onnxplug_torch_onnx.cli import SETTINGS, run

    app.command("run", context_settings=SETTINGS)(plugin_options(run))
