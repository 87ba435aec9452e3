"""Constants that fill masks: large negative numbers that are added to logits, and give 0 in the Softmax after them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from onnxplug_precision.half.ranges import FILL, SOFTMAX, Ranges

#: The replacement of fills. The sum of three is still finite in float16.
MASKED = -16384.0
#: The largest logits beside which a fill still gives 0.
_LOGITS = 8192.0
_PASSING = frozenset(
    """Add Where Mul Sub Reshape Unsqueeze Squeeze Expand Slice Transpose Concat Identity Gather Tile Max Min Trilu ScatterND
    ScatterElements Split Flatten Pad""".split()
)


def masks(ranges: Ranges, constants: Mapping[ir.Value, np.ndarray]) -> tuple[list[ir.Value], set[ir.Value]]:
    """The constants that fill masks, and all values from them to the Softmax.

    Args:
        constants: Constants of float32.
    """
    fills: list[ir.Value] = []
    within: set[ir.Value] = set()
    for value, array in constants.items():
        finite = array[np.isfinite(array)]
        if not finite.size or finite.min() >= FILL or finite.max() >= -FILL:
            continue
        path: set[ir.Value] = set()
        if _ends(value, path, ranges) and all(_is_masked(other, value, ranges) for other in path):
            fills.append(value)
            within |= path
    return fills, within


def _is_masked(value: ir.Value, constant: ir.Value, ranges: Ranges) -> bool:
    """Whether a value on the way to the Softmax has ordinary logits beside fills, and no row of fills alone.

    A row of fills alone has equal weights in float32, where the fill is so large that the logits vanish in the sum.
    """
    range_ = ranges.get(value)
    return value is constant or (range_ is not None and range_.ordinary <= _LOGITS and not range_.has_filled_rows)


def _ends(value: ir.Value, path: set[ir.Value], ranges: Ranges) -> bool:
    """Whether all uses of a value end in a Softmax; ``path`` takes the values on the way."""
    stack = [value]
    while stack:
        value = stack.pop()
        if value in path:
            continue
        path.add(value)
        if value.is_graph_output() or not value.uses():
            return False
        for node, index in value.uses():
            if index in SOFTMAX.get((node.domain, node.op_type), ()):
                continue
            if node.domain or node.op_type not in _PASSING or not _passes(node, index, ranges):
                return False
            stack += node.outputs
    return True


def _passes(node: ir.Node, index: int, ranges: Ranges) -> bool:
    if node.op_type == "Sub":
        return index == 0
    if node.op_type != "Mul":
        return True
    other = node.inputs[1 - index]
    return other is not None and other in ranges and ranges[other].is_binary


def filled(array: np.ndarray) -> np.ndarray:
    """A mask with a fill within float16's range."""
    return np.where(np.isfinite(array) & (array < FILL), np.float32(MASKED), array)
