"""Operators of mmdeploy's library for ONNX Runtime, in float32.

``MMCVModulatedDeformConv2d`` isn't used: in mmdeploy 1.3.1 it adds to memory that it didn't clear.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from onnxplug import Decline
from onnxplug_mmcv import DOMAIN


def roi_align_rotated(g: Any, node: Any) -> Any:
    """roi_align_rotated(Tensor input, Tensor rois, SymInt height, SymInt width, float spatial_scale, SymInt sampling_ratio, bool aligned, bool clockwise) -> Tensor"""  # noqa: E501
    x, rois, height, width, scale, ratio, aligned, clockwise = node.args
    _of_floats(node)
    return g.domain(DOMAIN, 1).MMCVRoIAlignRotated(
        x,
        rois,
        output_height=height,
        output_width=width,
        spatial_scale=float(scale),
        sampling_ratio=ratio,
        aligned=int(aligned),
        clockwise=int(clockwise),
    )


def nms_rotated(g: Any, node: Any) -> Any:
    """nms_rotated(Tensor dets, Tensor scores, float iou_threshold) -> Tensor

    The library's operator takes batches and classes, and leaves out boxes whose scores aren't above a threshold.
    """
    boxes, scores, threshold = node.args
    _of_floats(node)
    lowest = float(torch.finfo(torch.float32).min)
    selected = g.domain(DOMAIN, 1).NMSRotated(
        g.op.Unsqueeze(boxes, [0]), g.op.Unsqueeze(scores, [0, 1]), iou_threshold=threshold, score_threshold=lowest
    )
    # Rows of (batch, class, box).
    return g.op.Squeeze(g.op.Slice(selected, [2], [3], [1]), [1])


def _of_floats(node: Any) -> None:
    if node.args[0].dtype != ir.DataType.FLOAT:
        raise Decline("mmdeploy's library has kernels of float32 alone")
