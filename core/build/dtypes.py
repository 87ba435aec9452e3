"""torch dtypes, ONNX element types and numpy dtypes, and the ways between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.errors import Unsupported
from onnxplug.strings import STRING, string_array

_DT = ir.DataType

TORCH_TO_ONNX: dict[torch.dtype, ir.DataType] = {
    torch.float32: _DT.FLOAT,
    torch.float64: _DT.DOUBLE,
    torch.float16: _DT.FLOAT16,
    torch.bfloat16: _DT.BFLOAT16,
    torch.int64: _DT.INT64,
    torch.int32: _DT.INT32,
    torch.int16: _DT.INT16,
    torch.int8: _DT.INT8,
    torch.uint8: _DT.UINT8,
    torch.uint16: _DT.UINT16,
    torch.uint32: _DT.UINT32,
    torch.uint64: _DT.UINT64,
    torch.bool: _DT.BOOL,
    torch.complex64: _DT.COMPLEX64,
    torch.complex128: _DT.COMPLEX128,
    torch.float8_e4m3fn: _DT.FLOAT8E4M3FN,
    torch.float8_e4m3fnuz: _DT.FLOAT8E4M3FNUZ,
    torch.float8_e5m2: _DT.FLOAT8E5M2,
    torch.float8_e5m2fnuz: _DT.FLOAT8E5M2FNUZ,
    STRING: _DT.STRING,
}
ONNX_TO_TORCH: dict[ir.DataType, torch.dtype] = {onnx: torch_ for torch_, onnx in TORCH_TO_ONNX.items()}
# torch packs two numbers of four bits into a byte, computes nothing with them, and only views bytes as such pairs and back:
# they are bytes in ONNX, whose FLOAT4E2M1 counts each number as an element.
TORCH_TO_ONNX[torch.float4_e2m1fn_x2] = _DT.UINT8

#: The opset that introduced an element type, where that is later than the oldest opset exported to.
SINCE: dict[ir.DataType, int] = {
    **dict.fromkeys((_DT.FLOAT8E4M3FN, _DT.FLOAT8E4M3FNUZ, _DT.FLOAT8E5M2, _DT.FLOAT8E5M2FNUZ), 19),
    **dict.fromkeys((_DT.INT4, _DT.UINT4), 21),
    _DT.FLOAT4E2M1: 23,
}

FLOATS = frozenset({_DT.FLOAT, _DT.DOUBLE, _DT.FLOAT16, _DT.BFLOAT16})


def to_onnx_dtype(dtype: torch.dtype | ir.DataType) -> ir.DataType:
    """The ONNX element type of a torch dtype; an ONNX element type passes through.

    Raises:
        Unsupported: ONNX has no such element type.
    """
    if isinstance(dtype, ir.DataType):
        return dtype
    element_type = TORCH_TO_ONNX.get(dtype)
    if element_type is None:
        if not isinstance(dtype, torch.dtype):
            raise Unsupported(f"{dtype!r} is no dtype: give a torch.dtype or an onnx_ir.DataType")
        raise Unsupported(f"ONNX has no element type for {dtype}")
    return element_type


def to_torch_dtype(dtype: ir.DataType | torch.dtype) -> torch.dtype:
    """The torch dtype of an ONNX element type; a torch dtype passes through.

    Raises:
        Unsupported: torch has no such dtype.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    torch_dtype = ONNX_TO_TORCH.get(dtype)
    if torch_dtype is None:
        raise Unsupported(f"torch has no dtype for the ONNX element type {dtype.name}")
    return torch_dtype


def as_array(value: Any, dtype: ir.DataType | None = None) -> np.ndarray:
    """A numpy array (ml_dtypes for bfloat16 and float8) of a Python scalar, nested list, numpy array or torch tensor.

    Without ``dtype`` Python ints become int64, floats float32 (torch's default), bools bool. A Python scalar or list is
    converted from float64 in one rounding. Integers that the dtype cannot hold wrap around, as torch's do.
    """
    if isinstance(value, torch.Tensor) and value.dtype == STRING:
        return string_array(value)
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        wanted = TORCH_TO_ONNX[tensor.dtype]
        if tensor.dtype in (torch.bfloat16,):
            array = tensor.contiguous().view(torch.uint16).numpy().view(wanted.numpy())
        elif wanted.numpy().itemsize == 1 and not tensor.dtype.is_floating_point:
            array = tensor.numpy()
        elif tensor.dtype.is_floating_point and tensor.element_size() == 1:
            array = tensor.contiguous().view(torch.uint8).numpy().view(wanted.numpy())
        else:
            array = tensor.numpy()
        array = np.array(array, copy=True)
    else:
        array = np.asarray(value)
        if dtype is None and array.dtype == np.float64 and not isinstance(value, np.ndarray | np.generic):
            array = array.astype(np.float32)
        elif array.size == 0 and not isinstance(value, np.ndarray):
            array = array.astype(np.int64)
    if dtype is not None:
        target = dtype.numpy()
        if array.dtype != target:
            with np.errstate(all="ignore"):
                array = array.astype(target)
    return np.ascontiguousarray(array) if array.ndim else array


#: Element types that torch has no tensors of, and the dtypes that hold them.
_COMES_AS = {
    **dict.fromkeys(("int4", "int2"), np.int8),
    **dict.fromkeys(("uint4", "uint2"), np.uint8),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "float8_e8m0fnu"), np.float32),
}


def to_torch(value: Any, device: Any = None) -> Any:
    """Arrays as torch tensors. 2-bit and 4-bit integers come as int8 or uint8, floats of 4 and 6 bits as float32.

    Strings stay an array.
    """
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
