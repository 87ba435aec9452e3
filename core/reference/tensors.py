"""Torch tensors in, torch tensors out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


def has_torch(values: Iterable[Any]) -> Any:
    """The device of the first torch tensor among values, lists of them included; ``None`` if there is none."""
    for value in values:
        if isinstance(value, list | tuple):
            device = has_torch(value)
            if device is not None:
                return device
        elif type(value).__module__.startswith("torch") and hasattr(value, "device"):
            return value.device
        elif hasattr(value, "detach"):  # a Parameter, or another class of tensors
            return value.device
    return None


def from_torch(value: Any) -> Any:
    """Torch tensors as arrays (ml_dtypes for bfloat16 and float8); everything else as it is."""
    if isinstance(value, list | tuple):
        return [from_torch(v) for v in value]
    if hasattr(value, "detach"):
        from onnxplug.build.dtypes import as_array

        return as_array(value)
    return value


#: Element types that torch has no tensors of, and what they come as.
_COMES_AS = {
    **dict.fromkeys(("int4", "int2"), np.int8),
    **dict.fromkeys(("uint4", "uint2"), np.uint8),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu"), np.float32),
}


def to_torch(value: Any, device: Any = None) -> Any:
    """Arrays as torch tensors. 2-bit and 4-bit integers come as int8 or uint8, floats of 4 and 6 bits as float32.

    Text, which torch has no tensors of, stays an array.
    """
    import onnx_ir as ir
    import torch

    from onnxplug.build.dtypes import ONNX_TO_TORCH

    if isinstance(value, list | tuple):
        return [to_torch(v, device) for v in value]
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind in "OUS":
        return value
    array = np.array(value, copy=True)
    if array.dtype.name in _COMES_AS:
        array = array.astype(_COMES_AS[array.dtype.name])
    dtype = ONNX_TO_TORCH[ir.DataType.from_numpy(array.dtype)]
    if array.dtype.name == "bfloat16" or array.dtype.name.startswith("float8"):
        bits = array.view(np.uint16 if array.itemsize == 2 else np.uint8)
        return torch.from_numpy(bits).view(dtype).to(device)
    return torch.from_numpy(array).to(device)
