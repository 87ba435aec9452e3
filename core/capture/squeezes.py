"""``squeeze`` of a dynamic dimension: PyTorch removes the axis where its size is 1, a model for any size keeps it.

An axis whose size torch knows to be 1, by the declared range or a condition of the model, is removed: the model is one for these
sizes. So is an axis of size 1 in the example whose size is 1 or 0, ``x[1:2]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug.capture.general import is_one_at_most
from onnxplug.capture.implication import Ranges, implied
from onnxplug.capture.locations import source_location
from onnxplug.capture.size_guards import Condition, line_of

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
        dynamic: torch's symbols of the sizes that should be dynamic.
    """
    for node, axis, size in _dynamic_axes(program):
        symbols = frozenset(size.node.expr.free_symbols & dynamic)
        if size.node.hint == 1 and symbols:
            yield KeptAxis(symbols, axis, source_location(node))


def squeezed_sizes(program: torch.export.ExportedProgram, ranges: Ranges, *, of_ones: bool = False) -> list[Condition]:
    """The conditions under which PyTorch, too, keeps the axes that squeezes keep in the program, and removes the others.

    Args:
        ranges: Symbol to its smallest and largest size.
        of_ones: Those of axes whose example size is 1, too, which :func:`kept_axes` has otherwise.
    """
    conditions = {
        Condition(sympy.Ne(size.node.expr, 1), source_location(node), fixed=False): None
        for node, _, size in _dynamic_axes(program)
        if of_ones or size.node.hint != 1
    }
    for node, _, size in _dynamic_axes(program, removed=True):
        conditions[Condition(sympy.Eq(size.node.expr, 1), source_location(node), fixed=False)] = None
    return [condition for condition in conditions if not implied(condition.expr, ranges)]


def squeezed_text(condition: Condition, names: Mapping[str, str]) -> str:
    """The warning of such a condition."""
    where = f" at {condition.place}{line_of(condition.place)}" if condition.place else ""
    if isinstance(condition.expr, sympy.Eq):
        removes = "removes an axis of size 1, as in the example inputs, and keeps it otherwise"
        hint = "Declare the range (torch.export.Dim(name, min=..., max=...))."
    else:
        removes = "removes an axis of size 1"
        hint = "Name the axes to squeeze, or declare the range (torch.export.Dim(name, min=2))."
    return (
        f"the exported model is right only where {condition.text(names)}: PyTorch's squeeze{where} {removes}, and "
        f"a model's number of axes can't depend on a size. {hint}"
    )


def _dynamic_axes(
    program: torch.export.ExportedProgram, *, removed: bool = False
) -> Iterator[tuple[torch.fx.Node, int, torch.SymInt]]:
    """The squeezes of a program, each with an axis of dynamic size that PyTorch removes if the size is 1, and the size.

    Args:
        removed: Whether to give the axes that the program removes, instead of the axes that it keeps.
    """
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    for node in (node for module in modules for node in module.graph.nodes):
        if getattr(getattr(node.target, "_schema", None), "name", None) in _SQUEEZES:
            source = node.args[0].meta.get("val")
            axes = _squeezed_axes(node, source)
            dynamic = [axis for axis in axes if isinstance(source.shape[axis], torch.SymInt)]
            if not dynamic or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            gone = source.dim() - node.meta["val"].dim() - sum(source.shape[axis] == 1 for axis in {*axes} - {*dynamic})
            for axis in dynamic:
                size = source.shape[axis]
                if (gone == len(dynamic) or (gone > 0 and _is_one(size))) is removed:
                    yield node, axis, size


def _is_one(size: torch.SymInt) -> bool:
    """Whether torch knows a size to be 1, or it is 1 at most and 1 in the example."""
    is_at_most = size.node.hint == 1 and is_one_at_most(size.node.expr, size.node.shape_env)
    return is_at_most or statically_known_true(size == 1)


def _squeezed_axes(node: torch.fx.Node, source: Any) -> list[int]:
    """The axes that a squeeze should remove where their size is 1."""
    if not isinstance(source, torch.Tensor):
        return []
    wanted: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if wanted is None:
        return list(range(source.dim()))
    axes = [wanted] if isinstance(wanted, int) else list(wanted)
    return [axis % source.dim() for axis in axes] if source.dim() else []
