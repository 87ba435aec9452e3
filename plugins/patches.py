"""Patches of plugins, which are named where one fails."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from onnxplug.errors import PluginError


class PluginPatch(AbstractContextManager["PluginPatch"]):
    """A context manager that a plugin gave, or a function that makes one.

    Args:
        patch: What the plugin gave.
        plugin: Its name, distribution and version, for messages.

    Raises:
        PluginError: The patch raised; what is raised while it holds passes through.
    """

    def __init__(self, patch: Any, plugin: str) -> None:
        self._patch = patch
        self._plugin = plugin
        self._held: list[Any] = []

    def __enter__(self) -> PluginPatch:
        try:
            context = self._patch if hasattr(self._patch, "__enter__") else self._patch()
            context.__enter__()
        except Exception as error:
            raise self._error("begins", error) from error
        self._held.append(context)
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool | None:
        try:
            return bool(self._held.pop().__exit__(kind, value, trace))
        except Exception as error:
            if error is value:
                raise
            raise self._error("ends", error) from error

    def _error(self, when: str, error: Exception) -> PluginError:
        name = getattr(self._patch, "__qualname__", None) or type(self._patch).__qualname__
        return PluginError(
            f"the patch {name} of the plugin {self._plugin}, which holds during capture, raised {type(error).__name__} as it "
            f"{when}: {error}",
            hint="Without the plugin: plugins=[…], or --no-plugin NAME.",
        )
