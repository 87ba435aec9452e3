"""Layers and functions of torch_geometric without branches on values; each computes the numbers of its original."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_geometric
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn.modules.module import Module

from onnxplug_torch_geometric.scatter import places


def assume_sorted(self: Any, index: Tensor | None) -> None:
    """In place of a check of the values: the exported model assumes that they are sorted."""


def hetero_linear(self: Any, x: Tensor, type_vec: Tensor) -> Tensor:
    """HeteroLinear type by type; the types needn't be sorted."""
    result = x.new_zeros((x.shape[0], self.out_channels))
    for number, weight in enumerate(self.weight):
        rows = (type_vec == number).nonzero().squeeze(1)
        result = result.index_copy(0, rows, x.index_select(0, rows) @ weight)
    return result if self.bias is None else result + self.bias[type_vec]


def cumsum(x: Tensor, dim: int = 0) -> Tensor:
    """torch_geometric's ``cumsum``, sums of the dtype of ``x`` with a 0 in front, without writes to parts of an empty tensor."""
    zero = x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return torch.cat([zero, x.cumsum(dim, dtype=x.dtype)], dim)


def any_size(size: Any) -> None:
    """Makes torch take the general branch for a size that is only known at run time, which may be 0 or 1.

    The branch holds for 0 and 1 too, as ONNX's operators broadcast at run time.
    """
    if isinstance(size, torch.SymInt) and free_unbacked_symbols(size):
        torch._check(size >= 2)


def attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """``MultiheadAttention.forward`` for dense batches whose sizes are only known at run time."""

    @functools.wraps(original)
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        for size in (*query.shape, *key.shape):
            any_size(size)
        return original(self, query, key, value, *args, **kwargs)

    return forward


def to_dense_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """``to_dense_batch`` for sizes that are only known at run time."""

    @functools.wraps(original)
    def to_dense_batch(
        x: Tensor, batch: Any = None, fill_value: Any = 0.0, max_num_nodes: Any = None, batch_size: Any = None
    ) -> tuple[Tensor, Tensor]:
        if batch is None:
            return original(x, batch, fill_value, max_num_nodes, batch_size)
        graphs = places(batch, batch_size)
        count = batch.new_zeros((graphs,)).scatter_add(0, batch, torch.ones_like(batch))
        longest: Any = count.max().item() if max_num_nodes is None else max_num_nodes
        torch._check(longest >= 0)
        place = torch.arange(x.shape[0], device=x.device) - cumsum(count)[batch]
        # One more place, for nodes beyond ``longest``.
        total = graphs * longest
        place = torch.where(place < longest, batch * longest + place, total)
        start = torch.as_tensor(fill_value, dtype=x.dtype, device=x.device).expand((total + 1, *x.shape[1:]))
        dense = start.index_copy(0, place, x).narrow(0, 0, total).reshape((graphs, longest, *x.shape[1:]))
        mask = x.new_zeros((total + 1,), dtype=torch.bool).index_fill(0, place, True)
        return dense, mask.narrow(0, 0, total).reshape((graphs, longest))

    return to_dense_batch


def sort_aggregation(
    self: Any,
    x: Tensor,
    index: Any = None,
    ptr: Any = None,
    dim_size: Any = None,
    dim: int = -2,
    max_num_elements: Any = None,
) -> Tensor:
    """SortAggregation that always appends ``k`` elements, without a branch on the size of the largest group."""
    fill = x.detach().min() - 1
    dense, _ = self.to_dense_batch(x, index, ptr, dim_size, dim, fill_value=fill, max_num_elements=max_num_elements)
    order = dense[:, :, -1].sort(dim=-1, descending=True)[1]
    dense = dense.gather(1, order.unsqueeze(-1).expand_as(dense))
    more = fill.expand((dense.shape[0], self.k, dense.shape[2]))
    dense = torch.cat([dense, more], 1).narrow(1, 0, self.k)
    return torch.where(dense == fill, 0, dense).reshape((dense.shape[0], self.k * dense.shape[2]))


def quantile_aggregation(
    self: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2
) -> Tensor:
    """QuantileAggregation (and the median) with ``dim_size`` groups; the original counts the groups by their values."""
    self.assert_index_present(index)
    dim %= x.dim()
    size = places(index, dim_size)
    count = index.new_zeros((size,)).scatter_add(0, index, torch.ones_like(index))
    begin = cumsum(count).narrow(0, 0, size).clamp(max=x.shape[dim] - 1)
    point = (self.q * (count - 1) + begin).t().reshape(-1)
    shape = (1,) * dim + (-1,) + (1,) * (x.dim() - dim - 1)
    values, order = torch.sort(x, dim=dim)
    # Stable: within a group the values stay sorted.
    groups = torch.sort(index.reshape(shape).expand_as(x).gather(dim, order), dim=dim, stable=True)[1]
    values = values.gather(dim, groups)
    low, high = (values.index_select(dim, end.long()) for end in (point.floor(), point.ceil()))
    result = {
        "lower": lambda: low,
        "higher": lambda: high,
        "nearest": lambda: values.index_select(dim, point.round().long()),
        "linear": lambda: low + (high - low) * point.frac().reshape(shape),
        "midpoint": lambda: 0.5 * low + 0.5 * high,
    }[self.interpolation]()
    quantiles = self.q.numel()
    empty = (count == 0).unsqueeze(1).expand(size, quantiles).reshape(-1)
    result = torch.where(empty.reshape(shape), self.fill_value, result)
    if quantiles == 1:
        return result
    # The quantiles are merged with the next axis: torch_geometric's own shape.
    return result.reshape((*x.shape[:dim], size, -1, *x.shape[dim + 2 :]))


def aggregation(original: Callable[..., Any]) -> Callable[..., Any]:
    """``Aggregation.__call__`` without branches on the number of elements and, when it fails, on the largest index."""

    @functools.wraps(original)
    def call(
        self: Any, x: Tensor, index: Any = None, ptr: Any = None, dim_size: Any = None, dim: int = -2, **kwargs: Any
    ) -> Any:
        if index is None and ptr is None:
            index = x.new_zeros((x.shape[dim],), dtype=torch.int64)
        if dim_size is None:
            dim_size = ptr.numel() - 1 if ptr is not None else places(index, None)
        return Module.__call__(self, x, index=index, ptr=ptr, dim_size=dim_size, dim=dim, **kwargs)

    return call


def scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    """``scatter`` without a branch on the number of elements."""

    @functools.wraps(original)
    def sized(src: Any, index: Any, dim: int = 0, dim_size: Any = None, reduce: str = "sum") -> Any:
        return original(src, index, dim, places(index, dim_size), reduce)

    return sized


def augment_adj(self: Any, edge_index: Tensor, edge_weight: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """GraphUNet's pairs of nodes two steps apart, by dense matrices: torch.export knows no sparse matrices."""
    from torch_geometric.utils import add_self_loops, remove_self_loops

    edge_index, edge_weight = remove_self_loops(edge_index, edge_weight)
    edge_index, edge_weight = add_self_loops(edge_index, edge_weight, num_nodes=num_nodes)
    where = edge_index[0] * num_nodes + edge_index[1]
    weights, edges = (
        values.new_zeros((num_nodes * num_nodes,)).scatter_add(0, where, values).reshape((num_nodes, num_nodes))
        for values in (edge_weight, torch.ones_like(edge_weight))
    )
    # An edge with a sum of 0 as its weight is an edge, too.
    pairs = (edges @ edges > 0).nonzero().t()
    kept = pairs[:, (pairs[0] != pairs[1]).nonzero().squeeze(1)]
    return kept, (weights @ weights)[kept[0], kept[1]]


def _is_plain(edge_index: Any) -> bool:
    """Whether edges are a dense tensor, and not torch_geometric's ``EdgeIndex``, which is a tensor too."""
    if not isinstance(edge_index, Tensor) or isinstance(edge_index, torch_geometric.EdgeIndex):
        return False
    return edge_index.layout is torch.strided


def num_nodes(original: Callable[..., Any]) -> Callable[..., Any]:
    """``maybe_num_nodes`` without a branch on the number of edges."""

    @functools.wraps(original)
    def maybe_num_nodes(edge_index: Any, num_nodes: Any = None) -> Any:
        if num_nodes is not None or not _is_plain(edge_index):
            return original(edge_index, num_nodes)
        count = places(edge_index, None)
        torch._check(count < 2**31)  # sort_edge_index asks whether the square is an int64
        return count

    return maybe_num_nodes


def to_dense_adj(original: Callable[..., Any]) -> Callable[..., Any]:
    """``to_dense_adj`` of a single graph without a branch on the number of nodes."""

    @functools.wraps(original)
    def to_dense_adj(
        edge_index: Tensor, batch: Any = None, edge_attr: Any = None, max_num_nodes: Any = None, batch_size: Any = None
    ) -> Tensor:
        if batch is None:
            batch = edge_index.new_zeros((places(edge_index, None),))
            batch_size = 1 if batch_size is None else batch_size
        return original(edge_index, batch, edge_attr, max_num_nodes, batch_size)

    return to_dense_adj


def coalesce(original: Callable[..., Any]) -> Callable[..., Any]:
    """``coalesce`` without a branch on whether edges have duplicates."""
    from torch_geometric import utils

    @functools.wraps(original)
    def coalesce(
        edge_index: Any,
        edge_attr: Any = "???",
        num_nodes: Any = None,
        reduce: str = "sum",
        is_sorted: bool = False,
        sort_by_row: bool = True,
    ) -> Any:
        if not _is_plain(edge_index):
            return original(edge_index, edge_attr, num_nodes, reduce, is_sorted, sort_by_row)
        nodes = places(edge_index, num_nodes)
        major, minor = (0, 1) if sort_by_row else (1, 0)
        number = edge_index[major] * nodes + edge_index[minor]
        order = torch.arange(number.shape[0]) if is_sorted else torch.sort(number, stable=True)[1]
        number = number[order]
        first = torch.cat([number.new_full((1,), -1), number])[:-1] != number
        kept = edge_index[:, order[first.nonzero().squeeze(1)]]
        if isinstance(edge_attr, str):
            return kept
        place = first.long().cumsum(0) - 1

        def merged(values: Tensor) -> Tensor:
            return utils.scatter(values[order], place, 0, kept.shape[1], reduce)

        if isinstance(edge_attr, list | tuple):
            return kept, [merged(values) for values in edge_attr]
        return kept, None if edge_attr is None else merged(edge_attr)

    return coalesce
