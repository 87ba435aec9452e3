"""torch_geometric's models in ONNX, and the operators of torch_scatter and pyg_lib: the plugin, and ``data_shapes``.

Importing it imports neither torch nor any of the three packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onnxplug import LibraryPatch, OpSample, PluginInfo, Rule, hookimpl

__all__ = ["data_shapes"]

_REDUCTIONS = ("sum", "mean", "min", "max")

#: Operator to the function that computes it by ATen operators.
FUNCTIONS: Mapping[str, str] = {
    **{f"torch_scatter::scatter_{name}": f"scatter:scatter_{name}" for name in (*_REDUCTIONS, "mul")},
    **{
        f"torch_scatter::segment_{name}_{form}": f"segment:segment_{name}_{form}"
        for name in _REDUCTIONS
        for form in ("coo", "csr")
    },
    **{f"torch_scatter::gather_{form}": f"segment:gather_{form}" for form in ("coo", "csr")},
    **{f"pyg::{name}": f"grouped:{name}" for name in ("index_sort", "sampled_op", "softmax_csr")},
}


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translations."""
    return [
        Rule("pyg::segment_matmul", "onnxplug_torch_geometric.matmul:segment_matmul"),
        Rule("pyg::grouped_matmul", "onnxplug_torch_geometric.matmul:grouped_matmul"),
    ]


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operators that are computed by ATen operators."""
    return {f"{op}.default": _later(op) for op in FUNCTIONS}


def _later(op: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from onnxplug_torch_geometric.capture import whole

        return whole(op)(*args, **kwargs)

    decomposed.__module__ = f"{__name__}.{FUNCTIONS[op].partition(':')[0]}"
    return decomposed


@hookimpl
def onnxplug_patches() -> list[Any]:
    """The patches of the three packages while torch.export captures a model."""
    return [_companions, LibraryPatch(("torch_geometric.nn",), _models)]


def _companions() -> Any:
    """A context that patches nothing where neither torch_scatter nor pyg_lib is in use."""
    from onnxplug_torch_geometric.capture import companions

    return companions()


def _models() -> Any:
    from onnxplug_torch_geometric.data import register
    from onnxplug_torch_geometric.models import models

    register()
    return models()


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_torch_geometric.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespaces, and the libraries."""
    return PluginInfo(api=1, namespaces=("torch_scatter", "pyg"), libraries=("torch_geometric", "pyg_lib"))


def data_shapes(data: Any, nodes: str = "nodes", edges: str = "edges", graphs: str = "graphs") -> Any:
    """The part of ``dynamic_shapes`` that belongs to a ``Data`` or ``Batch``.

    Args:
        data: The object.
        nodes, edges, graphs: Names of the dimensions; ``ptr``, with one element more than graphs, gets ``"pointers"``.

    Returns:
        An entry for each tensor, in the order of their names.

    Raises:
        TypeError: ``data`` is another object, or has an attribute that can't be an input.
    """
    from onnxplug_torch_geometric.data import shapes

    return shapes(data, nodes, edges, graphs)
