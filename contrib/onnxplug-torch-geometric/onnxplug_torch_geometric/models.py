"""Patches of torch_geometric's layers while torch.export captures a model."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch_geometric
from torch import Tensor

from onnxplug.capture.patching import patched
from onnxplug_torch_geometric import layers

#: Packages whose modules call ``int(…)`` on tensors.
_PACKAGES = ("torch_geometric.nn.", "torch_geometric.utils.", "torch_geometric.index")


class _IntType(type):
    """``int`` that keeps a number that is only known at run time a symbol; the builtin asks for its value."""

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


def _modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("torch_geometric.")]


def _everywhere(original: Any, new: Any) -> list[tuple[Any, str, Any]]:
    """The changes of a function in all modules that have imported it by name."""
    return [(module, name, new) for module in _modules() for name, value in vars(module).items() if value is original]


def _changes() -> list[tuple[Any, str, Any]]:
    from torch_geometric import utils
    from torch_geometric.nn import aggr
    from torch_geometric.nn.dense import HeteroLinear
    from torch_geometric.nn.models import GraphUNet
    from torch_geometric.utils import num_nodes

    call = aggr.Aggregation.__call__
    known = num_nodes.maybe_num_nodes
    return [
        (aggr.Aggregation, "__call__", layers.aggregation(call)),
        (aggr.Aggregation, "assert_sorted_index", layers.assume_sorted),
        (aggr.SortAggregation, "forward", layers.sort_aggregation),
        (aggr.QuantileAggregation, "forward", layers.quantile_aggregation),
        (HeteroLinear, "forward", layers.hetero_linear),
        (GraphUNet, "augment_adj", layers.augment_adj),
        (torch.nn.MultiheadAttention, "forward", layers.attention(torch.nn.MultiheadAttention.forward)),
        # The original chooses by the number of edges; both ways give the same numbers.
        (torch_geometric.backend, "use_segment_matmul", False),
        *_everywhere(utils.cumsum, layers.cumsum),
        *_everywhere(utils.scatter, layers.scatter(utils.scatter)),
        *_everywhere(utils.to_dense_batch, layers.to_dense_batch(utils.to_dense_batch)),
        *_everywhere(utils.to_dense_adj, layers.to_dense_adj(utils.to_dense_adj)),
        *_everywhere(utils.coalesce, layers.coalesce(utils.coalesce)),
        *_everywhere(known, layers.num_nodes(known)),
        *((module, "int", Int) for module in _modules() if module.__name__.startswith(_PACKAGES)),
    ]


@contextlib.contextmanager
def models() -> Iterator[None]:
    """A context for a capture in which torch_geometric's functions are replaced."""
    with contextlib.ExitStack() as stack:
        for home, name, new in _changes():
            stack.enter_context(patched(home, name, new))
        yield
