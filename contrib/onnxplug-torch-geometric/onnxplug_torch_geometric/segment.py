"""torch_scatter's ``segment_*`` and ``gather_*`` by ATen operators.

Segments lie one after the other along the last axis of ``index`` (COO: a sorted number of the segment for each element)
or ``indptr`` (CSR: where each segment begins, and the end). Both may have batch axes before, of size 1 or the size of
``src``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onnxplug_torch_geometric.scatter import Result, extreme_of, filled, handed, improved, places


def segment_sum_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """The sum of each segment."""
    start, index, dim = _begun(src, index, out, dim_size, 0)
    return handed(_added(start, dim, index, src), out)


def segment_mean_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """The mean of each segment; integers are rounded towards 0. Only segments with elements change ``out``."""
    start, index, dim = _begun(src, index, out, dim_size, 0)
    return handed(_divided(_added(start, dim, index, src), _counted(start, dim, index)), out)


def segment_min_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Result:
    """The least element of each segment, and its first position."""
    return _extreme_coo(src, index, out, dim_size, "amin")


def segment_max_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Result:
    """The greatest element of each segment, and its first position."""
    return _extreme_coo(src, index, out, dim_size, "amax")


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """For each element, the row of its segment."""
    dim = index.dim() - 1
    if dim == 0:
        return handed(src.index_select(0, index), out)
    index = index.reshape((*index.shape, *(1,) * (src.dim() - index.dim())))
    return handed(src.gather(dim, index.expand((*index.shape[: dim + 1], *src.shape[dim + 1 :]))), out)


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of each segment."""
    index, dim, count = _of_pointers(src, indptr)
    total = _added(filled(src, dim, count + 1, 0), dim, index, src)
    return handed(total.narrow(dim, 0, count), out)


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of each segment; integers are rounded towards 0."""
    index, dim, count = _of_pointers(src, indptr)
    total = _added(filled(src, dim, count + 1, 0), dim, index, src)
    return handed(_divided(total, _counted(total, dim, index)).narrow(dim, 0, count), out)


def segment_min_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Result:
    """The least element of each segment, and its first position."""
    return _extreme_csr(src, indptr, out, "amin")


def segment_max_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Result:
    """The greatest element of each segment, and its first position."""
    return _extreme_csr(src, indptr, out, "amax")


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None, total: int | None = None) -> Tensor:
    """Each row of ``src`` as often as its segment has elements; ``total``: the result's rows, where it is known."""
    dim = indptr.dim() - 1
    if out is not None:
        total = out.shape[dim]
    elif total is None:
        last: Any = indptr.reshape(-1)[-1].item()
        torch._check(last >= 0)
        total = last
    assert total is not None
    indptr = indptr.expand((*src.shape[:dim], indptr.shape[dim]))
    index = _numbers(indptr, total)
    return gather_coo(src, index, out)


def _over(src: Tensor, index: Tensor) -> tuple[Tensor, int]:
    """The index of each element of ``src``, and the axis that is reduced."""
    dim = index.dim() - 1
    index = index.expand(src.shape[: dim + 1])
    return index.reshape((*index.shape, *(1,) * (src.dim() - dim - 1))).expand_as(src), dim


def _begun(
    src: Tensor, index: Tensor, out: Tensor | None, size: int | None, value: float
) -> tuple[Tensor, Tensor, int]:
    """The tensor that the sums or extremes start from, the index of each element, and the axis."""
    whole, dim = _over(src, index)
    return filled(src, dim, places(index, size), value) if out is None else out, whole, dim


def _numbers(indptr: Tensor, count: int) -> Tensor:
    """The segment's number of each of ``count`` elements: how many segments end at or before it."""
    ends = indptr.narrow(-1, 1, indptr.shape[-1] - 1)
    hits = ends.new_zeros((*indptr.shape[:-1], count + 1)).scatter_add(-1, ends, torch.ones_like(ends))
    return hits.cumsum(-1).narrow(-1, 0, count)


def _of_pointers(src: Tensor, indptr: Tensor) -> tuple[Tensor, int, int]:
    """COO from CSR: the index of each element, the axis, and the number of segments."""
    dim = indptr.dim() - 1
    index, count = as_index(indptr.expand((*src.shape[:dim], indptr.shape[dim])), src.shape[dim])
    return _over(src, index)[0], dim, count


def as_index(indptr: Tensor, size: int) -> tuple[Tensor, int]:
    """The segment's number of each of ``size`` elements, and how many segments there are.

    An element outside of all segments gets the number of segments.
    """
    count = indptr.shape[-1] - 1
    before = torch.arange(size, device=indptr.device) < indptr.narrow(-1, 0, 1)
    return torch.where(before, count, _numbers(indptr, size)), count


def _added(start: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Sums; halves are summed in float, and rounded once."""
    dtype = src.dtype
    if dtype in (torch.float16, torch.bfloat16):
        return start.float().scatter_add(dim, index, src.float()).to(dtype)
    return start.scatter_add(dim, index, src)


def _counted(like: Tensor, dim: int, index: Tensor) -> Tensor:
    """The number of elements of each place, 1 where there is no element."""
    count = torch.zeros_like(like, dtype=torch.int64).scatter_add(dim, index, torch.ones_like(index))
    return count.clamp(min=1)


def _divided(total: Tensor, count: Tensor) -> Tensor:
    mode = None if total.is_floating_point() else "trunc"
    return torch.div(total, count.to(total.dtype), rounding_mode=mode)


def _extreme_coo(src: Tensor, index: Tensor, out: Tensor | None, dim_size: int | None, reduction: str) -> Result:
    worst = extreme_of(src.dtype, reduction)
    start, index, dim = _begun(src, index, out, dim_size, worst)
    best, where = improved(start, index, src, dim, reduction)
    if out is None:
        best = torch.where(best == worst, 0, best)
    return handed(best, out), where


def _extreme_csr(src: Tensor, indptr: Tensor, out: Tensor | None, reduction: str) -> Result:
    index, dim, count = _of_pointers(src, indptr)
    # Halves are compared in float, whose least number is -inf as a half.
    half = src.dtype in (torch.float16, torch.bfloat16)
    wide = src.float() if half else src
    start = filled(wide, dim, count + 1, extreme_of(wide.dtype, reduction))
    best, where = improved(start, index, wide, dim, reduction)
    reached = torch.zeros_like(where).scatter_add(dim, index, torch.ones_like(index)) > 0
    best = torch.where(reached, best, 0).to(src.dtype)
    return handed(best.narrow(dim, 0, count), out), where.narrow(dim, 0, count)
