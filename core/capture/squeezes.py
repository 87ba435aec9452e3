"""``squeeze`` of a dynamic dimension whose example size is 1: PyTorch removes the axis, a model for any size keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from onnxplug.capture.locations import source_location

_SQUEEZES = {"aten::squeeze", "aten::squeeze_", "aten::squeeze_copy"}


class KeptAxis(NamedTuple):
    """An axis that a squeeze keeps in the captured graph, and removes in PyTorch if its size is 1.

    Attributes:
        symbols: torch's symbols of the size.
        axis: The axis of the operator's input.
        place: The user's ``file:line``, ``None`` when torch recorded none.
    """

    symbols: frozenset[Any]
    axis: int
    place: str | None


def kept_axes(program: torch.export.ExportedProgram, dynamic: set[Any]) -> Iterator[KeptAxis]:
    """The axes that squeezes of a program keep though the example's size is 1.

    Args:
        program: The captured program.
        dynamic: torch's symbols of the sizes that should be dynamic.
    """
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    for node in (node for module in modules for node in module.graph.nodes):
        if getattr(getattr(node.target, "_schema", None), "name", None) not in _SQUEEZES:
            continue
        source = node.args[0].meta.get("val")
        for axis in _squeezed_axes(node, source):
            size = source.shape[axis]
            if not isinstance(size, torch.SymInt) or size.node.hint != 1:
                continue
            symbols = frozenset(size.node.expr.free_symbols & dynamic)
            if symbols:
                yield KeptAxis(symbols, axis, source_location(node))


def _squeezed_axes(node: torch.fx.Node, source: Any) -> list[int]:
    """The axes that a squeeze should remove where their size is 1."""
    if not isinstance(source, torch.Tensor):
        return []
    wanted: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if wanted is None:
        return list(range(source.dim()))
    axes = [wanted] if isinstance(wanted, int) else list(wanted)
    return [axis % source.dim() for axis in axes] if source.dim() else []
