"""Gaps and faults of a runtime's kernels: one table, for the cases that a rule's ``target`` cannot express.

A whole form for one runtime is a rule with ``target`` and ``reason``. This table is for many rules, or helpers deep inside of them:
element types without a kernel, and single faults. In portable ONNX none of it holds. docs/numerics.md shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import onnx_ir as ir

from onnxplug.build.builder import GraphBuilder
from onnxplug.build.spec import onnx_spec
from onnxplug.converters.helpers.dtypes import BOOL, DOUBLE, FLOAT, HALVES, INT32, INT64
from onnxplug.errors import OpsetError
from onnxplug.registry.target import DEFAULT_RUNTIME, closeness

_DT = ir.DataType
BFLOAT16, INT8, UINT8, INT16, UINT16 = _DT.BFLOAT16, _DT.INT8, _DT.UINT8, _DT.INT16, _DT.UINT16
_NARROW = frozenset({INT8, UINT8, INT16, UINT16})
_UNSIGNED = frozenset({_DT.UINT32, _DT.UINT64})


@dataclass(frozen=True)
class Gap:
    """Element types without a kernel in a runtime: operators on them are computed in a wider type and cast back.

    Attributes:
        operators: Operators of ai.onnx, separated by blanks.
        dtypes: The element types.
        reason: Since or until when, and the substitute.
        until: The last opset for which that is true; ``None`` for all.
        target: The runtime.
    """

    operators: str
    dtypes: frozenset[ir.DataType]
    reason: str
    until: int | None = None
    target: str = DEFAULT_RUNTIME


@dataclass(frozen=True)
class Fault:
    """A way in which a runtime differs from ONNX, and which concerns several converters.

    Attributes:
        reason: The fault.
        instead: The emitted form.
        target: The runtime.
    """

    reason: str
    instead: str
    target: str = DEFAULT_RUNTIME

    def concerns(self, g: GraphBuilder) -> bool:
        """Whether the model is made for that runtime."""
        return closeness((self.target,), g.runtime) is not None


_FEW = "version 1.20 has kernels for 32 and 64 signed bits, float and double alone"
_NEVER = "no version up to 1.31 has a kernel"
#: Element types that ONNX allows and ONNX Runtime's CPU provider lacks, as versions 1.20 and 1.31 register their kernels.
GAPS: tuple[Gap, ...] = (
    Gap("Add Sub Mul Div", _NARROW | _UNSIGNED, _FEW),
    Gap("Less LessOrEqual Greater GreaterOrEqual Equal TopK", _NARROW | _UNSIGNED, _FEW),
    Gap("Where", frozenset({BOOL, INT8, INT16, UINT16}) | _UNSIGNED, f"{_FEW}, and for uint8"),
    Gap("Max Min", _NARROW, "version 1.20 has no kernel for 8 bits, no version up to 1.31 one for 16"),
    Gap("Neg", frozenset({INT16}), "version 1.20 has no kernel"),
    Gap("Relu", frozenset({INT16, INT64}), _NEVER),
    Gap("Pad Clip", frozenset({INT16, UINT16}), _NEVER),
    Gap("ArgMax ArgMin", frozenset({INT16, UINT16}) | _UNSIGNED, _NEVER),
    Gap("Einsum", _NARROW | _UNSIGNED, _NEVER),
    Gap("ReduceSum ReduceProd ReduceMax ReduceMin CumSum", _UNSIGNED, _NEVER),
    Gap("Unique", frozenset({BOOL, UINT8, INT16, UINT16, INT32}) | _UNSIGNED, _NEVER),
    Gap("NonZero", frozenset({INT8, INT16, UINT16, DOUBLE}) | _UNSIGNED | HALVES, _NEVER),
    Gap("Trilu", _NARROW | _UNSIGNED | HALVES, _NEVER),
    Gap("Trilu", frozenset({INT32}), "version 1.20 has no kernel"),
    Gap("Col2Im", _NARROW | _UNSIGNED | {INT32, INT64}, _NEVER),
    Gap("DepthToSpace", frozenset({BOOL, INT16, UINT16, INT32, INT64, BFLOAT16}) | _UNSIGNED, _NEVER),
    Gap("Less LessOrEqual Greater GreaterOrEqual Equal Pow Unique ArgMax ArgMin TopK Einsum Col2Im", HALVES, _NEVER),
    Gap("Acos Acosh Asin Asinh Atan Atanh Cos Cosh Erf Exp Gelu GridSample Log Sin Sinh Tan", HALVES, _NEVER),
    Gap("RandomNormalLike RandomUniformLike", HALVES, _NEVER),
    Gap("Attention DequantizeLinear Gemm MatMul Pad RMSNormalization Where", frozenset({BFLOAT16}), _NEVER),
    Gap("ScatterElements", HALVES, "with a reduction: refused when the model runs"),
    Gap("Acos Acosh Asin Asinh Atan Atanh Cosh Det Erf Gelu Sinh Tan", frozenset({DOUBLE}), _NEVER),
    Gap("Attention Resize", frozenset({DOUBLE}), _NEVER),
    Gap("GRU LSTM RNN", frozenset({DOUBLE}), "those that are registered refuse to run"),
    Gap("GridSample", frozenset({DOUBLE}), _NEVER, until=19),
)

#: The faults that helpers ask for; rules state theirs with ``target`` and ``reason``.
INTEGERS_THROUGH_DOUBLE = Fault(
    "sums and products of 64-bit integers go through double, wrong beyond 2**53",
    "the last of the cumulative sums or products",
)
DROPOUT_IS_REMOVED = Fault("the optimiser takes a Dropout out in training mode too", "a random mask")
RANDOM_ENDS_AT_21 = Fault(
    "no version up to 1.31 has kernels of the random operators at opset 22 and later, but one of Dropout",
    "each element's place hashed with the mask of a Dropout",
)
ACTIVATIONS_ARE_ROUNDED = Fault(
    "a MatMul with a weight that DequantizeLinear restores is fused, and rounds the activations to bytes",
    "Gemm of the weight's own layout, or the weight as the first operand",
)
FLOAT_TRANSFORMS_ARE_INEXACT = Fault(
    "the DFT of float: 5 to 20 times PyTorch's error at powers of two, elsewhere relative errors of 2e-5 (127) to 1e-3 (4099)",
    "the DFT of double; up to size 512 a product with its matrix, unless it is a power of two",
)
PADDING_IS_NARROW = Fault(
    "a pool whose padding is as wide as its kernel is refused", "Pad, and the pool of what it gives"
)
INFINITY_IS_LOST = Fault(
    "Cast to float8e5m2 gives NaN where rounding up gives infinity, from 61440 on", "infinity before the Cast"
)
RESIZE_ROUNDS_OTHERWISE = Fault(
    "Resize with antialiasing rounds the places of its points otherwise than PyTorch: results differ by 2e-5",
    "where sizes are static, a product with weights for each axis",
)
LONG_SUMS_LOSE_DIGITS = Fault(
    "sums and means add floats one after another: of 8 million numbers near 100, a mean is up to 7 % off and a variance 7 times "
    "too large, also inside of InstanceNormalization, LayerNormalization, GlobalAveragePool, Einsum, MatMul and Gemm of few rows",
    "beyond 2**18 elements (along static axes) axis after axis, long ones in rows of the square root of their size; "
    "along dynamic axes a sum in double with exact=True",
)
EMPTY_SCANS_END_THE_PROCESS = Fault(
    "Scan over slices without elements ends the process by a division by zero; over no slices it is an error",
    "where a size is dynamic, an If: the operand itself where it has no elements",
)
FUSED_PRODUCTS_STAY_UNWRITTEN = Fault(
    "a Transpose of the last two axes fused into a MatMul with a batch (FusedMatMul) leaves its result unwritten where there is "
    "nothing to add: `x.mT @ y` of no rows",
    "Einsum for `einsum` that transposes its left operand and adds along a dynamic axis; else none",
)
LEAST_BIAS_HIDES = Fault(
    "Attention hides keys whose bias is the least finite number, as transformers writes masks: a row of such keys alone is 0",
    "the number next to it",
)
FAR_PLACES_OVERFLOW = Fault(
    "GridSample gives other elements for places far outside: beyond 2**24 elements the weights of a border do not add up to 1, and "
    "beyond 2**63 padding is an element of the image",
    "the grid limited to places outside of every image; NaN gives any element",
)
LOW_HALVES_ARE_SIGNED = Fault(
    "of int64 numbers with the same upper 32 bits, Max, Min, Clip, Sign, ReduceMax and ReduceMin compare the lower ones as signed "
    "numbers: 471 counts as more than 2**32 - 1",
    "Where of Greater or Less; along axes the element at ArgMax or ArgMin",
)
FAULTS: tuple[Fault, ...] = (
    INTEGERS_THROUGH_DOUBLE,
    DROPOUT_IS_REMOVED,
    RANDOM_ENDS_AT_21,
    ACTIVATIONS_ARE_ROUNDED,
    FLOAT_TRANSFORMS_ARE_INEXACT,
    PADDING_IS_NARROW,
    INFINITY_IS_LOST,
    RESIZE_ROUNDS_OTHERWISE,
    LONG_SUMS_LOSE_DIGITS,
    EMPTY_SCANS_END_THE_PROCESS,
    FUSED_PRODUCTS_STAY_UNWRITTEN,
    LEAST_BIAS_HIDES,
    FAR_PLACES_OVERFLOW,
    LOW_HALVES_ARE_SIGNED,
)


def has_kernel(g: GraphBuilder, operators: str, dtype: ir.DataType) -> bool:
    """Whether operators exist at the opset, take an element type by their schemas, and have kernels for it by the table."""
    return _computes(operators, dtype, g.opset, g.runtime)


def computed_in(g: GraphBuilder, operators: str, dtype: ir.DataType) -> ir.DataType:
    """The element type in which operators are computed: ``dtype`` itself, or the narrowest wider type that all of them take.

    Args:
        g: The builder.
        operators: Operators of ai.onnx, separated by blanks.
        dtype: Element type of the operands.
    """
    if dtype is FLOAT:  # the type that every operator and every runtime has
        return dtype
    return _computed(operators, dtype, g.opset, g.runtime)


@lru_cache(maxsize=4096)
def _computed(operators: str, dtype: ir.DataType, opset: int, runtime: str | None) -> ir.DataType:
    candidates = (dtype, *_wider(dtype))
    return next((candidate for candidate in candidates if _computes(operators, candidate, opset, runtime)), dtype)


@lru_cache(maxsize=4096)
def _computes(operators: str, dtype: ir.DataType, opset: int, runtime: str | None) -> bool:
    return all(
        _allows(op_type, opset, dtype) and not _lacks(op_type, opset, dtype, runtime) for op_type in operators.split()
    )


def _wider(dtype: ir.DataType) -> tuple[ir.DataType, ...]:
    if dtype == BOOL:
        return UINT8, INT32, INT64
    if dtype.is_integer():
        return (INT32, INT64) if dtype.bitwidth < 32 else (INT64,)
    return {FLOAT: (DOUBLE,), DOUBLE: ()}.get(dtype, (FLOAT, DOUBLE))


def _lacks(op_type: str, opset: int, dtype: ir.DataType, runtime: str | None) -> bool:
    return any(
        dtype in gap.dtypes
        and op_type in gap.operators.split()
        and opset <= (gap.until or opset)
        and closeness((gap.target,), runtime) is not None
        for gap in GAPS
    )


#: Where the element type that matters is not that of the first input.
_INPUT = {"Where": 1, "DequantizeLinear": 1}


def _allows(op_type: str, opset: int, dtype: ir.DataType) -> bool:
    """Whether a schema allows an element type."""
    try:
        schema = onnx_spec(op_type, opset).schema
    except OpsetError:
        return False
    assert schema is not None
    formal = schema.outputs[0] if op_type.startswith("Random") else schema.inputs[_INPUT.get(op_type, 0)]
    allowed = next(
        (c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == formal.type_str), [formal.type_str]
    )
    return f"tensor({dtype.name.lower()})" in allowed
