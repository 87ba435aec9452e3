"""mmcv's and detectron2's operators in ONNX: the plugin, and ``stand_in``. Importing it imports neither torch nor mmcv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import Domain, LibraryFunctions, LibraryPatch, OpSample, OrtLibrary, PluginInfo, Rule, hookimpl

__all__ = ["stand_in"]

#: The domain of the operators in mmdeploy's library for ONNX Runtime.
DOMAIN = "mmdeploy"
_OPS, _HERE = "mmcv.ops", "onnxplug_mmcv"
#: mmcv's functions in Python that branch on sizes, and of ``autograd.Function``s, exchanged for ATen operators.
FUNCTIONS = LibraryFunctions(
    {
        f"{_OPS}.nms:nms_rotated": f"{_HERE}.boxes:nms_rotated",
        f"{_OPS}.nms:soft_nms": f"{_HERE}.boxes:soft_nms",
        f"{_OPS}.nms:batched_nms": f"{_HERE}.boxes:batched_nms",
        f"{_OPS}.deform_conv:DeformConv2dFunction.forward": f"{_HERE}.convolution:deform",
        f"{_OPS}.modulated_deform_conv:ModulatedDeformConv2dFunction.forward": f"{_HERE}.convolution:modulated",
        f"{_OPS}.multi_scale_deform_attn:MultiScaleDeformableAttnFunction.forward": f"{_HERE}.library:deformable",
    },
    "mmcv>=2.1,<2.3",
)
MASKS = LibraryFunctions(
    {"detectron2.layers.mask_ops:paste_masks_in_image": f"{_HERE}.detectron2:paste_masks_in_image"},
    "detectron2>=0.5,<0.7",
)


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The rules of operators of mmdeploy's library, for exports with its domain."""
    where = "onnxplug_mmcv.mmdeploy"
    return [
        Rule("onnxplug_mmcv::roi_align_rotated", f"{where}:roi_align_rotated", domains={DOMAIN: 1}),
        Rule("onnxplug_mmcv::nms_rotated", f"{where}:nms_rotated", domains={DOMAIN: 1}),
    ]


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The package's own operators and detectron2's, by PyTorch's operators."""
    return {
        "onnxplug_mmcv::roi_align_rotated.default": _later("regions", "roi_align_rotated"),
        "onnxplug_mmcv::nms_rotated.default": _later("boxes", "kept_rotated"),
        **{
            f"detectron2::{name}.default": _later("detectron2", name)
            for name in ("nms_rotated", "box_iou_rotated", "roi_align_rotated_forward")
        },
    }


def _later(module: str, name: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{module}"), name)(*args, **kwargs)

    decomposed.__qualname__, decomposed.__module__ = name, f"{__name__}.{module}"
    return decomposed


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """mmdeploy's domain, whose schemas are in its library."""
    return [Domain(DOMAIN, 1)]


@hookimpl
def onnxplug_runtime() -> list[OrtLibrary]:
    """mmdeploy's library, where it is installed."""
    return [OrtLibrary(_library)]


def _library() -> str | None:
    from importlib.util import find_spec
    from pathlib import Path

    found = find_spec("mmdeploy")
    for folder in [] if found is None else found.submodule_search_locations or []:
        path = Path(folder) / "lib" / "libmmdeploy_onnxruntime_ops.so"
        if path.is_file():
            return str(path)
    return None


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions | LibraryPatch]:
    """The exchanges of mmcv's and detectron2's functions while torch.export captures a model."""
    return [
        FUNCTIONS,
        LibraryPatch(("mmcv.ops",), "onnxplug_mmcv.library:exchanged"),
        MASKS,
        LibraryPatch(("detectron2.layers",), "onnxplug_mmcv.detectron2:exchanged"),
    ]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_mmcv.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespaces, the library, and the functions of mmcv's extension that are exchanged."""
    replaced = [
        f"mmcv._ext::{name}" for name in ("nms", "box_iou_rotated", "roi_align_forward", "roi_align_rotated_forward")
    ]
    return PluginInfo(api=1, namespaces=("onnxplug_mmcv", "detectron2"), libraries=("mmcv",), replaced=replaced)


def stand_in() -> None:
    """Makes ``import mmcv.ops`` work where mmcv has no compiled extension (the package mmcv-lite), for exports, from then on."""
    from onnxplug_mmcv.library import put

    put()
