"""Patches of plugins; the error of a failing patch names its plugin."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from onnxplug.errors import OnnxplugError, PluginError
from onnxplug.plugin_api import CaptureMode, CaptureRequest, LibraryPatch
from onnxplug.registry.rule import object_of


class PluginPatch:
    """A function of the captured module and the request, from any form of a plugin's patch.

    Args:
        patch: The plugin's item: a context manager, a function that returns one, or a list of modes.
        plugin: Its name, distribution and version, for messages.
    """

    def __init__(self, patch: Any, plugin: str) -> None:
        self.patch = patch
        self._plugin = plugin

    def __call__(self, module: Any, request: CaptureRequest) -> AbstractContextManager[Any] | Sequence[CaptureMode]:
        """Contexts that raise a PluginError where the patch fails; onnxplug's errors and errors of their body pass."""
        from onnxplug.capture.patching import made_by  # imports torch

        patch = self.patch
        if isinstance(patch, LibraryPatch) and sys.modules.keys().isdisjoint(patch.modules):
            return nullcontext()
        try:
            if isinstance(patch, LibraryPatch):
                patch = object_of(patch.patch, "a patch")
            contexts = made_by(patch, module, request)
        except OnnxplugError:
            raise
        except Exception as error:
            raise self.error("begins", error) from error
        if isinstance(contexts, AbstractContextManager):
            return _Held(self, contexts)
        return [replace(mode, context=partial(self._entered, mode.context)) for mode in contexts]

    def _entered(self, make: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
        return _Held(self, make())

    def error(self, when: str, error: Exception) -> PluginError:
        """The error that replaces an error of the patch."""
        patch = self.patch.patch if isinstance(self.patch, LibraryPatch) else self.patch
        name = patch if isinstance(patch, str) else getattr(patch, "__qualname__", None) or type(patch).__qualname__
        return PluginError(
            f"the patch {name} of the plugin {self._plugin}, which holds during capture, raised {type(error).__name__} as it "
            f"{when}: {error}",
            hint="Without the plugin: plugins=[…], or --no-plugin NAME.",
        )


class _Held(AbstractContextManager[None]):
    def __init__(self, origin: PluginPatch, context: AbstractContextManager[Any]) -> None:
        self._origin = origin
        self._context = context

    def __enter__(self) -> None:
        try:
            self._context.__enter__()
        except OnnxplugError:
            raise
        except Exception as error:
            raise self._origin.error("begins", error) from error

    def __exit__(self, kind: Any, value: Any, trace: Any) -> bool | None:
        try:
            return bool(self._context.__exit__(kind, value, trace))
        except OnnxplugError:
            raise
        except Exception as error:
            if error is value:
                raise
            raise self._origin.error("ends", error) from error
