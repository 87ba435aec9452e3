"""kornia's functions that loop over values or sizes, in ONNX: the plugin. Importing it imports neither torch nor kornia."""

from __future__ import annotations

from onnxplug import LibraryFunctions, PluginInfo, hookimpl

_LINES = "onnxplug_kornia.lines"
_DETECTOR = "kornia.feature.sold2.sold2_detector"
#: kornia's functions, each exchanged for one whose loops are operators of torch.
FUNCTIONS = LibraryFunctions(
    {
        "kornia.contrib.distance_transform:distance_transform": "onnxplug_kornia.distances:distance_transform",
        "kornia.geometry.bbox:nms": "onnxplug_kornia.boxes:nms",
        f"{_DETECTOR}:prob_to_junctions": f"{_LINES}:prob_to_junctions",
        **{
            f"{_DETECTOR}:LineSegmentDetectionModule.{name}": f"{_LINES}:{name}"
            for name in ("detect", "refine_heatmap", "refine_heatmap_local", "refine_junction_perturb")
        },
    },
    "kornia>=0.9,<0.10",
)


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """The exchange of kornia's functions while torch.export captures a model."""
    return [FUNCTIONS]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description: the library."""
    return PluginInfo(api=1, libraries=("kornia",))
