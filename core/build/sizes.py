"""The sizes of a graph: the value that holds each, and how to compute a size that no value holds yet.

torch states each dynamic size as an expression, and the name of a size is the text of that expression. An example, for an input
``x`` of shape ``[batch, 2*seq]``:

- ``add_source`` records that ``batch`` can be read at axis 0 of ``x`` and ``2*seq`` at axis 1. No node is made yet.
- ``g.dim(x, 0)`` emits ``Shape(x, start=0, end=1)``, the *vector* of ``batch``, and ``Squeeze`` of it, its *scalar*. The record of
  ``batch`` has both now; later requests for ``batch``, also as the size of another tensor, get the same values.
- ``g.size(SymbolicDim("batch + 1"))`` is computed from the expression: ``Add(batch, 1)``.
- ``g.size(SymbolicDim("seq"))`` is solved for: the size at axis 1 is twice ``seq``, hence ``Div(2*seq, 2)``.

Each fact of a record (its scalar, its vector, its source) is also an entry of a journal. The records of a branch, a loop's body
or a rule that declined are undone by going back to the journal's length before it: nothing outside reads a value made inside.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir

from onnxplug.build.expressions import SizeComputer
from onnxplug.build.opset import Emitter
from onnxplug.errors import Unsupported

#: torch's names of sizes that depend on data, in an expression.
_UNBACKED = re.compile(r"\bu\d+\b")

Size = int | ir.Value
"""A size: an int where it is static, a 0-dim int64 Value where it is only known at run time."""


class _Record:
    """The record of a size.

    Attributes:
        name: Its name; ``None`` for a size that a converter computed.
        dim: The dimension of that name, a single object for all shapes: identical dimensions are compared fastest.
        scalar: The 0-dim int64 value that holds it.
        vector: The same as a value of shape [1].
        source, axis: A value, and its axis that has this size.
        is_wanted: Whether it is being solved for now.
    """

    __slots__ = ("axis", "dim", "is_wanted", "name", "scalar", "source", "vector")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.dim: ir.SymbolicDim | None = None
        self.scalar: ir.Value | None = None
        self.vector: ir.Value | None = None
        self.source: ir.Value | None = None
        self.axis = 0
        self.is_wanted = False


class Sizes:
    """The table of the sizes of a graph under construction.

    Args:
        g: The builder, through which sizes are read and computed.
        expressions: Name of a size to its sympy expression.
    """

    def __init__(self, g: Emitter, expressions: Mapping[str, Any]) -> None:
        self._g = g
        self.expressions = expressions
        self._records: dict[str, _Record] = {}
        self._holders: dict[ir.Value, list[_Record]] = {}
        self._journal: list[tuple[_Record, str]] = []
        self._shapes: dict[tuple[Any, ...], ir.Shape] = {}

    # -- records -------------------------------------------------------------------------------------------------------

    def _record(self, name: str) -> _Record:
        record = self._records.get(name)
        if record is None:
            record = self._records[name] = _Record(name)
        return record

    def _record_of(self, scalar: ir.Value) -> _Record:
        """The record of a size that a value holds; a new record, without a name, where there is none."""
        for record in self._holders.get(scalar, ()):
            if record.scalar is scalar:
                return record
        record = _Record(None)
        self._keep(record, "scalar", scalar)
        return record

    def _keep(self, record: _Record, field: str, value: ir.Value) -> None:
        if getattr(record, field) is None:
            setattr(record, field, value)
            self._holders.setdefault(value, []).append(record)
            self._journal.append((record, field))

    def add(self, name: str, scalar: ir.Value) -> None:
        """Records that a 0-dim int64 value holds a dynamic size."""
        record = self._record(name)
        if record.scalar is not None and record.scalar is not scalar:
            record = _Record(name)  # another value of a size that has its name already
        self._keep(record, "scalar", scalar)

    def add_source(self, dim: ir.SymbolicDim, value: ir.Value, axis: int) -> None:
        """Records that an axis of a value has the size ``dim``, which is read from there when it is first needed.

        Args:
            dim: The dynamic dimension.
            value: The value.
            axis: The axis, not negative.
        """
        if dim.value is None:
            return
        record = self._record(dim.value)
        if record.source is None:
            record.axis = axis
            record.dim = record.dim or dim
            self._keep(record, "source", value)

    def add_sources(self, values: Any) -> None:
        """Records that sizes which depend on the data are read from the results of an operator."""
        for value in values if isinstance(values, list | tuple) else (values,):
            for axis, dim in enumerate(value.shape or ()) if isinstance(value, ir.Value) else ():
                if isinstance(dim, ir.SymbolicDim):
                    self.add_source(dim, value, axis)

    # -- going back ----------------------------------------------------------------------------------------------------

    def mark(self) -> int:
        """The present state of the table, for :meth:`undo`."""
        return len(self._journal)

    def undo(self, mark: int) -> None:
        """Takes back everything that was recorded since ``mark``."""
        while len(self._journal) > mark:
            record, field = self._journal.pop()
            value = getattr(record, field)
            if value is not None:
                setattr(record, field, None)
                self._holders[value].remove(record)

    def forget(self, values: Iterable[ir.Value]) -> None:
        """Takes back the records of values that are no longer in the graph."""
        for value in values:
            for record in self._holders.pop(value, ()):
                if record.scalar is value:
                    record.scalar = record.vector = None
                if record.vector is value:
                    record.vector = None
                if record.source is value:
                    record.source = None

    @contextmanager
    def local(self) -> Iterator[None]:
        """A context whose records are undone at its end.

        For graphs that are inlined more than once: their symbols have another value each time.
        """
        mark = self.mark()
        try:
            yield
        finally:
            self.undo(mark)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """A context with an empty table: the body of a function can't read the values outside of it."""
        outer = self._records, self._holders, self._journal
        self._records, self._holders, self._journal = {}, {}, []
        try:
            yield
        finally:
            self._records, self._holders, self._journal = outer

    # -- values of sizes -----------------------------------------------------------------------------------------------

    def find(self, dim: ir.SymbolicDim | str) -> ir.Value | None:
        """The scalar of a dynamic size that a value holds, or that can be read from a value's axis; ``None`` when there is none."""
        name = dim if isinstance(dim, str) else dim.value
        record = self._records.get(name) if name is not None else None
        if record is None:
            return None
        if record.scalar is None and record.source is not None:
            return self.read(record.source, record.axis, name)
        return record.scalar

    def read(self, x: ir.Value, axis: int, name: str | None = None) -> ir.Value:
        """The scalar of the size of an axis, read from the value at run time.

        Args:
            x: The value.
            axis: The axis.
            name: The name of the size, under which it is found again.
        """
        op = self._g.op
        if self._g.opset >= 15:
            vector = op.Shape(x, start=axis, end=axis + 1)
        else:
            vector = op.Gather(op.Shape(x), [axis], axis=0)
        scalar = op.Squeeze(vector, [0])
        if name is not None:
            self.add(name, scalar)
        self._keep(self._record_of(scalar), "vector", vector)
        return scalar

    def expression(self, size: ir.SymbolicDim | ir.Value) -> Any:
        """The sympy expression of a dynamic dimension, or of the size that a scalar holds; ``None`` where it has none."""
        if isinstance(size, ir.SymbolicDim):
            return self.expressions.get(size.value or "")
        names = (record.name or "" for record in self._holders.get(size, ()) if record.scalar is size)
        return next((self.expressions[name] for name in names if name in self.expressions), None)

    def require(self, dim: ir.SymbolicDim | str) -> ir.Value:
        """The scalar of a dynamic size, computed where no value holds it yet.

        Raises:
            Unsupported: It depends on a size that no value of the graph holds, or on a function without a translation.
        """
        scalar = self.find(dim)
        if scalar is not None:
            return scalar
        name = dim if isinstance(dim, str) else dim.value
        expr = self.expressions.get(name) if name is not None else None
        if name is not None and (expr is None or expr.is_Symbol):
            scalar = self._solved(name)
        elif expr is not None:
            scalar = SizeComputer(self._g, self.require).size(expr)
        if name is None or scalar is None:
            raise Unsupported(f"no value in the graph has the dynamic size {name!r}")
        self.add(name, scalar)
        return scalar

    def _solved(self, name: str) -> ir.Value | None:
        """The scalar of a free symbol, solved from an axis whose size is linear in it: ``s = (size - 1) // 2`` for ``2*s + 1``."""
        wanted = self._record(name)
        if wanted.is_wanted:
            return None
        wanted.is_wanted = True
        try:
            for record in list(self._records.values()):
                expr = self.expressions.get(record.name or "") if record.source is not None else None
                if expr is None:
                    continue
                symbol = next((s for s in expr.free_symbols if str(s) == name), None)
                if symbol is None:
                    continue
                factor = expr.coeff(symbol, 1)
                rest = (expr - factor * symbol).expand()
                if not factor.is_Integer or symbol in rest.free_symbols:
                    continue
                size = self.find(record.name or "")
                try:
                    offset = SizeComputer(self._g, self.require).size(rest)
                except Unsupported:
                    continue
                # The division is exact.
                return self._g.op.Div(self._g.op.Sub(size, offset), self._g.const(int(factor)))
            return None
        finally:
            wanted.is_wanted = False

    def vector_of(self, scalar: ir.Value) -> ir.Value:
        """A size as an int64 value of shape [1]."""
        if scalar.shape is not None and len(scalar.shape) == 1:
            return scalar
        record = self._record_of(scalar)
        if record.vector is None:
            self._keep(record, "vector", self._g.op.Unsqueeze(scalar, [0]))
        assert record.vector is not None
        return record.vector

    # -- facts about sizes ---------------------------------------------------------------------------------------------

    def name_of(self, size: Any) -> str | None:
        """The name of a dynamic size, given as a dimension or as its scalar; ``None`` where it has none."""
        if type(size) is ir.SymbolicDim:
            return size.value
        for record in self._holders.get(size, ()):
            if record.scalar is size and record.name is not None:
                return record.name
        return None

    def describe(self, size: Any) -> str:
        """A size, or a list of sizes, as messages name it."""
        if isinstance(size, list | tuple):
            return "[" + ", ".join(map(self.describe, size)) + "]"
        if isinstance(size, ir.Value):
            return self.name_of(size) or size.name or "computed at run time"
        return str(size)

    def never_negative(self, size: Any) -> bool:
        """Whether a size is surely 0 or more: an int, or an expression that torch knows to be so."""
        if isinstance(size, int):
            return size >= 0
        expr = self.expressions.get(self.name_of(size) or "") if isinstance(size, ir.Value) else None
        return expr is not None and bool(expr.is_nonnegative)

    def may_be_empty(self, size: Any) -> bool:
        """Whether a size may be 0 in any run: it is known only from values, or is a difference that may be 0 where no size is."""
        name = self.name_of(size) or ""
        if _UNBACKED.search(name) is not None:
            return True
        expr = self.expressions.get(name)
        if expr is None or not expr.is_Add or not expr.is_polynomial():
            return False
        ones = dict.fromkeys(expr.free_symbols, 1)
        # A sum without a decreasing term is smallest where all sizes are 1.
        return bool(expr.subs(ones) <= 0) or any(term.subs(ones) < 0 for term in expr.args if term.free_symbols)

    def dim_of(self, size: Any) -> Any:
        """A size as a dimension of a shape: a new dimension without a name for a scalar that has none."""
        if type(size) is not ir.Value:
            return size
        name = self.name_of(size)
        record = self._records.get(name) if name is not None else None
        return record.dim if record is not None and record.dim is not None else ir.SymbolicDim(name)

    def shape_of(self, dims: tuple[Any, ...]) -> ir.Shape:
        """The shape that the values of these dimensions share, which can't be changed.

        A shape with an unknown dimension is new each time: two unknown dimensions are not equal.
        """
        shape = self._shapes.get(dims)
        if shape is None:
            shape = ir.Shape(dims)
            for dim in shape.dims:
                if not isinstance(dim, int) and dim.value is None:
                    return shape
            shape.freeze()
            self._shapes[dims] = shape
        return shape
