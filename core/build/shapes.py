"""Sizes, static and dynamic: the part of the builder that knows which value holds which symbolic dimension."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onnxplug.build.expressions import SizeComputer
from onnxplug.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from onnxplug.build.opset import Opset

#: torch's names of sizes that depend on data, in an expression.
_UNBACKED = re.compile(r"\bu\d+\b")

Size = int | ir.Value
"""A size: an int where it is static, a 0-dim int64 Value where it is only known at run time."""


class ShapeMixin:
    """Dimension arithmetic of :class:`GraphBuilder`.

    A symbolic dimension (``"batch"``, ``"2*seq"``) is computed once: the first value that has it is kept and found again
    by its name. One that no value has yet is computed from its expression. Sizes are 0-dim int64 Values; their 1-dim form,
    which shapes are concatenated from, is remembered too.

    Attributes:
        expressions: Name of a symbolic dimension to its sympy expression.
    """

    op: Opset
    opset: int
    optimize: bool

    def __init__(self) -> None:
        self._symbols: dict[str, ir.Value] = {}
        self._symbol_of: dict[ir.Value, str] = {}
        self._further_names: dict[ir.Value, list[str]] = {}
        self._sources: dict[str, tuple[ir.Value, int]] = {}
        self._read_from: dict[ir.Value, list[str]] = {}
        self._vector_of: dict[ir.Value, ir.Value] = {}
        self._scalar_of: dict[ir.Value, ir.Value] = {}
        self._dims: dict[str, ir.SymbolicDim] = {}
        self._shapes: dict[tuple[Any, ...], ir.Shape] = {}
        self._counter = count()
        self._pending: set[str] = set()
        self.expressions: Mapping[str, Any] = {}
        super().__init__()

    if TYPE_CHECKING:

        def const(self, value: Any, dtype: torch.dtype | ir.DataType | None = None) -> ir.Value: ...
        def constant(self, value: ir.Value | None) -> np.ndarray | None: ...
        def cast(self, x: ir.Value, dtype: torch.dtype | ir.DataType) -> ir.Value: ...

    def fresh(self) -> int:
        """A number not given before, for names."""
        return next(self._counter)

    # -- symbols -------------------------------------------------------------------------------------------------------

    def add_symbol_source(self, dim: ir.SymbolicDim, value: ir.Value, axis: int) -> None:
        """Records that an axis of a value has the size ``dim``, which is read from there when it is first needed.

        Args:
            dim: The dynamic dimension.
            value: The value.
            axis: The axis, not negative.
        """
        if dim.value is not None and dim.value not in self._sources:
            self._dims.setdefault(dim.value, dim)
            self._sources[dim.value] = value, axis
            self._read_from.setdefault(value, []).append(dim.value)

    def add_symbol_sources(self, values: Any) -> None:
        """Records that sizes which depend on the data are read from the results of an operator."""
        for value in values if isinstance(values, list | tuple) else (values,):
            for axis, dim in enumerate(value.shape or ()) if isinstance(value, ir.Value) else ():
                if isinstance(dim, ir.SymbolicDim):
                    self.add_symbol_source(dim, value, axis)

    def set_symbol(self, name: str, value: ir.Value) -> None:
        """Records that a value holds a dynamic size.

        Args:
            name: The name of the size.
            value: A 0-dim int64 value.
        """
        self._symbols.setdefault(name, value)
        if self._symbol_of.setdefault(value, name) != name:
            self._further_names.setdefault(value, []).append(name)

    def known_symbol(self, dim: ir.SymbolicDim | str) -> ir.Value | None:
        """The 0-dim int64 value that holds a symbolic size, or an axis of an input does; ``None`` when there is none."""
        name = dim if isinstance(dim, str) else dim.value
        if name is None:
            return None
        found = self._symbols.get(name)
        if found is None and name in self._sources:
            value, axis = self._sources[name]
            found = self._read_dim(value, axis, name)
        return found

    def symbol(self, dim: ir.SymbolicDim | str) -> ir.Value | None:
        """The 0-dim int64 value that holds a symbolic size, computed from its expression where no value has it yet.

        ``None`` when the expression is not known or depends on a size that no value of the graph has.
        """
        found = self.known_symbol(dim)
        if found is None:
            try:
                found = self._computed(dim)
            except Unsupported:
                return None
        return found

    def _computed(self, dim: ir.SymbolicDim | str) -> ir.Value:
        """A symbolic size computed from its expression, or from an axis whose size is a multiple of it.

        Raises:
            Unsupported: It depends on a size that no value of the graph has, or on a function without a translation.
        """
        name = dim if isinstance(dim, str) else dim.value
        expr = self.expressions.get(name) if name is not None else None
        found: ir.Value | None = None
        if name is not None and (expr is None or expr.is_Symbol):
            found = self._solved(name)
        elif expr is not None:
            found = SizeComputer(self).size(expr)
        if name is None or found is None:
            raise Unsupported(f"no value in the graph has the dynamic size {name!r}")
        self.set_symbol(name, found)
        return found

    def _solved(self, name: str) -> ir.Value | None:
        """A free symbol from an axis that has a linear expression of it: ``s`` is ``(size - 1) // 2`` of ``2*s + 1``."""
        if name in self._pending:
            return None
        self._pending.add(name)
        try:
            for source in self._sources:
                expr = self.expressions.get(source)
                if expr is None:
                    continue
                symbol = next((s for s in expr.free_symbols if str(s) == name), None)
                if symbol is None:
                    continue
                factor = expr.coeff(symbol, 1)
                rest = (expr - factor * symbol).expand()
                if not factor.is_Integer or symbol in rest.free_symbols:
                    continue
                size = self.known_symbol(source)
                try:
                    offset = SizeComputer(self).size(rest)
                except Unsupported:
                    continue
                # The division is exact.
                return self.op.Div(self.op.Sub(size, offset), self.const(int(factor)))
            return None
        finally:
            self._pending.discard(name)

    def symbol_name(self, value: Any) -> str:
        """How to call a dynamic size in a message."""
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self.symbol_name(v) for v in value) + "]"
        if isinstance(value, ir.Value):
            return self._symbol_of.get(value) or value.name or "computed at run time"
        return str(value)

    def forget_sizes(self, values: Iterable[ir.Value]) -> None:
        """Forgets which sizes values hold, as they are no longer there to be read."""
        for value in values:
            name = self._symbol_of.pop(value, None)
            if name is not None:
                for each in (name, *self._further_names.pop(value, ())):
                    if self._symbols.get(each) is value:
                        del self._symbols[each]
            for each in self._read_from.pop(value, ()):
                if each in self._sources and self._sources[each][0] is value:
                    del self._sources[each]
            self._vector_of.pop(value, None)
            # The vector may have been made in a branch, of a size from outside it.
            size = self._scalar_of.pop(value, None)
            if size is not None and self._vector_of.get(size) is value:
                del self._vector_of[size]

    @contextmanager
    def only_symbols_within(self) -> Iterator[None]:
        """Forgets every symbol until it is left: the body of a function can't read values outside of it."""
        state = (self._symbols, self._symbol_of, self._sources, self._vector_of, self._scalar_of)
        self._symbols, self._symbol_of, self._sources, self._vector_of, self._scalar_of = {}, {}, {}, {}, {}
        try:
            yield
        finally:
            self._symbols, self._symbol_of, self._sources, self._vector_of, self._scalar_of = state

    @contextmanager
    def local_symbols(self) -> Iterator[None]:
        """Forgets, when it is left, which values hold sizes that were computed inside.

        For graphs that are put in place more than once: what a symbol of theirs stands for differs each time.
        """
        symbols, symbol_of = dict(self._symbols), dict(self._symbol_of)
        try:
            yield
        finally:
            self._symbols, self._symbol_of = symbols, symbol_of

    def _read_dim(self, x: ir.Value, axis: int, name: str | None) -> ir.Value:
        if self.opset >= 15:
            vector = self.op.Shape(x, start=axis, end=axis + 1)
        else:
            vector = self.op.Gather(self.op.Shape(x), [axis], axis=0)
        scalar = self.op.Squeeze(vector, [0])
        self._vector_of.setdefault(scalar, vector)
        if name is not None:
            self.set_symbol(name, scalar)
        return scalar

    # -- what converters use -------------------------------------------------------------------------------------------

    def shape(self, x: ir.Value) -> ir.Value:
        """The shape of ``x`` as a 1-dim int64 Value with an element for each axis; a constant when the shape is static."""
        return self.op.Shape(x)

    def dim(self, x: ir.Value, axis: int) -> Size:
        """The size of one axis.

        Args:
            x: The value.
            axis: The axis; a negative one counts from the end.

        Returns:
            An int when the size is static, else a 0-dim int64 Value.
        """
        if x.shape is None:
            return self._read_dim(x, axis, None)
        dims = x.shape.dims
        axis %= len(dims)
        size = dims[axis]
        return size if isinstance(size, int) else self._dynamic_dim(x, axis, size)

    def _dynamic_dim(self, x: ir.Value, axis: int, dim: ir.SymbolicDim) -> ir.Value:
        found = self.known_symbol(dim)
        return found if found is not None else self._read_dim(x, axis, dim.value)

    def size(self, dim: int | ir.SymbolicDim) -> Size:
        """A dimension as a size.

        Returns:
            An int when the dimension is static, else the 0-dim int64 Value that holds its size.

        Raises:
            Unsupported: No value in the graph holds the size, and it can't be computed from others.
        """
        return self._need(dim) if isinstance(dim, ir.SymbolicDim) else dim

    def dims(self, x: ir.Value) -> list[Size]:
        """The size of every axis of ``x``, whose rank must be known."""
        assert x.shape is not None
        dims = x.shape.dims
        return [size if isinstance(size, int) else self._dynamic_dim(x, axis, size) for axis, size in enumerate(dims)]

    def never_negative(self, size: Any) -> bool:
        """Whether a size is surely 0 or more: an int, or what torch's expression of it says."""
        if isinstance(size, int):
            return size >= 0
        expr = self.expressions.get(self._symbol_of.get(size, "")) if isinstance(size, ir.Value) else None
        return expr is not None and bool(expr.is_nonnegative)

    def concrete_shape(self, x: ir.Value | Sequence[Size | ir.SymbolicDim], what: str = "shape") -> list[int]:
        """Static sizes as ints, for attributes and for converters that need them.

        Args:
            x: A value, whose shape is meant, or sizes.
            what: What the sizes are, for the message of the error.

        Raises:
            Unsupported: A size is dynamic, and the message names it; or the rank is unknown.
        """
        sizes: Sequence[Any] = list(x.shape or ()) if isinstance(x, ir.Value) else x
        if isinstance(x, ir.Value) and x.shape is None:
            raise Unsupported(f"the {what} must be static, but its rank is unknown")
        result = []
        for axis, size in enumerate(sizes):
            if not isinstance(size, int):
                name = size.value if isinstance(size, ir.SymbolicDim) else self.symbol_name(size)
                raise Unsupported(
                    f"the {what} must be static, but axis {axis} is the dynamic dimension {name!r}",
                    hint=f"Export with {name!r} static.",
                )
            result.append(size)
        return result

    def vector(self, sizes: Sequence[Size | ir.SymbolicDim]) -> ir.Value:
        """A 1-dim int64 Value of sizes; ints beside each other become one constant."""
        parts: list[ir.Value] = []
        pending: list[int] = []
        for size in sizes:
            if isinstance(size, int):
                pending.append(size)
                continue
            if not isinstance(size, ir.Value):
                size = self._need(size)
            constant = self.constant(size)
            if constant is not None and constant.size == 1:
                pending.append(int(constant.reshape(())))
                continue
            if pending:
                parts.append(self.integers(pending))
                pending = []
            parts.append(self.as_vector(size))
        if pending or not parts:
            parts.append(self.integers(pending))
        if len(parts) == 1:
            return parts[0]
        return self.op.Concat(*parts, axis=0)

    def as_vector(self, size: Size) -> ir.Value:
        """A size as an int64 Value of shape [1]."""
        if isinstance(size, int):
            return self.integers([size])
        found = self._vector_of.get(size)
        if found is None:
            if size.shape is not None and len(size.shape) == 1:
                return size
            found = self.op.Unsqueeze(size, [0])
            self._vector_of[size] = found
            self._scalar_of[found] = size
        return found

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        """A shared constant, 1-dim and int64: a static shape, or axes."""
        return self.const(list(map(int, numbers)), ir.DataType.INT64)

    def as_scalar(self, size: Size) -> ir.Value:
        """A size as a 0-dim int64 Value."""
        return self.const(size) if isinstance(size, int) else size

    def _need(self, dim: ir.SymbolicDim) -> ir.Value:
        found = self.known_symbol(dim)
        return found if found is not None else self._computed(dim)

    def reshape(self, x: ir.Value, sizes: Sequence[Size | ir.SymbolicDim]) -> ir.Value:
        """``x`` with another shape, by as few nodes as the sizes allow.

        A size equal to the input's at the same axis is copied (0 in ONNX's Reshape), one other dynamic size is inferred at run time
        (-1), and only further ones are computed. A size of -1 stays -1.

        Args:
            x: The value.
            sizes: The new shape: ints, sizes or dimensions; their product is the number of elements of ``x``.

        Raises:
            Unsupported: A size of 0 is asked for below opset 14, or no value in the graph holds a dynamic size.
        """
        source: Sequence[Any] = x.shape.dims if x.shape is not None else ()
        target: list[int | None] = []
        has_zero = any(isinstance(s, int) and s == 0 for s in sizes)
        for axis, size in enumerate(sizes):
            if isinstance(size, int):
                target.append(size)
            elif not has_zero and axis < len(source) and self._is_size(size, source[axis]):
                target.append(0)
            else:
                target.append(None)
        if None in target and -1 not in target and not has_zero:
            unknown = [axis for axis, size in enumerate(target) if size is None]
            # Of several the one that no value has yet.
            given = [(axis, sizes[axis]) for axis in unknown]
            new = [a for a, size in given if type(size) is ir.SymbolicDim and self.known_symbol(size) is None]
            if len(unknown) == 1 or new:
                inferred = (new or unknown)[0]
                # Nothing is inferred (-1) beside a size of 0, which those that depend on data (u0) may be. ONNX Runtime's
                # ReshapeFusion would bring the -1 back, but for allowzero=1.
                others = [size for axis, size in enumerate(sizes) if axis != inferred]
                if self.opset >= 14 and any(map(self._depends_on_data, others)) and all(map(self._is_known, sizes)):
                    return self._reshaped(self.op.Reshape(x, self.vector(sizes), allowzero=1), sizes)
                target[inferred] = -1
        static = [size for size in target if size is not None]
        if len(static) == len(target):
            constant = self.integers(static)
            if has_zero and self.opset >= 14:
                return self._reshaped(self.op.Reshape(x, constant, allowzero=1), sizes)
            if has_zero and any(t == 0 and (i >= len(source) or source[i] != 0) for i, t in enumerate(target)):
                raise Unsupported("a reshape to a size of 0 needs opset 14 or later")
            return self._reshaped(self.op.Reshape(x, constant), sizes)
        mixed = [t if t is not None else s for t, s in zip(target, sizes, strict=True)]
        if not has_zero:
            return self._reshaped(self.op.Reshape(x, self.vector(mixed)), sizes)
        return self._reshaped(self.op.Reshape(x, self.vector(sizes), allowzero=1), sizes)

    def _is_known(self, size: Any) -> bool:
        return type(size) is not ir.SymbolicDim or self.symbol(size) is not None

    def _depends_on_data(self, size: Any) -> bool:
        """Whether a size is known only from values: it may be 0 in any run."""
        name = size.value if type(size) is ir.SymbolicDim else self._symbol_of.get(size)
        return name is not None and _UNBACKED.search(name) is not None

    def _is_size(self, size: Any, dim: Any) -> bool:
        if isinstance(dim, int) or dim.value is None:
            return False
        name = size.value if type(size) is ir.SymbolicDim else self._symbol_of.get(size)
        return bool(name == dim.value)

    def _reshaped(self, value: ir.Value, sizes: Sequence[Size | ir.SymbolicDim]) -> ir.Value:
        """Gives a reshape's result the dimensions that it is known to have."""
        producer = value.producer()
        if (
            producer is not None
            and producer.op_type == "Reshape"
            and -1 not in [s for s in sizes if isinstance(s, int)]
        ):
            dims = [self._named_dim(self._symbol_of.get(size)) if type(size) is ir.Value else size for size in sizes]
            value.shape = self.shape_of(tuple(dims))
        return value

    def _named_dim(self, name: str | None) -> ir.SymbolicDim:
        """The dimension of a name, one object as far as it is known: identical ones are compared fastest."""
        found = self._dims.get(name) if name is not None else None
        return ir.SymbolicDim(name) if found is None else found

    def shape_of(self, dims: tuple[Any, ...]) -> ir.Shape:
        """The shape that the values of these dimensions share, which can't be changed.

        One with an unknown dimension is new each time: two unknown ones are not equal.
        """
        found = self._shapes.get(dims)
        if found is None:
            found = ir.Shape(dims)
            for dim in found.dims:
                if not isinstance(dim, int) and dim.value is None:
                    return found
            found.freeze()
            self._shapes[dims] = found
        return found
