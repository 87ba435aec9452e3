"""Simplification at emission: a node that would do nothing, or undo the node before it, is never made.

Each function takes ``(g, inputs, attributes)`` and returns the value to use instead, or ``None`` to emit the node. It may
emit other nodes through ``g``. Everything here is exact: no value changes by a bit, no shape by a dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from onnxplug.build.inference.dims import broadcast, dims_of, known
from onnxplug.build.matching import made_by


class Emitter(Protocol):
    """The part of the builder that simplifications use."""

    @property
    def op(self) -> Any:
        """The operators of ai.onnx."""

    def vector(self, sizes: Sequence[int]) -> ir.Value:
        """A shared constant, 1-dim and int64."""

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The array of a constant; ``None`` for other values."""


Inputs = Sequence[ir.Value | None]
Attributes = Mapping[str, Any]
Simplifier = Callable[[Emitter, Inputs, Attributes], "ir.Value | None"]

_INT_MAX = (1 << 31) - 1


def _ints(g: Emitter, value: ir.Value | None) -> Sequence[int] | None:
    numbers = known(value)
    if numbers is not None or value is None:
        return numbers
    array = g.constant(value)
    return [int(v) for v in array.reshape(-1)] if array is not None else None


def _same_dims(a: Any, b: Any) -> bool:
    """Whether two dimension tuples are surely equal: unknown sizes never are."""
    if a is None or b is None or len(a) != len(b):
        return False
    return all(x is y or (x == y and (isinstance(x, int) or x.value is not None)) for x, y in zip(a, b, strict=True))


def _identity(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    return inputs[0]


def _cast(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    x = inputs[0]
    return x if x is not None and x.dtype == attributes["to"] else None


def _transpose(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    x = inputs[0]
    perm = attributes.get("perm")
    if x is None or perm is None:
        return None
    if tuple(perm) == tuple(range(len(perm))):
        return x
    before = made_by(x, "Transpose")
    if before is not None and "perm" in before.attributes:
        first = before.attributes["perm"].as_ints()
        return g.op.Transpose(before.inputs[0], perm=[first[p] for p in perm])
    return None


def _reshape(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    x, shape = inputs[0], inputs[1]
    target = _ints(g, shape)
    if x is None or target is None:
        return None
    dims = dims_of(x)
    zero_copies = not attributes.get("allowzero")
    if dims is not None and len(dims) == len(target):
        # One -1 may replace the only dimension that isn't known to be equal: the element count determines it,
        # unless another dimension may be 0.
        equal = [(t == 0 and zero_copies) or (isinstance(d, int) and d == t) for d, t in zip(dims, target, strict=True)]
        if all(equal) or (equal.count(False) == 1 and target[equal.index(False)] == -1):
            return x
    before = made_by(x, "Reshape")
    if before is None or before.attributes.get("allowzero"):
        return None
    if 0 not in target:
        return g.op.Reshape(before.inputs[0], shape)
    source = dims_of(before.inputs[0])
    if not zero_copies or dims is None or source is None:
        return None
    # Copied sizes are sizes of the tensor before it where it has them at the same axes.
    copied = [axis for axis, t in enumerate(target) if t == 0]
    if copied[-1] < len(source) and all(_same_dims((source[axis],), (dims[axis],)) for axis in copied):
        return g.op.Reshape(before.inputs[0], shape)
    merged = _copied_from(g, before.inputs[1], target)
    return g.op.Reshape(before.inputs[0], merged) if merged is not None else None


def _copied_from(g: Emitter, shape: ir.Value | None, target: Sequence[int]) -> ir.Value | None:
    """A target whose leading zeros are replaced by the sizes in the target of the Reshape before it."""
    count = next((at for at, t in enumerate(target) if t != 0), len(target))
    rest = list(target[count:])
    known = _ints(g, shape)
    if known is not None:
        leading = known[:count]
        fits = 0 not in leading and 0 not in rest and [*leading, *rest].count(-1) <= 1
        return g.vector([*leading, *rest]) if fits else None
    concat = made_by(shape, "Concat")
    if concat is None or not rest or 0 in rest or -1 in rest:
        return None
    parts, length = [], 0
    for part in concat.inputs:
        size = (dims_of(part) or (None,))[0]
        if length == count or not isinstance(size, int):
            break
        parts.append(part)
        length += size
    return g.op.Concat(*parts, g.vector(rest), axis=0) if length == count else None


def _expand(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    x = inputs[0]
    dims, target = dims_of(x), _ints(g, inputs[1])
    if dims is None or target is None or len(target) > len(dims):
        return None
    tail = dims[len(dims) - len(target) :]
    return x if all(t == 1 or (isinstance(d, int) and d == t) for d, t in zip(tail, target, strict=True)) else None


def _squeeze(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    x = inputs[0]
    axes = _ints(g, inputs[1]) if len(inputs) > 1 else None
    if not axes:  # ONNX Runtime and the reference differ in the meaning of an empty list of axes: the node stays.
        return None
    before = made_by(x, "Unsqueeze")
    if before is not None and x is not None and x.shape is not None:
        added = _ints(g, before.inputs[1])
        rank = len(x.shape)
        if added is not None and {a % rank for a in added} == {a % rank for a in axes}:
            return before.inputs[0]
    return None


def _unsqueeze(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    axes = _ints(g, inputs[1]) if len(inputs) > 1 else None
    if axes is None:
        return None
    if not axes:
        return inputs[0]
    before = made_by(inputs[0], "Squeeze")
    if before is not None and len(before.inputs) > 1 and before.inputs[0] is not None:
        source = before.inputs[0]
        removed = _ints(g, before.inputs[1])
        if removed is not None and source.shape is not None:
            rank = len(source.shape)
            # Only as many axes as were squeezed: [0, 1] after [0] is not the same, though equal modulo a rank of 1.
            if len(removed) == len(axes) and {a % rank for a in removed} == {a % rank for a in axes}:
                return source
    return None


def _slice(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    starts, ends = _ints(g, inputs[1]), _ints(g, inputs[2])
    steps = _ints(g, inputs[4]) if len(inputs) > 4 and inputs[4] is not None else None
    axes = _ints(g, inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    dims = dims_of(inputs[0])
    if starts is None or ends is None or (steps is not None and any(s != 1 for s in steps)):
        return None
    if len(inputs) > 4 and inputs[4] is not None and steps is None:
        return None
    for position, (start, end) in enumerate(zip(starts, ends, strict=True)):
        size = dims[axes[position] if axes is not None else position] if dims is not None else None
        if start != 0 or not (end >= _INT_MAX or (isinstance(size, int) and end >= size)):
            return None
    return inputs[0]


def _concat(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    return inputs[0] if len(inputs) == 1 else None


def _neutral(g: Emitter, x: ir.Value | None, other: ir.Value | None, number: int) -> bool:
    """Whether ``other`` is a constant full of ``number`` that leaves the shape of ``x`` as it is."""
    if x is None or other is None or x.dtype != other.dtype:
        return False
    array = g.constant(other)
    if array is None or not array.size:
        return False
    if array.item() != number if array.size == 1 else not (array == number).all():
        return False
    dims = dims_of(x)
    return dims is not None and _same_dims(broadcast([dims, array.shape]), dims)


def _mul(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    a, b = inputs
    return a if _neutral(g, a, b, 1) else b if _neutral(g, b, a, 1) else None


def _div(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    return inputs[0] if _neutral(g, inputs[0], inputs[1], 1) else None


def _is_integer(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer()


def _add(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    a, b = inputs
    if not _is_integer(a):  # -0.0 + 0.0 is 0.0
        return None
    return a if _neutral(g, a, b, 0) else b if _neutral(g, b, a, 0) else None


def _sub(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    return inputs[0] if _is_integer(inputs[0]) and _neutral(g, inputs[0], inputs[1], 0) else None


def _shape(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
    dims = dims_of(inputs[0])
    if dims is None:
        return None
    wanted = dims[attributes.get("start", 0) : attributes.get("end")]
    static = [d for d in wanted if isinstance(d, int)]
    return g.vector(static) if len(static) == len(wanted) else None


def _cancel_inverse(op_type: str) -> Simplifier:
    def simplify(g: Emitter, inputs: Inputs, attributes: Attributes) -> ir.Value | None:
        before = made_by(inputs[0], op_type)
        return before.inputs[0] if before is not None else None

    return simplify


SIMPLIFY: dict[str, Simplifier] = {
    "Add": _add,
    "Cast": _cast,
    "Concat": _concat,
    "Div": _div,
    "Expand": _expand,
    "Identity": _identity,
    "Mul": _mul,
    "Neg": _cancel_inverse("Neg"),
    "Not": _cancel_inverse("Not"),
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _sub,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
