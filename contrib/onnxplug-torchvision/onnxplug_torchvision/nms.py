"""Non-maximum suppression."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxplug import Unsupported


def nms(g: Any, node: Any) -> Any:
    """nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor

    dets [N, 4] of (x1, y1, x2, y2), scores [N]; the kept indices [M], by falling score, equal scores by index. Both
    torchvision and ONNX suppress boxes that overlap strictly more than the threshold; the axes' order doesn't matter to
    the overlap. ONNX Runtime compares in float: the threshold is rounded down to a float, so that no overlap changes
    sides.
    """
    boxes, scores, threshold = node.args
    if threshold < 0:
        raise Unsupported(f"an overlap threshold below 0 ({threshold})")
    limit = np.float32(min(threshold, 1.0))
    if float(limit) > threshold:
        limit = np.nextafter(limit, np.float32(0))
    boxes, scores = (g.cast(x, _float()) for x in (boxes, scores))
    every = g.op.Unsqueeze(g.as_vector(g.dim(boxes, 0)), [0])
    selected = g.op.NonMaxSuppression(
        g.op.Unsqueeze(boxes, [0]),
        g.op.Unsqueeze(scores, [0, 1]),
        g.op.Squeeze(every, [0]),
        g.const(np.array([limit])),
    )
    # Rows of (batch, class, box).
    return g.op.Squeeze(g.op.Slice(selected, [2], [3], [1]), [1])


def _float() -> Any:
    import torch

    return torch.float32
