"""torchaudio's compiled functions in ONNX: the plugin. Importing it imports neither torch nor torchaudio."""

from __future__ import annotations

from onnxplug import LibraryPatch, PluginInfo, hookimpl


@hookimpl
def onnxplug_patches() -> list[LibraryPatch]:
    """What torch.export needs of torchaudio."""
    return [LibraryPatch(("torchaudio.functional",), "onnxplug_torchaudio.library:exchanged")]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, libraries=("torchaudio",))
