"""torch_scatter's ``scatter_*`` by ATen operators.

``index`` gives for each element of ``src`` its place along ``dim`` of the result. A place without elements is 0, for
``mul`` 1. All functions take ``out``, the tensor that the result starts from and is written to.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]


def along(index: Tensor, src: Tensor, dim: int) -> Tensor:
    """``index`` in the shape of ``src``: a single axis lies along ``dim``, several axes get more axes at the end."""
    if index.dim() == 1:
        index = index.reshape((1,) * dim + (-1,))
    return index.reshape((*index.shape, *(1,) * (src.dim() - index.dim()))).expand_as(src)


def places(index: Tensor, size: int | None) -> int:
    """The number of places: ``size`` if it is given, otherwise the largest index plus 1, or 0 for an empty index."""
    if size is not None:
        return size
    # Not index.max() alone: an empty tensor has no maximum, and a branch on its size would fix the size.
    top: Any = torch.cat([index.reshape(-1), index.new_full((1,), -1)]).max().item()
    torch._check(top >= -1)
    return top + 1


def filled(src: Tensor, dim: int, size: int, value: float) -> Tensor:
    """A tensor like ``src`` of another size along ``dim``."""
    return src.new_full((*src.shape[:dim], size, *src.shape[dim + 1 :]), value)


def handed(result: Tensor, out: Tensor | None) -> Tensor:
    """The result, written to ``out`` where it is given."""
    return result if out is None else out.copy_(result)


def scatter_sum(src: Tensor, index: Tensor, dim: int, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """The sum of each place's elements."""
    dim %= src.dim()
    index = along(index, src, dim)
    start = filled(src, dim, places(index, dim_size), 0) if out is None else out
    return handed(start.scatter_add(dim, index, src), out)


def scatter_mul(src: Tensor, index: Tensor, dim: int, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """The product of each place's elements; of an empty ``src`` it is 0 everywhere."""
    dim %= src.dim()
    index = along(index, src, dim)
    start = out
    if start is None:
        full = torch.full((), src.numel(), device=src.device).clamp(max=1).to(src.dtype)
        start = filled(src, dim, places(index, dim_size), 1) * full
    return handed(start.scatter_reduce(dim, index, src, "prod", include_self=True), out)


def scatter_mean(
    src: Tensor, index: Tensor, dim: int, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """The sum divided by the number of elements; integers are rounded down."""
    dim %= src.dim()
    total = scatter_sum(src, index, dim, None if out is None else out.clone(), dim_size)
    own = min(dim, index.dim() - 1)
    count = filled(index, own, total.shape[dim], 0).scatter_add(own, index, torch.ones_like(index)).clamp(min=1)
    mode = None if src.is_floating_point() else "floor"
    return handed(torch.div(total, along(count, total, dim).to(src.dtype), rounding_mode=mode), out)


def scatter_min(src: Tensor, index: Tensor, dim: int, out: Tensor | None = None, dim_size: int | None = None) -> Result:
    """The least of each place's elements, and its first position along ``dim``."""
    return _extreme(src, index, dim, out, dim_size, "amin")


def scatter_max(src: Tensor, index: Tensor, dim: int, out: Tensor | None = None, dim_size: int | None = None) -> Result:
    """The greatest of each place's elements, and its first position along ``dim``."""
    return _extreme(src, index, dim, out, dim_size, "amax")


def _extreme(src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None, reduction: str) -> Result:
    dim %= src.dim()
    index = along(index, src, dim)
    worst = extreme_of(src.dtype, reduction)
    start = filled(src, dim, places(index, dim_size), worst) if out is None else out
    best, where = improved(start, index, src, dim, reduction)
    if out is None:
        best = torch.where(best == worst, 0, best)
    return handed(best, out), where


def extreme_of(dtype: torch.dtype, reduction: str) -> float:
    """torch_scatter's start: the dtype's least finite number for a maximum, its greatest for a minimum."""
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min if reduction == "amax" else limits.max


def improved(start: Tensor, index: Tensor, src: Tensor, dim: int, reduction: str) -> Result:
    """The best of ``start`` and the elements of each place, and the first position of the best element along ``dim``.

    An element counts only if it is better than ``start`` and all elements before, so NaN never counts. Where no element
    counts, the position is the size of ``src`` along ``dim``.
    """
    compared = src
    if src.is_floating_point():
        compared = torch.where(src.isnan(), -math.inf if reduction == "amax" else math.inf, src)
    best = start.scatter_reduce(dim, index, compared, reduction, include_self=True)
    before = start.gather(dim, index)
    better = src > before if reduction == "amax" else src < before
    count = src.shape[dim]
    number = torch.arange(count, device=src.device).reshape((-1,) + (1,) * (src.dim() - dim - 1)).expand_as(src)
    mine = torch.where(better & (src == best.gather(dim, index)), number, count)
    none = torch.zeros_like(best, dtype=torch.int64) + count
    return best, none.scatter_reduce(dim, index, mine, "amin", include_self=True)
