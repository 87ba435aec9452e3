"""natten's neighbourhood attention in ONNX: the plugin. Importing it imports neither torch nor natten."""

from __future__ import annotations

from onnxplug import LibraryPatch, PluginInfo, hookimpl


@hookimpl
def onnxplug_patches() -> list[LibraryPatch]:
    """What torch.export needs of natten."""
    return [LibraryPatch(("natten.functional",), "onnxplug_natten.library:exchanged")]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, libraries=("natten",))
