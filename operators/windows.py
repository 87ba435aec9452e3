"""Result shapes of convolution, pooling and resampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxplug.build.inference.dims import Attributes, Dim, Inputs, Result, dims_of, known


def spatial(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    """Convolution and pooling keep the rank and the batch; channels follow the weight, sizes the windows."""
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    channels: Dim = dims[1]
    count = len(dims) - 2
    kernel: Sequence[Dim] = attributes.get("kernel_shape") or (None,) * count
    weight = dims_of(inputs[1]) if len(inputs) > 1 else None
    transposed = spec.op_type == "ConvTranspose"
    if weight is not None:
        first = weight[1] if transposed else weight[0]
        channels = first * attributes.get("group", 1) if transposed and isinstance(first, int) else first
        kernel = weight[2:]
    sizes = _windows(dims[2:], kernel, attributes, transposed) or (None,) * count
    out = (dims[0], channels, *sizes)
    return [(None, out), (ir.DataType.INT64, out)]


def _windows(
    sizes: Sequence[Dim], kernel: Sequence[Dim], attributes: Attributes, transposed: bool
) -> tuple[Dim, ...] | None:
    """The size of each axis after windows of ``kernel`` went over it; ``None`` where that takes more than the formula."""
    if attributes.get("auto_pad", "NOTSET") != "NOTSET" or attributes.get("ceil_mode") or "output_shape" in attributes:
        return None
    count = len(sizes)
    strides, dilations = attributes.get("strides") or (1,) * count, attributes.get("dilations") or (1,) * count
    pads, extra = attributes.get("pads") or (0,) * (2 * count), attributes.get("output_padding") or (0,) * count
    result: list[Dim] = []
    for axis, (size, k) in enumerate(zip(sizes, kernel, strict=True)):
        if not isinstance(size, int) or not isinstance(k, int):
            result.append(None)
            continue
        span, padding = dilations[axis] * (k - 1) + 1, pads[axis] + pads[count + axis]
        if transposed:
            result.append(strides[axis] * (size - 1) + extra[axis] + span - padding)
        else:
            result.append((size + padding - span) // strides[axis] + 1)
    return tuple(result)


def global_pool(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    return [(None, (*dims[:2], *(1,) * (len(dims) - 2)) if dims is not None else None)]


def resize(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    sizes = known(inputs[3]) if len(inputs) > 3 else None
    plain = "axes" not in attributes and attributes.get("keep_aspect_ratio_policy", "stretch") == "stretch"
    return [(None, tuple(sizes) if sizes is not None and plain else (None,) * len(dims))]


def grid_sample(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, grid = dims_of(inputs[0]), dims_of(inputs[1])
    if dims is None or grid is None:
        return [(None, None)]
    return [(None, (*dims[:2], *grid[1:-1]))]
