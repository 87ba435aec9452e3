"""The element types that a runtime's kernels take, as a table, and its look-ups while a graph is built."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from onnxplug.build.spec import OpSpec

_DT = ir.DataType
#: A letter for each element type; types without a letter are never looked up.
LETTERS: dict[str, ir.DataType] = {
    "f": _DT.FLOAT,
    "d": _DT.DOUBLE,
    "h": _DT.FLOAT16,
    "b": _DT.BFLOAT16,
    "c": _DT.INT8,
    "C": _DT.UINT8,
    "s": _DT.INT16,
    "S": _DT.UINT16,
    "i": _DT.INT32,
    "I": _DT.UINT32,
    "l": _DT.INT64,
    "L": _DT.UINT64,
    "B": _DT.BOOL,
}
_LETTERED = frozenset(LETTERS.values())
HALVES = frozenset({_DT.FLOAT16, _DT.BFLOAT16})
_SMALL = frozenset({_DT.INT8, _DT.UINT8, _DT.INT16, _DT.UINT16, _DT.BOOL})

_Row = tuple[int, int | None, dict[str, frozenset[ir.DataType]]]
Types = Mapping[str, ir.DataType]


class Kernels:
    """The kernels of a runtime.

    Args:
        table: Operator of ai.onnx to its kernels, ``"13-13 T=fd; 14- T=fdil"``: the versions of the operator that a kernel
            serves, then for each type variable the letters of :data:`LETTERS` that it takes. An open end (``14-``) is the
            version that the operator has had since 14. A kernel takes every combination of its letters; several may
            have the same versions. An operator that isn't in the table has a body of other operators.
    """

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table
        self._rows: dict[str, list[_Row]] = {}

    def takes(self, spec: OpSpec, types: Types) -> bool:
        """Whether some kernel of an operator takes these element types of its type variables.

        Of an operator without a kernel, which the runtime replaces by its body, only 16-bit floats are refused.
        """
        rows = [row for row in self._rows_of(spec.op_type) if _holds(row, spec.since)]
        if not rows:
            return HALVES.isdisjoint(types.values())
        return any(
            all(dtype not in _LETTERED or dtype in allowed.get(name, _LETTERED) for name, dtype in types.items())
            for _, _, allowed in rows
        )

    def has_any(self, spec: OpSpec) -> bool:
        """Whether there is a kernel of an operator, for whatever element types."""
        return any(_holds(row, spec.since) for row in self._rows_of(spec.op_type))

    def wider(self, spec: OpSpec, types: Types) -> dict[str, ir.DataType] | None:
        """The type variables to widen for a kernel to take the operator, with their wider types; ``None`` when no widening helps.

        16-bit floats become float32; if that isn't enough, small integers and bools int32, or int64.
        """
        if self.takes(spec, types):
            return None
        halves = {name: _DT.FLOAT for name, dtype in types.items() if dtype in HALVES}
        small = [name for name, dtype in types.items() if dtype in _SMALL]
        candidates = [halves]
        candidates += [{**halves, **dict.fromkeys(small, wide)} for wide in (_DT.INT32, _DT.INT64) if small]
        unsigned = [name for name, dtype in types.items() if dtype == _DT.UINT32]
        candidates += [{**halves, **dict.fromkeys([*small, *unsigned], _DT.INT64)}] if unsigned else []
        return next((c for c in candidates if c and self.takes(spec, {**types, **c})), None)

    def _rows_of(self, op_type: str) -> list[_Row]:
        rows = self._rows.get(op_type)
        if rows is None:
            text = self._table.get(op_type, "")
            rows = self._rows[op_type] = [_parse(part) for part in text.split("; ") if part]
        return rows


def _holds(row: _Row, since: int) -> bool:
    """Whether a kernel's row is for an operator's version; a row without a last version is only for its first."""
    first, last, _ = row
    return first <= since <= last if last is not None else first == since


def _parse(text: str) -> _Row:
    versions, *constraints = text.split(" ")
    first, _, last = versions.partition("-")
    allowed = {}
    for constraint in constraints:
        name, _, letters = constraint.partition("=")
        allowed[name] = frozenset(LETTERS[letter] for letter in letters)
    return int(first), int(last) if last else None, allowed
