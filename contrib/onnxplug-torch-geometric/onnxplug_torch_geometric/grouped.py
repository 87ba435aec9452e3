"""pyg_lib's other operators by ATen operators."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from onnxplug_torch_geometric.segment import as_index

_OPERATORS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}


def index_sort(indices: Tensor, max: int | None = None) -> tuple[Tensor, Tensor]:
    """Sorted indices and their places before; equal indices stay in order."""
    values, order = torch.sort(indices, stable=True)
    return values, order


def sampled_op(left: Tensor, right: Tensor, left_index: Tensor | None, right_index: Tensor | None, op: str) -> Tensor:
    """An operator between rows picked by index."""
    a = left if left_index is None else left.index_select(0, left_index)
    b = right if right_index is None else right.index_select(0, right_index)
    return _OPERATORS[op](a, b)


def softmax_csr(src: Tensor, ptr: Tensor, dim: int = 0) -> Tensor:
    """The softmax along ``dim`` of each run of rows that ``ptr`` bounds; rows outside of the runs are 0."""
    dim %= src.dim()
    rows = src.movedim(dim, 0)
    index, count = as_index(ptr, rows.shape[0])
    index = index.reshape((-1,) + (1,) * (rows.dim() - 1)).expand_as(rows)
    sizes = (count + 1, *rows.shape[1:])
    top = rows.new_full(sizes, torch.finfo(rows.dtype).min).scatter_reduce(0, index, rows, "amax", include_self=True)
    part = (rows - top.gather(0, index)).exp()
    total = rows.new_zeros(sizes).scatter_add(0, index, part)
    result = torch.where(index < count, part / total.gather(0, index), 0)
    return result.movedim(0, dim)
