"""The operations of control flow on one class of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx


class Arrays:
    """The operations on tensors that the engine itself uses, for NumPy."""

    def constant(self, tensor: onnx.TensorProto | onnx.SparseTensorProto) -> Any:
        """The tensor of an initializer."""
        if isinstance(tensor, onnx.SparseTensorProto):
            return dense_array(tensor)
        return onnx.numpy_helper.to_array(tensor)

    def number(self, value: int | bool) -> Any:
        """A 0-dimensional tensor: int64 or bool."""
        return np.array(value, dtype=bool if isinstance(value, bool) else np.int64)

    def stack(self, values: Sequence[Any], axis: int) -> Any:
        """Tensors of one shape, stacked along a new axis."""
        return np.stack(values, axis)

    def at(self, value: Any, axis: int, index: int) -> Any:
        """The slice of a tensor at an index of an axis."""
        return np.take(value, index, axis)

    def empty(self, element_type: int, shape: Sequence[int]) -> Any:
        """A tensor without elements."""
        return np.empty(tuple(shape), onnx.helper.tensor_dtype_to_np_dtype(element_type))

    def zeros(self, like: Any, shape: Sequence[int]) -> Any:
        """A tensor of zeros, or of empty texts, of the type of another tensor."""
        return np.full(tuple(shape), "", object) if like.dtype.kind in "OUS" else np.zeros(tuple(shape), like.dtype)


def dense_array(sparse: onnx.SparseTensorProto) -> np.ndarray:
    """The dense form of a sparse tensor, whose indices are [n], into the flattened tensor, or [n, rank]."""
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    result = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        result.reshape(-1)[indices] = values
    else:
        result[tuple(indices.T)] = values
    return result
