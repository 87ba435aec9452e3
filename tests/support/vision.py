"""torchvision without its compiled extension.

torchvision has no CPU build for the pinned torch: the wheel's ``_C.so`` needs CUDA libraries and does not load, and
``import torchvision`` (hence timm, and transformers' vision models) then fails while it registers a fake
implementation for ``torchvision::nms``, an operator that only the extension declares. Declaring the operators is
enough to import all three, and to capture models that use them; running such an operator still needs the extension.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path

import torch

_ROI = "Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_ROI_BACKWARD = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_IMAGE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORM = (
    "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, SymInt stride_w, "
    "SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, SymInt offset_groups, "
    "bool use_mask"
)

# The signatures that torchvision 0.28 declares; the importing code of torchvision relies on each.
SCHEMAS: dict[str, str] = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": f"({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool": f"({_ROI}) -> (Tensor, Tensor)",
    "ps_roi_align": f"({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    "ps_roi_pool": f"({_ROI}) -> (Tensor, Tensor)",
    "deform_conv2d": f"({_DEFORM}) -> Tensor",
    "_roi_align_backward": (
        f"(Tensor grad, Tensor rois, {_ROI_BACKWARD}, {_IMAGE}, int sampling_ratio, bool aligned) -> Tensor"
    ),
    "_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor argmax, {_ROI_BACKWARD}, {_IMAGE}) -> Tensor",
    "_ps_roi_align_backward": (
        f"(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI_BACKWARD}, int sampling_ratio, {_IMAGE}) -> Tensor"
    ),
    "_ps_roi_pool_backward": (
        f"(Tensor grad, Tensor rois, Tensor channel_mapping, {_ROI_BACKWARD}, {_IMAGE}) -> Tensor"
    ),
    "_deform_conv2d_backward": f"(Tensor grad, {_DEFORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}

# torchvision registers these two itself, extension or not; the rest it skips without the extension.
_FAKES_OF_TORCHVISION = frozenset({"nms", "qnms"})


@cache
def define_vision_schemas() -> bool:
    """Makes ``import torchvision`` work where its extension does not load. May be called any number of times.

    Must run before the first ``import torchvision`` (or timm, or a vision model of transformers) of the process: a
    failed import leaves half of torchvision in ``sys.modules``.

    Returns:
        True if the operators were declared here, False if the extension loads and nothing had to be done.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("torchvision is not installed; `make .venv` installs what the tests need")
    if _extension_loads(Path(spec.submodule_search_locations[0])):
        return False
    library = _library("DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    fakes = importlib.import_module("torchvision._meta_registrations")
    meta = _library("IMPL")
    for name in SCHEMAS.keys() - _FAKES_OF_TORCHVISION:
        meta.impl(name, getattr(fakes, f"meta_{name.lstrip('_')}"), "Meta")
    # torchvision.ops asks this before every call; capturing needs no more than the declarations.
    extension = importlib.import_module("torchvision.extension")
    extension._has_ops = _yes  # type: ignore[attr-defined]
    return True


@cache
def _library(kind: str) -> torch.library.Library:
    """Kept for the life of the process: a collected Library takes its operators with it."""
    return torch.library.Library("torchvision", kind)


def _yes() -> bool:
    return True


def _extension_loads(folder: Path) -> bool:
    for extension in sorted(folder.glob("_C*.so")):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
        return True
    return False
