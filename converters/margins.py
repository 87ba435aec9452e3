"""Losses that compare the score of a target with all other scores by a margin."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, unsqueeze
from onnxplug.converters.helpers.dtypes import BOOL, INT32, INT64
from onnxplug.converters.helpers.grids import iota
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Rule

#: PyTorch's numbers for ``reduction``.
_NONE, _MEAN = 0, 1


def multi_margin_loss(g: GraphBuilder, node: FxNode) -> Value:
    """multi_margin_loss(Tensor self, Tensor target, Scalar p=1, Scalar margin=1, Tensor? weight=None, int reduction=1) -> Tensor

    max(0, margin - x[target] + x[other])ᵖ, times the target's weight. A comparison with NaN counts 0, as in PyTorch's kernel.
    """
    scores, target, p, margin, weight, reduction = node.args
    dtype = node.dtype
    x = _rows(g, scores)
    place = g.op.Reshape(g.cast(target, INT64), g.const([-1, 1]))
    excess = g.op.Add(g.op.Sub(g.const(margin, dtype), g.op.GatherElements(x, place, axis=1)), x)
    counts = g.op.And(g.op.Greater(excess, g.const(0, dtype)), g.op.Not(g.op.Equal(place, iota(g, g.dim(x, 1)))))
    loss = excess if p == 1 else g.op.Mul(excess, excess)
    if weight is not None:
        loss = g.op.Mul(loss, g.op.Gather(weight, place))
    return _averaged(g, g.op.Where(counts, loss, g.const(0, dtype)), reduction, rank_of(scores), dtype)


def multilabel_margin_loss(g: GraphBuilder, node: FxNode) -> Value:
    """multilabel_margin_loss(Tensor self, Tensor target, int reduction=1) -> Tensor"""
    scores, target, reduction = node.args
    return _of_labels(g, scores, target, reduction)[0]


def multilabel_margin_loss_forward(g: GraphBuilder, node: FxNode) -> list[Value]:
    """multilabel_margin_loss_forward(Tensor self, Tensor target, int reduction) -> (Tensor output, Tensor is_target)"""
    scores, target, reduction = node.args
    loss, is_target = _of_labels(g, scores, target, reduction)
    mask = g.cast(is_target, scores.dtype)
    return [loss, mask if rank_of(target) == 2 else g.op.Reshape(mask, g.op.Shape(target))]


def _of_labels(g: GraphBuilder, scores: Value, target: Value, reduction: int) -> tuple[Value, Value]:
    """The loss, and a mask ``[rows, classes]`` of the classes that are targets.

    The targets of a row are the numbers before its first negative one; max(0, 1 - x[target] + x[other]) counts for each of them
    and each class that is none. torch's own decomposition takes the numbers after the negative one for targets of class 0.
    """
    dtype = scores.dtype
    assert dtype is not None
    x, target = _rows(g, scores), _rows(g, g.cast(target, INT64))
    count = g.dim(x, 1)
    classes, none = iota(g, count), g.const(0, dtype)
    end = reduce(g, "ReduceMin", g.op.Where(g.op.Less(target, g.const(0)), classes, g.as_scalar(count)), [1], True)
    is_label = g.op.Less(classes, end)
    label = g.op.Where(is_label, target, g.const(0))
    named = g.op.And(g.op.Equal(unsqueeze(g, label, 2), classes), unsqueeze(g, is_label, 2))
    is_target = g.cast(reduce(g, "ReduceMax", g.cast(named, INT32), [1], False), BOOL)
    chosen = unsqueeze(g, g.op.GatherElements(x, label, axis=1), 2)
    excess = g.op.Add(g.op.Sub(g.const(1, dtype), chosen), unsqueeze(g, x, 1))
    pairs = g.op.And(unsqueeze(g, is_label, 2), unsqueeze(g, g.op.Not(is_target), 1))
    counts = g.op.And(pairs, g.op.Greater(excess, none))
    loss = reduce(g, "ReduceSum", g.op.Where(counts, excess, none), [1], False)
    return _averaged(g, loss, reduction, rank_of(scores), dtype), is_target


def _rows(g: GraphBuilder, x: Value) -> Value:
    """``x`` as a matrix; one without a batch is one row."""
    return x if rank_of(x) == 2 else g.op.Reshape(x, g.const([1, -1]))


def _averaged(g: GraphBuilder, loss: Value, reduction: int, rank: int, dtype: ir.DataType) -> Value:
    """Losses ``[rows, classes]``, averaged over the classes and reduced over the rows.

    Args:
        g: The builder.
        loss: The losses.
        reduction: PyTorch's number.
        rank: The rank of the model's scores.
        dtype: Element type of the losses.

    Raises:
        Unsupported: One loss is asked for, without a batch: torch.export has a wrong shape for it.
    """
    rows = g.op.Div(reduce(g, "ReduceSum", loss, [1], False), g.cast(g.as_scalar(g.dim(loss, 1)), dtype))
    if reduction == _NONE:
        if rank < 2:
            raise Unsupported(
                "torch.export has a loss of shape [1] here, where PyTorch has one without axes; give the scores a batch, x[None]"
            )
        return rows
    total = reduce(g, "ReduceSum", rows, [0], False)
    if reduction != _MEAN:
        return total
    return g.op.Div(total, g.cast(g.as_scalar(g.dim(loss, 0)), dtype))


RULES: list[Rule] = [
    Rule("aten::multi_margin_loss.default", multi_margin_loss),
    Rule("aten::multilabel_margin_loss.default", multilabel_margin_loss),
    Rule("aten::multilabel_margin_loss_forward.default", multilabel_margin_loss_forward),
]
