"""Dynamic sizes that torch turns into constants when it calls operators, without a question of the model's Python code.

An operator whose schema has ``int`` and not ``SymInt`` takes a plain number: ``avg_pool2d(x, x.shape[2:])`` has the
example's size as its kernel at every size. An operator that returns a list has as many tensors as with the example:
``x.split(4)``. torch records the same guard as for an operator that rejects other sizes; the difference is that here the
constant is in the graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from onnxplug.capture.locations import source_location
from onnxplug.fake import is_fake
from onnxplug.torch_private import OpOverload, pytree

#: Places where torch asks for a plain number to call an operator: files of torch, with the function where it matters.
_CALLS = {
    os.path.join("_export", "non_strict_utils.py"): "__torch_function__",
    os.path.join("_dynamo", "utils.py"): "run_node",
    "_ops.py": None,
    os.path.join("_decomp", "decompositions.py"): "split",
}
#: The largest number of elements of a tensor that is searched for a number.
_FEW = 1000
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


@dataclass(frozen=True)
class Constant:
    """The origin of a number in the graph.

    Attributes:
        place: The user's ``file:line``, ``None`` where torch recorded none.
        is_joined: Whether it is the length of a list that the program only joins again, where empty tensors don't matter.
    """

    place: str | None
    is_joined: bool = False


class Constants:
    """The plain numbers among the arguments of a program's operators, and the lengths of the lists that they return."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        self._program = program

    def of_guard(self, guard: Any) -> Constant | None:
        """The constant in the graph that a guard fixes, if the guard does not come from the model's Python code.

        Args:
            guard: torch's guard: an expression of sizes, and its stack.

        Returns:
            ``None`` for a guard that only limits the sizes that an operator accepts.
        """
        frame = getattr(guard.sloc, "framework_loc", None)
        file, function = getattr(frame, "filename", "").removeprefix(_TORCH), getattr(frame, "name", None)
        number = _number(guard.expr)
        if number is None or file not in _CALLS or _CALLS[file] not in (None, function):
            return None
        if _CALLS[file] == "split" or number in self._list_lengths:
            return self._list_lengths.get(number)
        if file == "_ops.py":
            return None
        # An operator on constants only leaves no node: torch.hann_window(n // 2).
        whole = _CALLS[file] == "__torch_function__" or (_CALLS[file] == "run_node" and self._is_in_tensors(number))
        return self._arguments.get(number, Constant(None) if whole else None)

    def place_of(self, expr: Any) -> str | None:
        """The user's line with the number that an equality sets an expression to; ``None`` where the graph has none."""
        constant = self._arguments.get(_number(expr))
        return constant.place if constant is not None else None

    def _is_in_tensors(self, number: float) -> bool:
        """Whether a tensor of the program's code has a number: the strict mode makes one of ``torch.as_tensor([n / 2])``."""
        tensors = [t for t in self._program.constants.values() if isinstance(t, torch.Tensor) and not is_fake(t)]
        return any((t == torch.tensor(number, dtype=t.dtype)).any() for t in tensors if t.numel() <= _FEW)

    @cached_property
    def _arguments(self) -> dict[float | None, Constant]:
        """The plain numbers among operators' arguments, each with its first place."""
        places: dict[float | None, Constant] = {}
        for node in self._calls():
            for number in pytree.tree_leaves((node.args, node.kwargs)):
                if isinstance(number, int | float) and not isinstance(number, bool):
                    places.setdefault(number, Constant(source_location(node)))
        return places

    @cached_property
    def _list_lengths(self) -> dict[float | None, Constant]:
        """The lengths of lists that operators return for tensors with a dynamic axis.

        Each has the first place of such a list, of one that is not only joined again if there is any.
        """
        places: dict[float | None, Constant] = {}
        for node in self._calls():
            results = node.meta.get("val")
            if not isinstance(results, list) or not any(map(_is_dynamic, node.all_input_nodes)):
                continue
            if places.get(len(results), Constant(None, is_joined=True)).is_joined:
                places[len(results)] = Constant(source_location(node), _is_joined(node))
        return places

    def _calls(self) -> Iterator[torch.fx.Node]:
        modules = [m for m in self._program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
        for node in (node for module in modules for node in module.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, OpOverload):
                yield node


def _number(expr: Any) -> float | None:
    """The number in a guard that is an equality with a number."""
    if expr.func.__name__ != "Equality":
        return None
    number = next((side for side in expr.args if side.is_number), None)
    if number is None:
        return None
    return int(number) if number.is_Integer else float(number)


def _is_joined(node: Any) -> bool:
    """Whether all parts of a tensor are joined again along their axis, in their order, and used nowhere else.

    Another order of more than two parts may be made of their number: ``[parts[-1], *parts[:-1]]``.
    """
    joins = {user for item in node.users for user in item.users}
    join = next(iter(joins)) if len(joins) == 1 else None
    if join is None or join.target is not torch.ops.aten.cat.default or _axis(node) is None:
        return False
    operands, parts = join.args[0], node.meta["val"]
    return (
        _axis(node) == _axis(join)
        and join.meta["val"].dim() == node.args[0].meta["val"].dim()
        and {*operands} == {*node.users}
        and sorted(places := [item.args[1] for item in operands]) == [*range(len(parts))]
        and (len(parts) <= 2 or places == sorted(places))
    )


def _axis(node: Any) -> int | None:
    """The axis along which an operator splits or joins; ``None`` where its schema names none."""
    names = [argument.name for argument in node.target._schema.arguments]
    if "dim" not in names:
        return None
    at = names.index("dim")
    axis: int = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
    return axis % pytree.tree_leaves(node.meta["val"])[0].dim()


def _is_dynamic(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)
