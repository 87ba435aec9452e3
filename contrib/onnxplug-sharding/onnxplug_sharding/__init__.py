"""An onnxplug plugin: placements of a model's parameters on several devices, as ONNX's sharding specifications."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxplug import PluginInfo, hookimpl

if TYPE_CHECKING:
    from onnxplug_sharding.annotate import shard as shard
    from onnxplug_sharding.layout import Split as Split
    from onnxplug_sharding.reading import Shardings as Shardings, read_shardings as read_shardings

__all__ = ["Shardings", "Split", "read_shardings", "shard"]

_HOME = {"shard": "annotate", "Split": "layout", "Shardings": "reading", "read_shardings": "reading"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"onnxplug_sharding.{_HOME[name]}"), name)
    raise AttributeError(f"module 'onnxplug_sharding' has no attribute {name!r}")


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description: the defaults."""
    return PluginInfo()


@hookimpl
def onnxplug_commands(app: Any) -> None:
    """``onnxplug shardings``."""
    from onnxplug_sharding.cli import shardings

    app.command()(shardings)
