"""natten's neighbourhood attention in ONNX: the plugin. Importing it imports neither torch nor natten."""

from __future__ import annotations

from onnxplug import LibraryFunctions, PluginInfo, hookimpl

_NAMES = ("neighborhood_attention_generic", "attention", "merge_attentions")
#: natten's functions, exchanged for ATen operators that compute them.
FUNCTIONS = LibraryFunctions(
    {f"natten.functional:{name}": f"onnxplug_natten.attention:{name}" for name in _NAMES}, "natten>=0.21.5,<0.22"
)


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """What torch.export needs of natten."""
    return [FUNCTIONS]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, libraries=("natten",))
