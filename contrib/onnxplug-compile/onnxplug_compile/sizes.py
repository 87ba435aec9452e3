"""Sizes of a graph that torch states as expressions of its inputs' sizes: computed anew in every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.torch_private import PythonPrinter

Evaluate = Callable[[Sequence[Any]], tuple[int, ...]]


class UnknownSizeError(Exception):
    """A size depends on data: no input states it."""


class Sizes:
    """Collects expressions of sizes and makes one function of the call's arguments that computes them all.

    Args:
        placeholders: The graph's placeholders in order, with ``meta["val"]``.
    """

    def __init__(self, placeholders: Sequence[torch.fx.Node]) -> None:
        self._sources: dict[str, str] = {}
        self._code: list[str] = []
        self._index: dict[str, int] = {}
        # A number states a symbol more cheaply than a tensor's size does.
        for wanted in (torch.SymInt, torch.Tensor):
            for position, node in enumerate(placeholders):
                val = node.meta.get("val")
                if isinstance(val, wanted):
                    self._add_sources(position, val)

    def _add_sources(self, position: int, val: Any) -> None:
        if isinstance(val, torch.SymInt):
            self._add_source(val, f"args[{position}]")
            return
        for axis, size in enumerate(val.shape):
            self._add_source(size, f"args[{position}].shape[{axis}]")

    def _add_source(self, size: Any, text: str) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
            self._sources.setdefault(str(size.node.expr), text)

    def index(self, size: int | torch.SymInt) -> int:
        """The index of a size in the tuple that the function returns.

        Raises:
            UnknownSizeError: The size depends on data.
        """
        code = self._text(size)
        known = self._index.get(code)
        if known is None:
            known = self._index[code] = len(self._code)
            self._code.append(code)
        return known

    def _text(self, size: int | torch.SymInt) -> str:
        if isinstance(size, int):
            return str(size)
        expr = size.node.expr
        unknown = [str(s) for s in expr.free_symbols if str(s) not in self._sources]
        if unknown:
            raise UnknownSizeError(f"no input states {', '.join(sorted(unknown))} of {expr}")
        return str(PythonPrinter().doprint(expr))

    def function(self) -> Evaluate | None:
        """The function of the call's arguments; ``None`` when no size was asked for."""
        if not self._code:
            return None
        lines = [f"    {name} = {text}" for name, text in self._sources.items()]
        source = "\n".join(["def evaluate(args):", *lines, f"    return ({', '.join(self._code)},)"])
        space: dict[str, Any] = {"math": __import__("math"), "torch": torch}
        exec(compile(source, "<sizes of a graph>", "exec"), space)
        evaluate: Evaluate = space["evaluate"]
        return evaluate
