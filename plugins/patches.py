"""Patches of plugins, which are named where one fails."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from onnxplug.errors import PluginError


class PluginPatch:
    """A function of the captured module that makes the context manager of a plugin's patch.

    Args:
        patch: What the plugin gave: a context manager, or a function that makes one.
        plugin: Its name, distribution and version, for messages.
    """

    def __init__(self, patch: Any, plugin: str) -> None:
        self.patch = patch
        self._plugin = plugin

    def __call__(self, module: Any) -> AbstractContextManager[Any]:
        """The context manager; it raises a PluginError where the patch does, and lets through what is raised while it holds."""
        return _Held(self, module)

    def error(self, when: str, error: Exception) -> PluginError:
        """What is raised in place of an error of the patch."""
        name = getattr(self.patch, "__qualname__", None) or type(self.patch).__qualname__
        return PluginError(
            f"the patch {name} of the plugin {self._plugin}, which holds during capture, raised {type(error).__name__} as it "
            f"{when}: {error}",
            hint="Without the plugin: plugins=[…], or --no-plugin NAME.",
        )


class _Held(AbstractContextManager[None]):
    def __init__(self, origin: PluginPatch, module: Any) -> None:
        self._origin = origin
        self._module = module
        self._context: Any = None

    def __enter__(self) -> None:
        from onnxplug.capture.patching import context_of  # imports torch

        try:
            self._context = context_of(self._origin.patch, self._module)
            self._context.__enter__()
        except Exception as error:
            raise self._origin.error("begins", error) from error

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool | None:
        try:
            return bool(self._context.__exit__(kind, value, trace))
        except Exception as error:
            if error is value:
                raise
            raise self._origin.error("ends", error) from error
