"""What torch_geometric's layers need while torch.export runs them."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric
from torch import Tensor

from onnxplug_torch_geometric.scatter import places

_ABSENT = object()
#: Packages in whose modules ``int(…)`` is asked for the value of a tensor.
_PACKAGES = ("torch_geometric.nn.", "torch_geometric.utils.", "torch_geometric.index")


class _IntType(type):
    """``int`` that leaves what is only known at run time a symbol, where the builtin asks for its value."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        value = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(value, Tensor):
            value = value.item()
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return torch.sym_int(value)
        return builtins.int(*args, **kwargs) if value is None else builtins.int(value)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, builtins.int)


class Int(metaclass=_IntType):
    """Takes the place of ``int`` in torch_geometric's modules."""


def assume_sorted(self: Any, index: Tensor | None) -> None:
    """In place of a look at the values: the exported model takes them to be sorted."""


def hetero_linear(self: Any, x: Tensor, type_vec: Tensor) -> Tensor:
    """HeteroLinear type by type, in any order of the types; they needn't be sorted for it."""
    result = x.new_zeros((x.shape[0], self.out_channels))
    for number, weight in enumerate(self.weight):
        rows = (type_vec == number).nonzero().squeeze(1)
        result = result.index_copy(0, rows, x.index_select(0, rows) @ weight)
    return result if self.bias is None else result + self.bias[type_vec]


def cumsum(x: Tensor, dim: int = 0) -> Tensor:
    """torch_geometric's: sums with a 0 in front, where it writes to parts of an empty tensor."""
    zero = x.new_zeros((*x.shape[:dim], 1, *x.shape[dim + 1 :]))
    return torch.cat([zero, x.cumsum(dim)], dim)


def any_size(size: Any) -> Any:
    """A size that is only known at run time, of which torch shall not ask whether it is 0 or 1: it takes the general way.

    That holds for 0 and 1 too, as ONNX's operators broadcast at run time.
    """
    if isinstance(size, torch.SymInt):
        torch._check(size >= 2)
    return size


def _to_dense_batch(original: Any) -> Any:
    """``to_dense_batch`` for sizes that are only known at run time."""

    @functools.wraps(original)
    def to_dense_batch(
        x: Tensor, batch: Any = None, fill_value: Any = 0.0, max_num_nodes: Any = None, batch_size: Any = None
    ) -> tuple[Tensor, Tensor]:
        if batch is None:
            result: tuple[Tensor, Tensor] = original(x, batch, fill_value, max_num_nodes, batch_size)
            return result
        graphs = any_size(places(batch, batch_size))
        count = batch.new_zeros((graphs,)).scatter_add(0, batch, torch.ones_like(batch))
        longest = any_size(count.max().item() if max_num_nodes is None else max_num_nodes)
        place = torch.arange(x.shape[0], device=x.device) - cumsum(count)[batch]
        # One place more, for what is too long.
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
    """SortAggregation that doesn't ask whether the largest group has ``k`` elements: it always appends as many."""
    fill = x.detach().min() - 1
    dense, _ = self.to_dense_batch(x, index, ptr, dim_size, dim, fill_value=fill, max_num_elements=max_num_elements)
    order = dense[:, :, -1].sort(dim=-1, descending=True)[1]
    dense = dense.gather(1, order.unsqueeze(-1).expand_as(dense))
    more = fill.expand((dense.shape[0], self.k, dense.shape[2]))
    dense = torch.cat([dense, more], 1).narrow(1, 0, self.k)
    return torch.where(dense == fill, 0, dense).reshape((dense.shape[0], self.k * dense.shape[2]))


def _is_plain(edge_index: Any) -> bool:
    """Whether edges are a dense tensor, and nothing of torch_geometric's own that is one, too."""
    if not isinstance(edge_index, Tensor) or isinstance(edge_index, torch_geometric.EdgeIndex):
        return False
    return edge_index.layout is torch.strided


def _num_nodes(original: Any) -> Any:
    """``maybe_num_nodes`` that doesn't ask whether there are edges."""

    @functools.wraps(original)
    def maybe_num_nodes(edge_index: Any, num_nodes: Any = None) -> Any:
        if num_nodes is not None or not _is_plain(edge_index):
            return original(edge_index, num_nodes)
        return places(edge_index, None)

    return maybe_num_nodes


def _coalesce(original: Any) -> Any:
    """``coalesce`` by one way for edges with and without duplicates."""
    from torch_geometric.utils import scatter

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
            result: Tensor = scatter(values[order], place, 0, kept.shape[1], reduce)
            return result

        if isinstance(edge_attr, list | tuple):
            return kept, [merged(values) for values in edge_attr]
        return kept, None if edge_attr is None else merged(edge_attr)

    return coalesce


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("torch_geometric.")]


def _everywhere(original: Any, new: Any) -> list[tuple[Any, str, Any]]:
    """A function is imported into many modules by name."""
    return [(module, name, new) for module in _modules() for name, value in vars(module).items() if value is original]


def _changes() -> list[tuple[Any, str, Any]]:
    from torch_geometric import utils
    from torch_geometric.nn.aggr import Aggregation, SortAggregation
    from torch_geometric.nn.dense import HeteroLinear
    from torch_geometric.utils import num_nodes

    known = num_nodes.maybe_num_nodes
    return [
        (Aggregation, "assert_sorted_index", assume_sorted),
        (SortAggregation, "forward", sort_aggregation),
        (HeteroLinear, "forward", hetero_linear),
        # The other way is the same numbers, chosen by the number of edges.
        (torch_geometric.backend, "use_segment_matmul", False),
        *_everywhere(utils.cumsum, cumsum),
        *_everywhere(utils.to_dense_batch, _to_dense_batch(utils.to_dense_batch)),
        *_everywhere(utils.coalesce, _coalesce(utils.coalesce)),
        *_everywhere(known, _num_nodes(known)),
        *((module, "int", Int) for module in _modules() if module.__name__.startswith(_PACKAGES)),
    ]


@contextlib.contextmanager
def models() -> Iterator[None]:
    """Holds during capture."""
    changes = _changes()
    before = [vars(home).get(name, _ABSENT) for home, name, _ in changes]
    for home, name, new in changes:
        setattr(home, name, new)
    try:
        yield
    finally:
        for (home, name, _), old in zip(changes, before, strict=True):
            if old is _ABSENT:
                delattr(home, name)
            else:
                setattr(home, name, old)
