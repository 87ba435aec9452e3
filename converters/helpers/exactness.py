"""Conditions and reasons of rules that an operator has in addition to its plain rule.

Rules with ``exact`` differ only for NaN, infinities, ties or integers beyond 2**53, and cost more than a tenth of the
operator's time: they are used with ``to_onnx(exact=True)``, and docs/numerics.md states the cost of each. Rules with a
target alone exist because its kernel is wrong or slow, and cost no time.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from onnxplug.converters.helpers.dtypes import INT64
from onnxplug.interpret.node import FxNode

#: For operators made of ReduceMax, ReduceMin, ArgMax or ArgMin.
SKIPS_NAN: dict[str, Any] = {
    "exact": True,
    "reason": "NaN, which ONNX Runtime's kernels for extrema skip, is the result",
}
#: For operators on 64-bit integers whose kernels compute with floats.
THROUGH_DOUBLE: dict[str, Any] = {
    "exact": True,
    "target": "onnxruntime",
    "reason": "its kernel goes through double, which is wrong beyond 2**53",
}
#: The same where the exact form is as fast.
WRONG_AND_SLOW: dict[str, Any] = {
    "target": "onnxruntime",
    "reason": "its kernel for integers goes through double, which is wrong beyond 2**53, and is slower",
}
#: For hypot, which is infinite where either operand is, whatever the other operand is.
INFINITE_BESIDE_NAN: dict[str, Any] = {"exact": True, "reason": "infinite as soon as one operand is, also beside NaN"}
#: For operators whose kernel gives a number where the result is NaN.
KERNEL_FORGETS_NAN: dict[str, Any] = {
    "target": "onnxruntime",
    "reason": "ONNX Runtime's kernel gives -inf where NaN is due",
}
#: For operators whose kernel gives numbers after NaN.
NAN_IS_LOST: dict[str, Any] = {
    "exact": True,
    "target": "onnxruntime",
    "reason": "NaN, which ONNX Runtime's kernels of recurrent layers turn into numbers, is the result",
}
#: For operators that treat NaN separately.
NOT_A_NUMBER: dict[str, Any] = {"exact": True, "reason": "NaN differs from numbers"}

#: For quantisation by QuantizeLinear, which divides by the scale.
HALFWAY: dict[str, Any] = {
    "exact": True,
    "reason": "numbers halfway between two integers; QuantizeLinear is what runtimes fuse",
}


def of_floats(node: FxNode) -> bool:
    """Whether the first argument is a tensor of floats: others hold no NaN."""
    dtype = node.args[0].dtype
    return isinstance(dtype, ir.DataType) and dtype.is_floating_point()


def of_wide_integers(node: FxNode) -> bool:
    """Whether the result is a tensor of 64-bit integers: narrower integers are exact in double."""
    return node.dtype == INT64


def sums_integers(node: FxNode) -> bool:
    """Whether a result of 64-bit integers is made of integers or bools."""
    dtype = node.args[0].dtype
    return node.dtype == INT64 and dtype is not None and not dtype.is_floating_point()
