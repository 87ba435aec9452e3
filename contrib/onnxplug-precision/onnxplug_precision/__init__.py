"""An onnxplug plugin: models in half precision, and quantised ones."""

from __future__ import annotations

from typing import Any

from onnxplug import PluginInfo, hookimpl


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description: the defaults."""
    return PluginInfo()


@hookimpl
def onnxplug_commands(app: Any) -> None:
    """``onnxplug convert``."""
    from onnxplug_precision.cli import convert

    app.command()(convert)
