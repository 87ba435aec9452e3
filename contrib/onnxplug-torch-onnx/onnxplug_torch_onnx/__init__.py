"""An onnxplug plugin, in place of ``torch.onnx.export``: its signature, its arguments, and programs of others that call it."""

from __future__ import annotations

from typing import Any

from onnxplug import PluginInfo, hookimpl


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What the plugin says about itself."""
    return PluginInfo()


@hookimpl
def onnxplug_commands(app: Any) -> None:
    """``onnxplug run``."""
    from onnxplug.cli.options import plugin_options
    from onnxplug_torch_onnx.cli import SETTINGS, run

    app.command("run", context_settings=SETTINGS)(plugin_options(run))
