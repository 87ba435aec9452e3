"""How many floating-point operations a node takes, estimated from its shapes by a table.

A multiplication and an addition count as one operation each, so that a product of matrices takes ``2 m n k``. An elementwise
operator counts as one operation an element whatever it computes, softmax and normalisations as the few that they are made of,
and an operator that only moves elements or reads shapes as none. Causal attention counts as if nothing were masked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx_ir as ir

Shape = tuple[int, ...]


class UnknownShape(Exception):
    """A shape that the estimate needs is not known, or an attribute that only a call of the function around it has."""


@dataclass(frozen=True, slots=True)
class Call:
    """The facts about a node from which its operations are estimated.

    Attributes:
        inputs, outputs: Shapes; ``None`` where a shape is not known or an input is absent.
    """

    op_type: str
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None]
    attributes: Mapping[str, ir.Attr]

    def has(self, index: int) -> bool:
        """Whether the shape of an input is known."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def shape(self, index: int, rank: int = 0) -> Shape:
        """The shape of an input, which must have at least ``rank`` axes."""
        shape = self.inputs[index] if index < len(self.inputs) else None
        return _known(shape, rank)

    def result(self, index: int = 0, rank: int = 0) -> Shape:
        """The shape of an output, which must have at least ``rank`` axes."""
        shape = self.outputs[index] if index < len(self.outputs) else None
        return _known(shape, rank)

    def number(self, name: str, default: int) -> int:
        """An attribute that is an integer."""
        value = self._value(name)
        return value if isinstance(value, int) else default

    def text(self, name: str, default: str = "") -> str:
        """An attribute that is a string."""
        value = self._value(name)
        return value if isinstance(value, str) else default

    def numbers(self, name: str) -> tuple[int, ...]:
        """An attribute that is a list of integers; empty where there is none."""
        value = self._value(name)
        return tuple(value) if isinstance(value, list | tuple) else ()

    def _value(self, name: str) -> Any:
        attribute = self.attributes.get(name)
        if attribute is not None and attribute.is_ref():
            raise UnknownShape
        return None if attribute is None else attribute.value


def _known(shape: Shape | None, rank: int) -> Shape:
    if shape is None or len(shape) < rank:
        raise UnknownShape
    return shape


def estimated(call: Call, domain: str) -> int | None:
    """The operations of a node; ``None`` where its operator has no row here, or a shape is not known."""
    row = _TABLES.get(domain, {}).get(call.op_type)
    if row is None:
        return None
    try:
        return row(call)
    except UnknownShape:
        return None


Row = Callable[[Call], int]


def _free(call: Call) -> int:
    return 0


def _per_element(count: int) -> Row:
    """A row of ``count`` operations for each element of the result."""

    def row(call: Call) -> int:
        return count * prod(call.result())

    return row


def _per_input_element(count: int) -> Row:
    """A row of ``count`` operations for each element of the first input."""

    def row(call: Call) -> int:
        return count * prod(call.shape(0))

    return row


def _variadic(call: Call) -> int:
    return max(0, len(call.inputs) - 1) * prod(call.result())


def _product(bias: int | None = None) -> Row:
    def row(call: Call) -> int:
        result = prod(call.result())
        return 2 * result * call.shape(0, 1)[-1] + (result if bias is not None and call.has(bias) else 0)

    return row


def _gemm(bias: int) -> Row:
    def row(call: Call) -> int:
        a = call.shape(0, 2)
        result = prod(call.result())
        return 2 * result * (a[0] if call.number("transA", 0) else a[1]) + (result if call.has(bias) else 0)

    return row


def _fused_matmul(call: Call) -> int:
    a = call.shape(0, 1)
    if call.number("transBatchA", 0):  # the first axis comes after the batch axes
        a = (*a[1:-1], a[0], a[-1])
    return 2 * prod(call.result()) * (a[-2] if call.number("transA", 0) and len(a) > 1 else a[-1])


def _convolution(weight: int = 1, bias: int | None = 2) -> Row:
    def row(call: Call) -> int:
        result = prod(call.result())
        per_element = 2 * prod(call.shape(weight, 3)[1:])
        return result * per_element + (result if bias is not None and call.has(bias) else 0)

    return row


def _transposed_convolution(call: Call) -> int:
    return 2 * prod(call.shape(0)) * prod(call.shape(1, 3)[1:]) + (prod(call.result()) if call.has(2) else 0)


def _recurrent(gates: int) -> Row:
    """LSTM, GRU and RNN: the products of each step, and one operation an element for each gate."""

    def row(call: Call) -> int:
        steps_and_batch = prod(call.shape(0, 3)[:2])
        weights, recurrent = call.shape(1, 3), call.shape(2, 3)
        directions, hidden = recurrent[0], recurrent[2]
        biases = 2 * gates * hidden if call.has(3) else 0
        return steps_and_batch * (2 * prod(weights) + 2 * prod(recurrent) + directions * (biases + gates * hidden))

    return row


def _einsum(call: Call) -> int:
    """Each operand after the first takes a multiplication, and axes that the result lacks an addition."""
    inputs, arrow, result = call.text("equation").replace(" ", "").partition("->")
    terms = inputs.split(",")
    sizes: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for index, term in enumerate(terms):
        shape = call.shape(index)
        labels = _labels(term, len(shape))
        counts.update(labels)
        for label, size in zip(labels, shape, strict=True):
            if sizes.get(label, 1) == 1:
                sizes[label] = size
    if arrow:
        kept = set(result.replace(".", "")) | {label for label in sizes if "..." in result and label.startswith("...")}
    else:  # the result has the axes of labels that occur once, and those of ellipses
        kept = {label for label, count in counts.items() if count == 1 or label.startswith("...")}
    is_sum = bool(sizes.keys() - kept)
    return prod(sizes.values()) * (len(terms) - 1 + is_sum)


def _labels(term: str, rank: int) -> list[str]:
    """The labels of an operand's axes; those of an ellipsis are counted from the right."""
    before, dots, after = term.partition("...")
    named = len(before) + len(after)
    if not re.fullmatch("[A-Za-z]*", before + after) or named > rank or (not dots and named != rank):
        raise UnknownShape
    return [*before, *(f"...{axis}" for axis in range(rank - named, 0, -1)), *after]


def _attended(batch: int, queries: int, keys: int, query_width: int, value_width: int, heads: int) -> int:
    """Products with keys and values, and the softmax between them (five operations an element)."""
    return 2 * batch * queries * keys * (query_width + value_width) + 5 * batch * heads * queries * keys


def _attention(call: Call) -> int:
    """ai.onnx's Attention: operands of [batch, heads, sequence, size], or [batch, sequence, heads * size]."""
    query, key, result = call.shape(0, 3), call.shape(1, 3), call.result(0, 3)
    if len(query) == 4:
        heads, queries, width, value_width = query[1], query[2], query[1] * query[3], result[1] * result[-1]
    else:
        heads, queries, width, value_width = call.number("q_num_heads", 1), query[1], query[2], result[2]
    keys = key[-2] + (call.shape(4, 4)[2] if call.has(4) else 0)
    return _attended(query[0], queries, keys, width, value_width, heads)


def _multi_head_attention(call: Call) -> int:
    query = call.shape(0, 3)
    heads = call.number("num_heads", 1)
    if len(query) == 5:  # [batch, sequence, heads, 3, size]
        width, keys = query[2] * query[4], query[1]
    else:
        key = call.shape(1, 3)
        width, keys = query[2], key[1] if len(key) in (3, 5) else key[2]
    if call.has(6):
        keys += call.shape(6, 4)[2]
    return _attended(query[0], query[1], keys, width, call.result(0, 3)[2], heads)


def _fused_attention(call: Call) -> int:
    """com.microsoft's Attention, which projects its input itself."""
    x, weights = call.shape(0, 3), call.shape(1, 2)
    qkv = call.numbers("qkv_hidden_sizes")
    width = qkv[0] if qkv else weights[1] // 3
    value_width = qkv[2] if len(qkv) > 2 else weights[1] - 2 * width
    keys = x[1] + (call.shape(4, 5)[3] if call.has(4) else 0)
    projected = prod(x[:2]) * weights[1] * (2 * x[2] + (1 if call.has(2) else 0))
    return projected + _attended(x[0], x[1], keys, width, value_width, call.number("num_heads", 1))


def _grouped_attention(call: Call) -> int:
    query, result = call.shape(0, 3), call.result(0, 3)
    heads = call.number("num_heads", 1)
    if len(call.outputs) > 1 and call.outputs[1] is not None:
        keys = call.result(1, 4)[2]  # the cache that it returns, which may be longer than the sequence so far
    else:
        keys = query[1] + (call.shape(3, 4)[2] if call.has(3) else 0)
    return _attended(query[0], query[1], keys, result[2], result[2], heads)


def _nbits(call: Call) -> int:
    columns = call.number("N", 0)
    x = call.shape(0, 1)
    if not columns:
        raise UnknownShape
    rows = prod(x[:-1])
    return 2 * rows * x[-1] * columns + (rows * columns if call.has(5) else 0)


def _mixture(call: Call) -> int:
    """com.microsoft's MoE: of each row, the products of the experts that are chosen."""
    rows = prod(call.shape(0, 2)[:-1])
    weights = [call.shape(2, 3), call.shape(4, 3), *([call.shape(6, 3)] if call.has(6) else [])]
    return 2 * rows * call.number("k", 1) * sum(prod(weight[1:]) for weight in weights)


def _pool(call: Call) -> int:
    return prod(call.result()) * prod(call.numbers("kernel_shape"))


def _resize(call: Call) -> int:
    """Separable: a linear step takes three operations an element, a cubic one seven; the nearest takes none."""
    per_axis = {"linear": 3, "cubic": 7}.get(call.text("mode", "nearest"), 0)
    if not per_axis:
        return 0
    before, after = call.shape(0), call.result()
    return per_axis * prod(after) * sum(a != b for a, b in zip(before, after, strict=False))


_TABLES: dict[str, dict[str, Row]] = {"": {}, "com.microsoft": {}}


def _add(domain: str, names: str, row: Row) -> None:
    _TABLES[domain].update(dict.fromkeys(names.split(), row))


_add(
    "",
    "Reshape Transpose Concat Split Slice Gather GatherND GatherElements Squeeze Unsqueeze Flatten Expand Identity Cast CastLike "
    "Shape Size Constant ConstantOfShape Range Tile Pad ScatterND ScatterElements Scatter DepthToSpace SpaceToDepth OneHot "
    "NonZero EyeLike Compress ReverseSequence Dropout SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert "
    "SequenceLength ConcatFromSequence SplitToSequence Optional OptionalGetElement OptionalHasElement Trilu BitCast "
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike TensorScatter Unique Col2Im",
    _free,
)
_add(
    "",
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Celu Clip Cos Cosh "
    "Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log "
    "Mish Mod Mul Neg Not Or Pow PRelu Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Swish "
    "Tan Tanh ThresholdedRelu Where Xor Bernoulli Hardmax",
    _per_element(1),
)
_add("", "Sum Mean Max Min", _variadic)
_add(
    "",
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare ArgMax "
    "ArgMin CumSum CumProd TopK GlobalAveragePool GlobalMaxPool GlobalLpPool",
    _per_input_element(1),
)
_add("", "Softmax LogSoftmax", _per_element(5))
_add("", "QuantizeLinear DequantizeLinear", _per_element(2))
_add("", "DynamicQuantizeLinear LpNormalization MeanVarianceNormalization", _per_input_element(4))
_add("", "BatchNormalization RMSNormalization SimplifiedLayerNormalization", _per_input_element(4))
_add("", "LayerNormalization GroupNormalization InstanceNormalization", _per_input_element(7))
_add("", "RotaryEmbedding", _per_input_element(3))
_add("", "MatMul MatMulInteger QLinearMatMul", _product())
_add("", "Gemm", _gemm(2))
_add("", "Conv", _convolution())
_add("", "DeformConv", _convolution(bias=3))
_add("", "ConvInteger", _convolution(bias=None))
_add("", "QLinearConv", _convolution(weight=3, bias=8))
_add("", "ConvTranspose", _transposed_convolution)
_add("", "LSTM", _recurrent(4))
_add("", "GRU", _recurrent(3))
_add("", "RNN", _recurrent(1))
_add("", "Einsum", _einsum)
_add("", "Attention", _attention)
_add("", "MaxPool AveragePool LpPool", _pool)
_add("", "Resize Upsample", _resize)

_MICROSOFT = "com.microsoft"
_add(_MICROSOFT, "FusedMatMul TransposeMatMul FusedMatMulActivation", _fused_matmul)
_add(_MICROSOFT, "FusedGemm", _gemm(2))
_add(_MICROSOFT, "FusedConv NhwcFusedConv", _convolution())
_add(_MICROSOFT, "MatMulInteger16 QLinearMatMul", _product())
_add(_MICROSOFT, "MatMulIntegerToFloat", _product(bias=6))
_add(_MICROSOFT, "DynamicQuantizeMatMul", _product(bias=4))
_add(_MICROSOFT, "QGemm", _gemm(6))
_add(_MICROSOFT, "QLinearConv", _convolution(weight=3, bias=8))
_add(_MICROSOFT, "MatMulNBits MatMulBnb4", _nbits)
_add(_MICROSOFT, "MultiHeadAttention", _multi_head_attention)
_add(_MICROSOFT, "Attention", _fused_attention)
_add(_MICROSOFT, "GroupQueryAttention", _grouped_attention)
_add(_MICROSOFT, "MoE", _mixture)
_add(
    _MICROSOFT,
    "Gelu FastGelu QuickGelu BiasGelu BiasAdd BiasSplitGelu QLinearAdd QLinearMul QLinearSigmoid",
    _per_element(1),
)
_add(_MICROSOFT, "QuantizeLinear DequantizeLinear", _per_element(2))
_add(_MICROSOFT, "BiasSoftmax QLinearSoftmax", _per_element(5))
_add(_MICROSOFT, "SkipLayerNormalization", _per_input_element(8))
_add(_MICROSOFT, "SkipSimplifiedLayerNormalization", _per_input_element(5))
_add(_MICROSOFT, "GroupNorm SkipGroupNorm", _per_input_element(7))
_add(_MICROSOFT, "RotaryEmbedding", _per_input_element(3))
_add(_MICROSOFT, "Inverse", lambda call: 2 * prod(call.shape(0, 2)) * call.shape(0, 2)[-1])
_add(_MICROSOFT, "ReorderInput ReorderOutput GatherBlockQuantized ExpandDims", _free)
