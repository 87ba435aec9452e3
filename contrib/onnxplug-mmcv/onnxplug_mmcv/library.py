"""The functions of mmcv's compiled extension, exchanged for ATen operators in a capture, or for good (``stand_in``)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onnxplug import Unsupported
from onnxplug.capture.patching import patched
from onnxplug_mmcv import FUNCTIONS, boxes, regions

EXTENSION = "mmcv._ext"


def _roi_align_rotated(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    pooled_height: int,
    pooled_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    aligned: bool,
    clockwise: bool,
) -> None:
    """``roi_align_rotated_forward`` of mmcv's extension."""
    sizes = (pooled_height, pooled_width, spatial_scale, sampling_ratio, aligned, clockwise)
    output.copy_(torch.ops.onnxplug_mmcv.roi_align_rotated(input, rois, *sizes))


def deformable(
    ctx: Any,
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """``MultiScaleDeformableAttnFunction.forward``, which mmcv calls on a GPU, by its function for the CPU."""
    theirs = sys.modules["mmcv.ops.multi_scale_deform_attn"].multi_scale_deformable_attn_pytorch
    return theirs(value, value_spatial_shapes, sampling_locations.type_as(value), attention_weights.type_as(value))


#: Functions of mmcv's extension, with their replacements.
KERNELS: dict[str, Callable[..., Any]] = {
    "nms": boxes.nms,
    "box_iou_rotated": boxes.box_iou_rotated,
    "roi_align_forward": regions.roi_align,
    "roi_align_rotated_forward": _roi_align_rotated,
}


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """A context for a capture in which the functions of the extension are exchanged."""
    define()
    with contextlib.ExitStack() as stack:
        for name, kernel in KERNELS.items() if EXTENSION in sys.modules else ():
            stack.enter_context(patched(sys.modules[EXTENSION], name, kernel))
        yield


def put() -> None:
    """Makes ``mmcv.ops`` importable where mmcv was installed without its extension, and exchanges the functions for good."""
    define()
    if EXTENSION not in sys.modules and find_spec(EXTENSION) is None:
        sys.modules[EXTENSION] = Extension(EXTENSION, "From onnxplug_mmcv, for exports.")
        sys.modules[EXTENSION].__spec__ = ModuleSpec(EXTENSION, None)
    import mmcv.ops  # noqa: F401

    FUNCTIONS.put()
    vars(sys.modules[EXTENSION]).update(KERNELS)


class Extension(ModuleType):
    """A stand-in for mmcv's extension; a function that it lacks raises :class:`Unsupported` when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> Any:
            raise Unsupported(
                f"mmcv's {name}, which is compiled with mmcv and has no translation",
                hint="`pip install mmcv` compiles it where torch's headers and a compiler are.",
            )

        return absent


def define() -> None:
    """Defines the package's own operators: computations that are single operators in mmdeploy's library."""
    if hasattr(torch.ops.onnxplug_mmcv, "nms_rotated"):
        return
    _operator("nms_rotated", boxes.kept_rotated, _some)
    _operator("roi_align_rotated", regions.roi_align_rotated, _bins)


def _operator(name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.custom_op(f"onnxplug_mmcv::{name}", kernel, mutates_args=()).register_fake(fake)


def _some(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return dets.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _bins(input: Tensor, rois: Tensor, height: int, width: int, *_: Any) -> Tensor:
    return input.new_empty(rois.shape[0], input.shape[1], height, width)
