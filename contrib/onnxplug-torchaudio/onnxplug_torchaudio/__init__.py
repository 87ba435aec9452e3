"""torchaudio's compiled functions in ONNX: the plugin. Importing it imports neither torch nor torchaudio."""

from __future__ import annotations

from onnxplug import LibraryFunctions, PluginInfo, hookimpl

_FILTERS = "onnxplug_torchaudio.filters"
#: torchaudio's functions that its compiled extension computes, exchanged for ATen operators.
FUNCTIONS = LibraryFunctions(
    {
        "torchaudio.functional.filtering:_lfilter_core_loop": f"{_FILTERS}:lfilter_core_loop",
        "torchaudio.functional.filtering:_overdrive_core_loop_cpu": f"{_FILTERS}:overdrive_core_loop",
        "torchaudio.functional.filtering:_overdrive_core_loop_generic": f"{_FILTERS}:overdrive_core_loop",
        "torchaudio.functional._alignment:forced_align": "onnxplug_torchaudio.alignment:forced_align",
    },
    "torchaudio>=2.10,<2.12",
)


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """The exchange of torchaudio's functions while torch.export captures a model."""
    return [FUNCTIONS]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description: the library."""
    return PluginInfo(api=1, libraries=("torchaudio",))
