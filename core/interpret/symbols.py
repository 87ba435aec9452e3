"""Symbolic sizes of the captured program, by the names that the user gave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.capture.dimensions import in_names

Dim = int | ir.SymbolicDim


class SymbolNames:
    """Turns torch's symbolic sizes into ints or named ONNX dimensions; each distinct expression is worked out once.

    Args:
        names: Symbol of torch (``"s77"``) to the user's name (``"batch"``).

    Attributes:
        expressions: Name of every dimension handed out to its sympy expression, whose symbols bear the users' names.
        originals: The same with torch's symbols.
        constants: Names of dimensions that torch treats as numbers, with these numbers, after a warning to the user.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)
        self._known: dict[Any, Dim] = {}
        #: The same by torch's node of the expression, which is hashed faster.
        self._by_node: dict[Any, Dim] = {}
        self.expressions: dict[str, Any] = {}
        self.originals: dict[str, Any] = {}
        self.constants: set[tuple[str, int]] = set()

    def dim(self, size: int | torch.SymInt) -> Dim:
        """The ONNX dimension of one size."""
        if type(size) is int:
            return size
        node = size.node  # type: ignore[union-attr]
        dimension = self._by_node.get(node)
        if dimension is None:
            expr = node._expr
            dimension = self._known.get(expr)
            if dimension is None:
                dimension = self._known[expr] = self._work_out(node.expr)
            self._by_node[node] = dimension
        return dimension

    def _work_out(self, expr: Any) -> Dim:
        if expr.is_Integer:
            return int(expr)
        renamed = in_names(self._names, expr)
        name = str(renamed)
        self.expressions[name] = renamed
        self.originals[name] = expr
        return ir.SymbolicDim(name)

    def number(self, value: Any) -> Any:
        """A symbolic number as a Python number when it is constant, else the name of its expression."""
        if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return value
        expr = value.node.expr
        if expr.is_number:
            return int(expr) if isinstance(value, torch.SymInt) else float(expr)
        if expr.is_Boolean and not expr.free_symbols:
            return bool(expr)
        if isinstance(value, torch.SymInt):
            dim = self.dim(value)
            return dim if isinstance(dim, int) else dim.value
        return f"{type(value).__name__}({expr})"

    def dims(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """The ONNX dimensions of a (fake) tensor."""
        dim = self.dim
        return tuple([s if type(s) is int else dim(s) for s in tensor.shape])
