"""Nodes to ask a provider about: the common forms of each operator of ai.onnx."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: Operators, operands, attributes and versions, divided by bars. ``2x3`` is an operand of this shape that the model
#: computes, ``-`` an operand of rank 0, ``~[..]`` an operand with these values; ``=[..]`` is a constant; ``_`` is
#: absent. ``ranks`` asks for ranks 0 to 7 too.
_TABLE = """
Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Cos Cosh Elu Erf Exp Floor HardSigmoid HardSwish | 2x3 | | ranks
Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh | 2x3 | | ranks
Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu | 2x3 | | ranks
Gelu | 2x3 | | ranks
Gelu | 2x3 | approximate="tanh"
Add And BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Mul Or Sub Xor | 2x3 2x3 | | ranks
Max Mean Min Pow PRelu Sum | 2x3 2x3 | | ranks
Max Mean Min Sum | 2x3 2x3 2x3
Add Mul Sub Div Max Min Pow | 2x3 -
Mod | 2x3 2x3 | | ranks
Mod | 2x3 2x3 | fmod=1 | ranks
BitShift | 2x3 2x3 | direction="LEFT"
BitShift | 2x3 2x3 | direction="RIGHT"
ArgMax ArgMin | 2x3 | axis=1
ArgMax ArgMin | 2x3 | axis=1 keepdims=0
ArgMax ArgMin | 2x3 | axis=1 select_last_index=1
ArgMax ArgMin | 4 | axis=0 keepdims=0
Attention | 1x2x4x8 1x2x6x8 1x2x6x8
Attention | 1x2x4x8 1x2x6x8 1x2x6x8 | is_causal=1
Attention | 1x2x4x8 1x2x6x8 1x2x6x8 4x6
Attention | 1x4x16 1x6x16 1x6x16 | q_num_heads=2 kv_num_heads=2
AveragePool LpPool MaxPool | 1x2x6x6 | kernel_shape=[2,2]
AveragePool LpPool MaxPool | 1x2x6 | kernel_shape=[2]
AveragePool LpPool MaxPool | 1x2x6x6x6 | kernel_shape=[2,2,2]
AveragePool LpPool MaxPool | 1x2x6x6 | kernel_shape=[3,3] strides=[2,2] pads=[1,1,1,1]
AveragePool MaxPool | 1x2x6x6 | kernel_shape=[3,3] strides=[2,2] ceil_mode=1
AveragePool | 1x2x6x6 | kernel_shape=[3,3] pads=[1,1,1,1] count_include_pad=1
MaxPool | 1x2x6x6 | kernel_shape=[2,2] | outputs=2
MaxPool | 1x2x6x6 | kernel_shape=[2,2] dilations=[2,2]
BatchNormalization | 2x3x4x4 =[1,1,1] =[1,2,3] =[0.5,1,1] =[1,2,3]
BatchNormalization | 2x3 =[1,1,1] =[1,2,3] =[0.5,1,1] =[1,2,3]
BlackmanWindow HammingWindow HannWindow | =8
Bernoulli | 2x3
Cast | 2x3 | to=@T2 | ranks
CastLike | 2x3 =[1]
Clip | 2x3 =1 =2 | | ranks
Clip | 2x3 =1
Clip | 2x3 _ =2
Col2Im | 1x8x4 =[3,3] =[2,2]
Compress | 4x3 ~[true,false,true,true] | axis=0
Concat | 2x3 2x4 | axis=1
Concat | 2 3 | axis=0
Concat | 2x1x1x1x3 2x1x1x1x4 | axis=4
Concat | 2x1x1x1x1x3 2x1x1x1x1x4 | axis=5
ConstantOfShape | =[2,3] | value=@@T2
ConstantOfShape | ~[2,3] | value=@@T2
Conv | 1x2x6x6 =4x2x3x3
Conv | 1x2x6x6 =4x2x3x3 =[1,2,3,4]
Conv | 1x2x6x6 =4x2x3x3 =[1,2,3,4] | pads=[1,1,1,1] strides=[2,2]
Conv | 1x2x6x6 =4x1x3x3 =[1,2,3,4] | group=2 dilations=[2,2]
Conv | 1x2x6 =4x2x3 =[1,2,3,4]
Conv | 1x2x6x6x6 =4x2x3x3x3 =[1,2,3,4]
ConvInteger | 1x2x6x6 =4x2x3x3
ConvTranspose | 1x2x6x6 =2x4x3x3 =[1,2,3,4]
ConvTranspose | 1x2x6x6 =2x4x3x3 =[1,2,3,4] | strides=[2,2] pads=[1,1,1,1] output_padding=[1,1]
ConvTranspose | 1x2x6x6 =2x2x3x3 =[1,2,3,4] | group=2
ConvTranspose | 1x2x6 =2x4x3 =[1,2,3,4]
ConvTranspose | 1x2x4x4x4 =2x4x3x3x3 =[1,2,3,4]
CumSum | 2x3 =1
CumSum | 2x3 =1 | reverse=1
CumSum | 2x3 =1 | exclusive=1
DFT | 1x8x1 | axis=1 | -19
DFT | 1x8x1 _ =1 | | 20-
DeformConv | 1x2x4x4 =2x2x3x3 1x18x2x2
DepthToSpace | 1x4x2x2 | blocksize=2
DepthToSpace | 1x4x2x2 | blocksize=2 mode="CRD"
DequantizeLinear | 2x3 =0.5 =1
DequantizeLinear | 2x3 =[0.5,0.25] =[1,1] | axis=0
DequantizeLinear | 2x3 =0.5
Det | 2x3x3
Dropout | 2x3
DynamicQuantizeLinear | 2x3 | | outputs=3
Einsum | 2x3 3x4 | equation="ij,jk->ik"
Einsum | 2x3x4 2x4x5 | equation="bij,bjk->bik"
Einsum | 2x3 4 | equation="ij,k->ijk"
Expand | 1x3 =[2,3]
Expand | 1x1x1x1x3 =[2,1,1,1,3]
Expand | 1x1x1x1x1x3 =[2,1,1,1,1,3]
EyeLike | 3x3 | dtype=1
Flatten | 2x3x4
GRU | 3x2x4 =1x15x4 =1x15x5 =1x30 | hidden_size=5
GRU | 3x2x4 =1x15x4 =1x15x5 =1x30 | hidden_size=5 linear_before_reset=1
GRU | 3x2x4 =1x15x4 =1x15x5 =1x30 _ 1x2x5 | hidden_size=5 linear_before_reset=1 | outputs=2
GRU | 3x2x4 =2x15x4 =2x15x5 =2x30 _ 2x2x5 | hidden_size=5 linear_before_reset=1 direction="bidirectional" | outputs=2
LSTM | 3x2x4 =1x20x4 =1x20x5 =1x40 | hidden_size=5
LSTM | 3x2x4 =1x20x4 =1x20x5 =1x40 _ 1x2x5 1x2x5 | hidden_size=5 | outputs=3
LSTM | 3x2x4 =2x20x4 =2x20x5 =2x40 _ 2x2x5 2x2x5 | hidden_size=5 direction="bidirectional" | outputs=3
RNN | 3x2x4 =1x5x4 =1x5x5 =1x10 | hidden_size=5
RNN | 3x2x4 =1x5x4 =1x5x5 =1x10 _ 1x2x5 | hidden_size=5 | outputs=2
RNN | 3x2x4 =2x5x4 =2x5x5 =2x10 _ 2x2x5 | hidden_size=5 direction="bidirectional" | outputs=2
Gather | 4x3 ~[[0,2],[1,3]]
Gather | 4x3 ~[0,-1] | axis=1
Gather | 4 ~1
Gather | 4x3 ~1
GatherElements | 2x3 ~[[0,2],[1,1]] | axis=1
GatherND | 4x3 ~[[0,2],[1,1]]
GatherND | 2x4x3 ~[[1],[2]] | batch_dims=1
Gemm | 2x3 3x4 4
Gemm | 2x3 4x3 | transB=1
Gemm | 3x2 3x4 4 | transA=1 alpha=0.5 beta=2.0
GlobalAveragePool GlobalLpPool GlobalMaxPool | 1x2x4x4
GlobalAveragePool GlobalMaxPool | 1x2x4
GlobalAveragePool GlobalMaxPool | 1x2x4x4x4
GridSample | 1x2x4x4 1x3x3x2 | mode="bilinear" | -19
GridSample | 1x2x4x4 1x3x3x2 | mode="nearest"
GridSample | 1x2x4x4 1x3x3x2 | mode="bicubic" | -19
GridSample | 1x2x4x4 1x3x3x2 | mode="linear" | 20-
GridSample | 1x2x4x4 1x3x3x2 | mode="cubic" | 20-
GridSample | 1x2x4x4 1x3x3x2 | mode="nearest" padding_mode="border"
GridSample | 1x2x4x4 1x3x3x2 | mode="nearest" padding_mode="reflection"
GridSample | 1x2x4x4 1x3x3x2 | mode="nearest" align_corners=1
GridSample | 1x2x4x4x4 1x3x3x3x3 | mode="nearest" | 20-
GroupNormalization | 1x4x3x3 =[1,1] =[0,0] | num_groups=2 | -20
GroupNormalization | 1x4x3x3 =[1,1,1,1] =[0,0,0,0] | num_groups=2 | 21-
Hardmax LogSoftmax Softmax | 2x3 | axis=-1
Hardmax LogSoftmax Softmax | 2x3x4 | axis=1
Softmax | 2x1x1x1x1x3 | axis=-1
InstanceNormalization | 1x3x4x4 =[1,1,1] =[0,1,2]
InstanceNormalization | 1x3x4 =[1,1,1] =[0,1,2]
LRN | 1x4x3x3 | size=3
LayerNormalization | 2x3x4 =[1,1,1,1] =[0,1,2,3] | axis=-1
LayerNormalization | 2x3x4 =[1,1,1,1] | axis=-1
LayerNormalization | 2x3x4 =3x4 =3x4 | axis=1
LpNormalization | 2x3 | axis=1
MatMul | 2x3 3x4
MatMul | 2x3 =3x4
MatMul | 2x4x3 3x4
MatMul | 1x2x4x3 1x2x3x4
MatMul | 3 3x4
MatMul | 2x3 3
MatMul | 3 3
MatMul | 1x1x2x4x3 1x1x2x3x4
MatMulInteger | 2x3 3x4
MatMulInteger | 2x3 =3x4 =1 =1
MaxRoiPool | 1x2x6x6 =[[0,0,0,3,3]] | pooled_shape=[2,2]
MaxUnpool | 1x1x2x2 ~[[[[5,7],[13,15]]]] | kernel_shape=[2,2] strides=[2,2]
MeanVarianceNormalization | 1x2x4x4
MelWeightMatrix | =4 =8 =8000 =0.0 =4000.0
NonMaxSuppression | 1x4x4 1x1x4 =3 =0.5 =0.1
NonZero | 2x3
OneHot | ~[0,2] =3 =[0,1]
Pad | 2x3 =[0,1,0,1]
Pad | 2x3 =[0,1,0,1] =1
Pad | 2x3 =[0,1,0,1] | mode="reflect"
Pad | 2x3 =[0,1,0,1] | mode="edge"
Pad | 2x3 =[0,1,0,1] | mode="wrap" | 19-
Pad | 2x3 =[0,-1,0,1] =1
Pad | 2x3 =[1,1] =1 =[1] | | 18-
QLinearConv | 1x2x6x6 =0.5 =1 =4x2x3x3 =0.5 =1 =0.5 =1
QLinearMatMul | 2x3 =0.5 =1 =3x4 =0.5 =1 =0.5 =1
QuantizeLinear | 2x3 =0.37 =1
QuantizeLinear | 2x3 =[0.37,0.7] =[1,1] | axis=0
RMSNormalization | 2x3x4 =[1,1,1,1] | axis=-1
RandomNormal RandomUniform | | shape=[2,3] seed=1.0
RandomNormalLike RandomUniformLike | 2x3 | seed=1.0
Multinomial | 2x3 | sample_size=4 seed=1.0
Range | =1 =5 =2
Range | ~1 ~5 ~2
Reduce* | 2x3 | axes=[1] | -17
Reduce* | 2x3 =[1] | | 13-
Reduce* | 2x3 | keepdims=0
Reduce* | 2x3 | axes=[1] keepdims=0 | -17
Reduce* | 2x3 =[1] | keepdims=0 | 13-
Reduce* | 2x1x1x1x3 =[4] | | 13-
Reduce* | 2x1x1x1x1x3 =[5] | | 13-
Reshape | 2x3 =[3,2]
Reshape | 2x3 =[0,-1]
Reshape | 2x3 =[3,2] | allowzero=1 | 14-
Reshape | 1x1 =[]
Reshape | 2x3 =[2,1,1,1,1,3]
Resize | 1x2x4x4 _ =[1,1,2,2] | mode="nearest"
Resize | 1x2x4x4 _ =[1,1,2,2] | mode="nearest" coordinate_transformation_mode="asymmetric" nearest_mode="floor"
Resize | 1x2x4x4 _ _ =[1,2,8,8] | mode="linear"
Resize | 1x2x4x4 _ _ =[1,2,8,8] | mode="linear" coordinate_transformation_mode="align_corners"
Resize | 1x2x4x4 _ _ =[1,2,8,8] | mode="linear" coordinate_transformation_mode="pytorch_half_pixel"
Resize | 1x2x4x4 _ _ =[1,2,8,8] | mode="cubic" coordinate_transformation_mode="align_corners"
Resize | 1x2x4x4 _ _ =[1,2,8,8] | mode="cubic"
Resize | 1x2x4x4 _ _ =[1,2,2,2] | mode="linear" antialias=1 | 18-
Resize | 1x2x4 _ _ =[1,2,8] | mode="linear"
Resize | 1x2x3x3x3 _ _ =[1,2,6,6,6] | mode="linear"
ReverseSequence | 4x3 =[1,2,3]
RoiAlign | 1x2x6x6 =[[0,0,3,3]] =[0] | output_height=2 output_width=2
RoiAlign | 1x2x6x6 =[[0,0,3,3]] =[0] | output_height=2 output_width=2 coordinate_transformation_mode="output_half_pixel" | 16-
RoiAlign | 1x2x6x6 =[[0,0,3,3]] =[0] | output_height=2 output_width=2 mode="max"
RotaryEmbedding | 1x2x3x8 =4x4 =4x4 ~[[0,1,2]]
STFT | 1x16x1 =4 =[1,1,1,1,1,1,1,1] =8
Scatter | 3x3 ~[[1,0,2]] 1x3
ScatterElements | 3x3 ~[[1,0,2]] 1x3
ScatterElements | 3x3 ~[[1,0,2]] 1x3 | reduction="add" | 16-
ScatterElements | 3x3 ~[[1,0,2]] 1x3 | reduction="mul" | 16-
ScatterElements | 3x3 ~[[1,0,2]] 1x3 | reduction="max" | 18-
ScatterElements | 3x3 ~[[1,0,2]] 1x3 | reduction="min" | 18-
ScatterND | 3x3 ~[[1],[0]] 2x3
ScatterND | 3x3 ~[[1],[0]] 2x3 | reduction="add" | 16-
ScatterND | 3x3 ~[[1],[0]] 2x3 | reduction="mul" | 16-
ScatterND | 3x3 ~[[1],[0]] 2x3 | reduction="max" | 18-
ScatterND | 3x3 ~[[1],[0]] 2x3 | reduction="min" | 18-
Shape Size | 2x3 | | ranks
Shape | 2x3 | start=1 | 15-
Slice | 4x3 =[1] =[3]
Slice | 4x3 =[1] =[3] =[0]
Slice | 4x3 =[3] =[0] =[0] =[-1]
Slice | 4 =[1] =[3] =[0]
Slice | 4x1x1x1x3 =[1] =[3] =[0]
Slice | 4x1x1x1x1x3 =[1] =[3] =[0]
SoftmaxCrossEntropyLoss | 2x3 ~[0,2]
NegativeLogLikelihoodLoss | 2x3 ~[0,2]
SpaceToDepth | 1x1x4x4 | blocksize=2
Split | 4x3 =[1,3] | | outputs=2
Split | 4x3 | axis=0 num_outputs=2 | 18- outputs=2
Split | 4x3 | axis=0 | -17 outputs=2
Squeeze | 1x3 =[0]
Squeeze | 1x3
Squeeze | 1 =[0]
Squeeze | 1x2x1x1x3 =[0]
TensorScatter | 1x4x3 1x2x3
Tile | 2x3 =[2,1]
TopK | 2x4 =[2] | | outputs=2
TopK | 2x4 =[2] | largest=0 | outputs=2
TopK | 2x4 =[2] | sorted=0 | outputs=2
TopK | 4 =[2] | | outputs=2
Transpose | 2x3 | perm=[1,0]
Transpose | 2x1x1x1x3 | perm=[4,0,1,2,3]
Transpose | 2x1x1x1x1x3 | perm=[5,0,1,2,3,4]
Trilu | 3x3
Trilu | 3x3 | upper=0
Trilu | 3x3 =1
Unique | 4 | sorted=1 | outputs=4
Unsqueeze | 3 =[0]
Unsqueeze | - =[0]
Unsqueeze | 2x1x1x3 =[0]
Unsqueeze | 2x1x1x1x3 =[0]
AffineGrid | 1x2x3 =[1,1,3,3]
If | ~true | body="constant"
If | ~true | body="outer"
Loop | =3 =true 2 | body="own"
Loop | =3 =true 2 | body="outer"
Scan | 2 3x2 | body="own" | outputs=2
Scan | 2 3x2 | body="outer" | outputs=2
Where | ~[[true,false,true]] 2x3 2x3
Where | ~[[true,false,true]] 2x3 -
Where | ~true - -
"""

_REDUCTIONS = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)
#: Graphs of control flow, by operator, attribute and kind; ``r1`` is a value of the model around them.
_BODIES = {
    ("If", "then_branch", "constant"): "g () => (float[2] y) { y = Constant<value_floats=[1.0,2.0]>() }",
    ("If", "else_branch", "constant"): "g () => (float[2] y) { y = Constant<value_floats=[3.0,4.0]>() }",
    ("If", "then_branch", "outer"): "g () => (float[2] y) { y = Neg(r1) }",
    ("If", "else_branch", "outer"): "g () => (float[2] y) { y = Relu(r1) }",
    (
        "Loop",
        "body",
        "own",
    ): "g (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Add(s, s) }",
    (
        "Loop",
        "body",
        "outer",
    ): "g (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Add(s, r1) }",
    ("Scan", "body", "own"): "g (float[2] s, float[2] x) => (float[2] t, float[2] y) { t = Add(s, x) y = Neg(t) }",
    (
        "Scan",
        "body",
        "outer",
    ): "g (float[2] s, float[2] x) => (float[2] t, float[2] y) { t = Add(s, x) y = Add(t, r1) }",
}

#: The letters of ``onnxplug.build.kernels.LETTERS``, as NumPy and ONNX name the types.
DTYPES: dict[str, str] = {
    "f": "float",
    "d": "double",
    "h": "float16",
    "b": "bfloat16",
    "c": "int8",
    "C": "uint8",
    "s": "int16",
    "S": "uint16",
    "i": "int32",
    "I": "uint32",
    "l": "int64",
    "L": "uint64",
    "B": "bool",
}
_LETTER = {f"tensor({name})": letter for letter, name in DTYPES.items()}
_PREFERRED = "flihdBCcsSILb"
_PRODUCT = 40


@dataclass(frozen=True)
class Operand:
    """An operand of a node.

    Attributes:
        values: Its values, an array of float64, int64 or bools.
        constant: Whether it is an initializer.
        dynamic: Whether its sizes are unknown to the model.
    """

    values: np.ndarray
    constant: bool = False
    dynamic: bool = False


@dataclass(frozen=True)
class Form:
    """A way to write an operator.

    Attributes:
        op: The operator.
        operands: Its operands; ``None`` for an absent one.
        attributes: Its attributes; ``"@T2"`` is the type of a type variable, ``"@@T2"`` a 1 of that type.
        outputs: The number of its results.
        versions: The first and the last version of the operator that have the form.
        ranks: Whether it may have any rank.
    """

    op: str
    operands: tuple[Operand | None, ...]
    attributes: Mapping[str, Any]
    outputs: int = 1
    versions: tuple[int, int] = (1, 99)
    ranks: bool = False


def variants(form: Form) -> Iterator[Form]:
    """The form itself; with unknown sizes of all operands or the first; constant and computed swapped; other ranks."""
    yield form
    if any(operand is not None and not operand.constant and operand.values.ndim for operand in form.operands):
        yield replace(form, operands=tuple(o and replace(o, dynamic=not o.constant) for o in form.operands))
    first = form.operands[0] if len(form.operands) > 1 else None
    if first is not None and not first.constant and first.values.ndim:
        yield replace(form, operands=(replace(first, dynamic=True), *form.operands[1:]))
    for index, operand in enumerate(form.operands):
        if operand is not None and (index or not operand.constant):
            other = replace(operand, constant=not operand.constant)
            if any(o is not None and not o.constant for i, o in enumerate(form.operands) if i != index):
                yield replace(form, operands=(*form.operands[:index], other, *form.operands[index + 1 :]))
    for rank in range(8) if form.ranks else ():
        shape = (2, 3, 1, 1, 1, 1, 2)[:rank]
        yield replace(
            form, operands=tuple(o and (o if o.constant else replace(o, values=_drawn(shape))) for o in form.operands)
        )


@functools.cache
def forms() -> tuple[Form, ...]:
    """All forms."""
    return tuple(form for line in _TABLE.strip().splitlines() for form in _parsed(line))


def _parsed(line: str) -> Iterator[Form]:
    operators, operands, attributes, rest = ([*map(str.strip, line.split("|")), "", ""])[:4]
    fields = dict(re.findall(r"(\w+)=(\"[^\"]*\"|\[[^\]]*\]|\S+)", attributes))
    values = {name: text if text.startswith("@") else json.loads(text) for name, text in fields.items()}
    words = rest.split()
    outputs = next((int(w.partition("=")[2]) for w in words if w.startswith("outputs=")), 1)
    versions = next((w for w in words if re.fullmatch(r"\d*-\d*", w)), "-")
    first, _, last = versions.partition("-")
    for op in operators.replace("Reduce*", _REDUCTIONS).split():
        yield Form(
            op,
            tuple(map(_operand, operands.split())),
            values,
            outputs,
            (int(first or 1), int(last or 99)),
            "ranks" in words,
        )


def _operand(text: str) -> Operand | None:
    if text == "_":
        return None
    constant = text.startswith("=")
    text = text.removeprefix("=")
    if text.startswith("~"):
        return Operand(np.array(json.loads(text[1:])))
    if text == "-":
        return Operand(_drawn(()), constant)
    if constant and not re.fullmatch(r"\d+(x\d+)+", text):
        return Operand(np.array(json.loads(text)), constant)
    return Operand(_drawn(tuple(int(size) for size in text.split("x"))), constant)


def _drawn(shape: tuple[int, ...]) -> np.ndarray:
    generator = np.random.default_rng(sum(shape) + len(shape))
    return np.asarray(generator.integers(1, 8, shape) / 4)


def versions_of(op: str, first: int, until: int) -> list[int]:
    """The versions of an operator of ai.onnx that the opsets from ``first`` to ``until`` have."""
    import onnx

    if not onnx.defs.has(op):
        return []
    versions = [s.since_version for s in onnx.defs.get_all_schemas_with_history() if s.name == op and not s.domain]
    last = max((since for since in versions if since <= first), default=0)
    return sorted(since for since in versions if last <= since <= until)


def types_of(form: Form, since: int) -> list[dict[str, str]]:
    """Letters of a form's type variables: the usual types first, then all combinations, or each variable alone."""
    import onnx

    schema = onnx.defs.get_schema(form.op, since)
    used = {_formal(schema.inputs, i).type_str for i, o in enumerate(form.operands) if o is not None}
    used |= {_formal(schema.outputs, i).type_str for i in range(form.outputs)}
    allowed = {}
    for variable in schema.type_constraints:
        letters = "".join(letter for letter in _PREFERRED if f"tensor({DTYPES[letter]})" in variable.allowed_type_strs)
        if "body" in form.attributes:
            letters = "f" if "f" in letters else letters
        if form.op == "Mod" and "fmod" not in form.attributes:
            letters = "".join(letter for letter in letters if letter not in "fdhb")
        if variable.type_param_str in used and letters:
            allowed[variable.type_param_str] = letters
    base = {name: letters[0] for name, letters in allowed.items()}
    size = np.prod([len(letters) for letters in allowed.values()])
    if size <= _PRODUCT or form.op == "Cast":
        return [dict(zip(allowed, letters, strict=True)) for letters in itertools.product(*allowed.values())] or [{}]
    return [base, *({**base, name: x} for name, letters in allowed.items() for x in letters[1:])]


def _formal(formals: Any, index: int) -> Any:
    return formals[min(index, len(formals) - 1)]


def model_of(form: Form, since: int, types: Mapping[str, str], opset: int) -> tuple[Any, dict[str, np.ndarray]]:
    """A model of the node, called ``asked``, and of Relus, which every provider has; and values of its inputs."""
    import onnx
    from onnx import helper, numpy_helper

    schema = onnx.defs.get_schema(form.op, since)
    inputs, initializers, feed, names = [], [], {}, []
    for index, operand in enumerate(form.operands):
        if operand is None:
            names.append("")
            continue
        kind = _formal(schema.inputs, index).type_str
        letter = types.get(kind) or _LETTER.get(kind, "f")
        name = f"x{index}"
        values = _typed(operand.values, letter)
        names.append(name)
        if operand.constant:
            initializers.append(numpy_helper.from_array(values, name))
            continue
        feed[name] = values
        shape = [f"{name}_{axis}" if operand.dynamic else size for axis, size in enumerate(operand.values.shape)]
        inputs.append(helper.make_tensor_value_info(name, _proto_type(letter), shape))
    while names and not names[-1]:
        names.pop()
    kind = form.attributes.get("body")
    attributes = {name: _attribute(value, types) for name, value in form.attributes.items() if name != "body"}
    for (op, name, which), text in _BODIES.items():
        if (op, which) == (form.op, kind):
            attributes[name] = onnx.parser.parse_graph(text)
    if form.op == "Scan":
        attributes["num_scan_inputs"] = 1
    results = [f"y{index}" for index in range(form.outputs)]
    kinds = [_formal(schema.outputs, index).type_str for index in range(form.outputs)]
    outputs = [
        helper.make_tensor_value_info(name, _proto_type(types.get(kind) or _LETTER.get(kind, "f")), None)
        for name, kind in zip(results, kinds, strict=True)
    ]
    nodes = [helper.make_node("Relu", [f"r{i}"], [f"r{i + 1}"], f"beside{i}") for i in range(4)]
    nodes.append(helper.make_node(form.op, names, results, "asked", **attributes))
    inputs.append(helper.make_tensor_value_info("r0", onnx.TensorProto.FLOAT, [2]))
    outputs.append(helper.make_tensor_value_info("r4", onnx.TensorProto.FLOAT, [2]))
    feed["r0"] = np.ones(2, np.float32)
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), feed


def _attribute(value: Any, types: Mapping[str, str]) -> Any:
    from onnx import numpy_helper

    if not isinstance(value, str) or not value.startswith("@"):
        return value
    letter = types.get(value.lstrip("@"), "f")
    return numpy_helper.from_array(_typed(np.ones(1), letter)) if value.startswith("@@") else _proto_type(letter)


def _proto_type(letter: str) -> int:
    import onnx

    return int(getattr(onnx.TensorProto, DTYPES[letter].upper()))


def _typed(values: np.ndarray, letter: str) -> np.ndarray:
    from onnx import helper

    if letter == "B" and values.dtype != bool:
        return np.asarray(values > 1)
    whole = letter not in "fdhb"
    if whole and values.size and values.dtype == np.float64 and not float(values.flat[0]).is_integer():
        values = np.ceil(values * 2)
    return np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(_proto_type(letter)))
