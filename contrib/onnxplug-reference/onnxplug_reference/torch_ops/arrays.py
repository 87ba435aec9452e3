"""Tensors of PyTorch for the engine, and their way to and from NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from onnxplug.build.dtypes import ONNX_TO_TORCH, as_array
from onnxplug.strings import STRING
from onnxplug_reference.arrays import Arrays


def torch_dtype(element_type: int) -> torch.dtype:
    """torch's dtype of an ONNX element type."""
    known = ONNX_TO_TORCH.get(ir.DataType(element_type))
    if known is None or known is STRING:
        raise NotImplementedError(f"torch has no dtype for the element type {ir.DataType(element_type).name}")
    return known


def to_array(value: Any) -> Any:
    """A tensor, or the tensors of a sequence, as arrays; other values unchanged."""
    if isinstance(value, list):
        return [to_array(v) for v in value]
    return as_array(value) if isinstance(value, torch.Tensor) else value


def to_tensor(value: Any, device: torch.device) -> Any:
    """An array, or the arrays of a sequence, as tensors. Text and elements that torch has no dtype for stay arrays."""
    if isinstance(value, list):
        return [to_tensor(v, device) for v in value]
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind in "OUS":
        return value
    array = np.array(value, copy=True)
    dtype = ONNX_TO_TORCH.get(ir.DataType.from_numpy(array.dtype))
    if dtype is None:
        return array
    if array.dtype.name == "bfloat16" or array.dtype.name.startswith("float8"):
        bits = torch.from_numpy(array.view(np.uint16 if array.itemsize == 2 else np.uint8))
        return bits.view(dtype).to(device)
    return torch.from_numpy(array).to(device)


class TorchArrays(Arrays):
    """The operations on tensors that the engine itself uses, for PyTorch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def constant(self, tensor: onnx.TensorProto | onnx.SparseTensorProto) -> Any:
        return to_tensor(super().constant(tensor), self._device)

    def number(self, value: int | bool) -> Any:
        return torch.tensor(value, device=self._device)

    def stack(self, values: Sequence[Any], axis: int) -> Any:
        if all(isinstance(v, torch.Tensor) for v in values):
            return torch.stack(list(values), axis)
        return super().stack([to_array(v) for v in values], axis)

    def at(self, value: Any, axis: int, index: int) -> Any:
        return value.select(axis, index) if isinstance(value, torch.Tensor) else super().at(value, axis, index)

    def empty(self, element_type: int, shape: Sequence[int]) -> Any:
        return to_tensor(super().empty(element_type, shape), self._device)

    def zeros(self, like: Any, shape: Sequence[int]) -> Any:
        return like.new_zeros(tuple(shape)) if isinstance(like, torch.Tensor) else super().zeros(like, shape)
