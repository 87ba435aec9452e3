"""The choices of the eager model, recorded while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onnxplug.capture.signature import FunctionalGraph
from onnxplug.torch_private import HigherOrderOperator, OpOverload, TorchDispatchMode, pytree
from onnxplug.verification.repetition import is_real


@dataclass(frozen=True)
class _Call:
    """A call of an operator: its arguments by name, and its result."""

    arguments: Mapping[str, Any]
    result: Any


#: Operators that cast: a captured graph has ``aten::to``, of which PyTorch makes ``aten::_to_copy`` where the type changes.
_CASTS = ("aten::to", "aten::_to_copy")


class _Recorder(TorchDispatchMode):
    """Records the calls of some kinds of operators in their order, without those of operators that call functions."""

    supports_higher_order_operators = True

    def __init__(self, kinds: Collection[Any]) -> None:
        super().__init__()
        self._kinds = kinds
        self.calls: defaultdict[Any, list[_Call]] = defaultdict(list)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        named = _by_name(func, args, kwargs or {})
        kept = _copies(named) if func in self._kinds or func._schema.name in _CASTS else None
        result = func(*args, **(kwargs or {}))
        kind = _kind(func, named.get("self"), result)
        if kept is not None and kind in self._kinds:
            self.calls[kind].append(_Call(kept, _copies(result)))
        return result


@dataclass(frozen=True)
class EagerValues:
    """The operands and results of choosing operators in a run of the eager model.

    A node of the captured graph is the eager model's call of the same operator at the same place, where both have as many calls of
    it; else nothing is known of the node. That its operands agree with the captured graph's is for the reader to compare.
    """

    calls: Mapping[torch.fx.Node, _Call]

    @classmethod
    def of(cls, eager: Callable[[], Any], functional: FunctionalGraph, nodes: Collection[torch.fx.Node]) -> EagerValues:
        """Runs the eager model.

        Args:
            eager: Runs it.
            functional: The captured graph.
            nodes: Choosing operators of the graph.
        """
        kinds = {_kind_of(node) for node in nodes} - {None}
        with _Recorder(kinds) as recorder:
            eager()
        places: defaultdict[Any, list[torch.fx.Node]] = defaultdict(list)
        for node in functional.graph.nodes:
            places[_kind_of(node)].append(node)
        calls: dict[torch.fx.Node, _Call] = {}
        for kind in kinds:
            if len(places[kind]) == len(recorder.calls[kind]):
                calls.update(zip(places[kind], recorder.calls[kind], strict=True))
        return cls(calls)

    def results(self, node: torch.fx.Node, expected: Any) -> list[Any]:
        """The results of an operator, ``None`` for unknown results."""
        count = len(expected) if isinstance(expected, tuple | list) else 1
        if node not in self.calls:
            return [None] * count
        result = self.calls[node].result
        return list(result) if isinstance(result, tuple | list) else [result]

    def operand(self, node: torch.fx.Node, operand: torch.fx.Node, expected: Any) -> Any:
        """What an operator reads; ``None`` where it is not known."""
        if node not in self.calls:
            return None
        recorded = self.calls[node].arguments
        for name, argument in _by_name(node.target, node.args, node.kwargs).items():
            value = recorded.get(name)
            if argument is operand:
                return value
            if isinstance(argument, list | tuple) and operand in argument:
                return value[argument.index(operand)] if isinstance(value, list | tuple) else None
        return None


def _kind(operator: OpOverload, operand: Any, result: Any) -> Any:
    """Calls of one kind have their order in common: an operator, or the casts that round."""
    if operator._schema.name not in _CASTS:
        return operator
    return "cast" if is_real(operand) and not is_real(result) else None


def _kind_of(node: torch.fx.Node) -> Any:
    """The kind of a node; ``None`` of a node that calls no operator."""
    if not isinstance(node.target, OpOverload):
        return None
    operand = node.args[0] if node.args else None
    return _kind(
        node.target, operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None, node.meta.get("val")
    )


def _by_name(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _copies(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.detach().clone(), values)
