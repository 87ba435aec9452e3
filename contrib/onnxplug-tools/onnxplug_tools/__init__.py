"""An onnxplug plugin: commands that look at finished models, rules and plugins, or find what is wrong with an export."""

from __future__ import annotations

from typing import Any

from onnxplug import PluginInfo, hookimpl


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description of itself."""
    return PluginInfo()


@hookimpl
def onnxplug_commands(app: Any) -> None:
    """``onnxplug verify``, ``inspect``, ``compare``, ``bench``, ``diagnose``, ``bisect``, ``why``, ``ops`` and ``plugins``."""
    from onnxplug.cli.options import plugin_options
    from onnxplug_tools.cli.bench import bench
    from onnxplug_tools.cli.bisect import bisect
    from onnxplug_tools.cli.compare import compare
    from onnxplug_tools.cli.diagnose import diagnose
    from onnxplug_tools.cli.explain import ops, why
    from onnxplug_tools.cli.inspect import inspect
    from onnxplug_tools.cli.plugins import plugins_app
    from onnxplug_tools.cli.verify import verify

    app.command()(plugin_options(verify))
    app.command()(plugin_options(diagnose))
    app.command()(plugin_options(bisect))
    app.command()(inspect)
    app.command()(compare)
    app.command()(bench)
    app.command()(plugin_options(why))
    app.command()(plugin_options(ops))
    app.add_typer(plugins_app, name="plugins")
