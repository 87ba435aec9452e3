"""The table of ai.onnx operators, of shape inference, simplification (``simplify.py``) and folding (``fold.py``).

Inference gives dtype and shape of results, as far as they are cheap to infer.

Every emitted value carries its dtype and shape at once: converters read them, and the interpreter compares a converter's
result with torch's. Each function takes ``(inputs, attributes, spec)`` and gives one ``(dtype, dims)`` an output; a
``None`` dtype means the schema's, ``None`` dims an unknown rank, and a ``None`` dimension an unknown size. For an
operator without a function here, and for an unknown rank, onnx's own inference is used (``build/inference/by_onnx.py``).

An example: ``g.op.Concat(a, b, axis=0)`` of ``a`` ``[s0, 3]`` and ``b`` ``[2, 3]`` calls ``INFER["Concat"]``, which gives
``[(None, (None, 3))]``: the schema's dtype, and a first size that is neither operand's. The interpreter, which knows from
torch that it is ``s0 + 2``, writes this into the value afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug.build.inference.dims import Attributes, Inputs, Result
from onnxplug.operators import control, elements, layout, windows
from onnxplug.operators.fold import FOLD
from onnxplug.operators.simplify import SIMPLIFY
from onnxplug.plugin_api import OnnxOperator

_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh CumSum Elu Erf Exp Floor Gelu "
    "HardSigmoid HardSwish Hardmax Identity IsInf IsNaN LeakyRelu Log LogSoftmax Mish Neg Not Reciprocal Relu Round "
    "Selu Shrink Sigmoid Sign Sin Sinh Softmax Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu Trilu "
    "BatchNormalization InstanceNormalization GroupNormalization LpNormalization MeanVarianceNormalization LRN "
    "RMSNormalization ScatterElements ScatterND RotaryEmbedding ReverseSequence"
)
_BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or PRelu Pow Sub Sum Where Xor"
)
_REDUCE = (
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
)

INFER: dict[str, Callable[[Inputs, Attributes, Any], Result]] = {
    **dict.fromkeys(_UNARY.split(), elements.same),
    **dict.fromkeys(_BROADCAST.split(), elements.elementwise),
    **dict.fromkeys(_REDUCE.split(), elements.reduce),
    **dict.fromkeys(("ArgMax", "ArgMin"), elements.arg_reduce),
    **dict.fromkeys(("Conv", "ConvTranspose", "AveragePool", "LpPool", "MaxPool"), windows.spatial),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool"), windows.global_pool),
    **dict.fromkeys(("RandomNormal", "RandomUniform"), elements.random),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike", "Bernoulli", "EyeLike"), elements.random_like),
    **dict.fromkeys(("DFT", "CenterCropPad"), elements.rank_kept),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), layout.depth_to_space),
    "Attention": elements.attention,
    "Cast": elements.cast,
    "CastLike": elements.cast_like,
    "Concat": layout.concat,
    "ConstantOfShape": elements.constant_of_shape,
    "DequantizeLinear": elements.dequantize,
    "Det": elements.det,
    "Dropout": elements.dropout,
    "Einsum": elements.einsum,
    "Expand": layout.expand,
    "Flatten": layout.flatten,
    "Gather": layout.gather,
    "GatherElements": layout.gather_elements,
    "GatherND": layout.gather_nd,
    "Gemm": elements.gemm,
    "GridSample": windows.grid_sample,
    "GRU": elements.recurrent,
    "If": control.if_,
    "LayerNormalization": elements.layer_norm,
    "Loop": control.loop,
    "LSTM": elements.recurrent,
    "MatMul": elements.matmul,
    "NonZero": elements.non_zero,
    "OneHot": elements.one_hot,
    "Pad": layout.pad,
    "QuantizeLinear": elements.quantize,
    "Range": elements.range_,
    "RNN": elements.recurrent,
    "Reshape": layout.reshape,
    "Resize": windows.resize,
    "Scan": control.scan,
    "Shape": elements.shape,
    "Size": elements.scalar,
    "Slice": layout.slice_,
    "Split": layout.split,
    "Squeeze": layout.squeeze,
    "Tile": layout.tile,
    "TopK": elements.top_k,
    "Transpose": layout.transpose,
    "Unique": elements.unique,
    "Unsqueeze": layout.unsqueeze,
}

OPERATORS = [
    OnnxOperator(name, infer=INFER.get(name), simplify=SIMPLIFY.get(name), fold=FOLD.get(name))
    for name in sorted({*INFER, *SIMPLIFY, *FOLD})
]
