"""The builtin plugin: onnxplug's own rules and rewrites, arriving through the entry point like any package's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnxplug.plugin_api import PluginInfo, hookimpl
from onnxplug.registry.rule import Rule


@hookimpl
def onnxplug_rules() -> Iterable[Rule]:
    """Every rule of ``onnxplug.converters``; a family's module is imported when one of its operators occurs."""
    from onnxplug.plugins.index import indexed_rules

    return indexed_rules()


@hookimpl
def onnxplug_rewrites() -> Iterable[Any]:
    """The builtin rewrites."""
    from onnxplug.rewrite.patterns import REWRITES

    return REWRITES


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The builtin plugin speaks the API of its own version."""
    return PluginInfo(namespaces=("aten", "prims"))
