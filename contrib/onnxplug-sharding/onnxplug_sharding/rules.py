"""The division of a node's computation by a split of one input, operator by operator, along one dimension of the mesh.

The rules follow ONNX's *Sharding Formalism* for elementwise operators, reductions and products. Two more are for
operators that it lacks: ``Transpose``, and ``Gather``, where each shard of the table gives its own rows and the results
are summed. There is no rule for convolutions, normalisations, recurrent layers and control flow, which the formalism
leaves undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from onnxplug_sharding.layout import Split, shape_of

Splits = Sequence[Split | None]
_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Swish Tan Tanh "
    "ThresholdedRelu"
)
_BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Clip Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul "
    "Or PRelu Pow Sub Sum Where Xor"
)
_REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)


class Undefined(Exception):
    """A node has no known parallel form."""


@dataclass(frozen=True)
class Step:
    """A node's parallel form, along one dimension of the mesh.

    Attributes:
        inputs: The split in which the node takes each input.
        output: The split of its result.
    """

    inputs: tuple[Split | None, ...]
    output: Split | None


def step(node: ir.Node, splits: Splits, fixed: Sequence[bool]) -> Step:
    """The parallel form of a node.

    Args:
        node: The node, whose values have shapes.
        splits: The splits of its inputs.
        fixed: Whether each input is a weight, whose layout is fixed; other inputs may get another layout.

    Raises:
        Undefined: No parallel form is known.
    """
    if not any(splits):
        return Step((None,) * len(splits), None)
    rule = RULES.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if rule is None or len(node.outputs) != 1:
        raise Undefined
    for leader in sorted(range(len(splits)), key=lambda index: not fixed[index]):
        split = splits[leader]
        if split is None:
            continue
        result = rule(node, leader, split)
        if all(result.inputs[i] == splits[i] for i in range(len(splits)) if fixed[i]):
            return result
        if fixed[leader]:
            raise Undefined
    return Step((None,) * len(splits), None)  # the node takes all inputs whole


def _rank(value: ir.Value | None) -> int:
    return len(_shape(value))


def _shape(value: ir.Value | None) -> ir.Shape:
    shape = shape_of(value) if value is not None else None
    if shape is None:
        raise Undefined
    return shape


def _is_same(one: int | ir.SymbolicDim, other: int | ir.SymbolicDim) -> bool:
    return one == other if isinstance(one, int) or isinstance(other, int) else one.value is not None and one == other


def _carried(split: Split, source: ir.Value | None, target: ir.Value | None) -> Split | None:
    """The split of another operand of a broadcast, or of its result, on the same axis from the right."""
    if target is None:
        return None
    from_right = split.axis - _rank(source)
    if -from_right > _rank(target) or _shape(target)[from_right] == 1:
        return None
    if not _is_same(_shape(target)[from_right], _shape(source)[from_right]):
        raise Undefined
    return replace(split, axis=_rank(target) + from_right)


def _elementwise(node: ir.Node, leader: int, split: Split) -> Step:
    source = node.inputs[leader]
    output = _carried(split, source, node.outputs[0])
    if output is None:
        raise Undefined
    return Step(tuple(_carried(split, source, x) for x in node.inputs), output)


def _reduction(node: ir.Node, leader: int, split: Split) -> Step:
    x, rank = node.inputs[0], _rank(node.inputs[0])
    axes = _axes(node, rank)
    rest = (None,) * (len(node.inputs) - 1)
    if leader != 0 or axes is None:
        raise Undefined
    if split.axis in axes:  # a reduction within each shard, then between shards
        return Step((split, *rest), None)
    assert x is not None
    keeps = bool(_attribute(node, "keepdims", 1))
    dropped = 0 if keeps else sum(axis < split.axis for axis in axes)
    return Step((split, *rest), replace(split, axis=split.axis - dropped))


def _axes(node: ir.Node, rank: int) -> set[int] | None:
    axes = _attribute(node, "axes", None)
    if axes is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        constant = node.inputs[1].const_value
        if constant is None:
            return None
        axes = constant.numpy().reshape(-1).tolist()
    if not axes:
        return set() if _attribute(node, "noop_with_empty_axes", 0) else set(range(rank))
    return {int(axis) % rank for axis in axes}


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.value


def _transpose(node: ir.Node, leader: int, split: Split) -> Step:
    order = _attribute(node, "perm", None) or list(reversed(range(_rank(node.inputs[0]))))
    return Step((split,), replace(split, axis=list(order).index(split.axis)))


def _gather(node: ir.Node, leader: int, split: Split) -> Step:
    table, indices = node.inputs
    axis = _attribute(node, "axis", 0) % _rank(table)
    if leader == 1:
        return Step((None, split), replace(split, axis=axis + split.axis))
    if split.axis == axis:
        return Step((split, None), None)
    after = _rank(indices) - 1 if split.axis > axis else 0
    return Step((split, None), replace(split, axis=split.axis + after))


def _matmul(node: ir.Node, leader: int, split: Split) -> Step:
    a, b = node.inputs
    rank_a, rank_b, rank = _rank(a), _rank(b), _rank(node.outputs[0])
    if min(rank_a, rank_b) < 2:
        raise Undefined
    from_right = split.axis - (rank_a, rank_b)[leader]
    if from_right == (-1, -2)[leader]:  # the contracted axis
        return Step((Split(rank_a - 1, split.blocks), Split(rank_b - 2, split.blocks)), None)
    if from_right == (-2, -1)[leader]:
        mine: list[Split | None] = [None, None]
        mine[leader] = split
        return Step(tuple(mine), Split(rank + from_right, split.blocks))
    other = _carried(split, (a, b)[leader], (b, a)[leader])
    output = _carried(split, (a, b)[leader], node.outputs[0])
    return Step((split, other) if leader == 0 else (other, split), output)


def _gemm(node: ir.Node, leader: int, split: Split) -> Step:
    """The form of Gemm, as for ``MatMul``; the bias is added once, after a sum over shards."""
    flipped = [bool(_attribute(node, "transA", 0)), bool(_attribute(node, "transB", 0))]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    axis = split.axis ^ flipped[leader] if leader < 2 else -1
    if leader == 2:
        carried = _carried(split, bias, node.outputs[0])
        if carried is None:
            raise Undefined
        output: Split | None = carried
    else:
        output = None if axis == (1, 0)[leader] else replace(split, axis=axis)
    a = b = c = None
    if output is None:
        a, b = Split(1 ^ flipped[0], split.blocks), Split(0 ^ flipped[1], split.blocks)
    else:
        a = Split(0 ^ flipped[0], split.blocks) if output.axis == 0 else None
        b = Split(1 ^ flipped[1], split.blocks) if output.axis == 1 else None
        c = _carried(output, node.outputs[0], bias)
    return Step((a, b, c)[: len(node.inputs)], output)


RULES: dict[str, Callable[[ir.Node, int, Split], Step]] = {
    **dict.fromkeys((*_UNARY.split(), *_BROADCAST.split()), _elementwise),
    **dict.fromkeys(_REDUCTIONS.split(), _reduction),
    "Transpose": _transpose,
    "Gather": _gather,
    "MatMul": _matmul,
    "Gemm": _gemm,
}
