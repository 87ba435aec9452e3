"""Elementwise operators by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from onnxplug_reference.kernels import Kernel

_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Det": torch.linalg.det,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": lambda x: torch.where(torch.isnan(x), x, torch.sign(x)) if x.is_floating_point() else torch.sign(x),
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device)),
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: torch.where(x >= 0, x, x * slope),
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
_ALL: dict[str, Callable[..., Tensor]] = {**_UNARY, **_BINARY}
_VARIADIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Sum": torch.add,
}


def _folded(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda *inputs: reduce(function, inputs)


def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """x within limits."""
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def _shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x))).to(x.dtype)


def _is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    infinite = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    infinite = infinite | torch.isposinf(x) if detect_positive else infinite
    return infinite | torch.isneginf(x) if detect_negative else infinite


KERNELS = [
    *(Kernel(op, function, since=7) for op, function in _ALL.items()),
    *(Kernel(op, _folded(function), since=8) for op, function in _VARIADIC.items()),
    Kernel("Celu", lambda x, *, alpha=1.0: F.celu(x, alpha), since=12),
    Kernel("Clip", clip, since=11),
    # Integers are divided towards zero.
    Kernel("Div", lambda x, y: torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc"), since=7),
    Kernel("Elu", lambda x, *, alpha=1.0: F.elu(x, alpha), since=6),
    Kernel("Gelu", lambda x, *, approximate="none": F.gelu(x, approximate=approximate), since=20),
    Kernel("HardSigmoid", lambda x, *, alpha=0.2, beta=0.5: (alpha * x + beta).clamp(0, 1), since=6),
    Kernel("IsInf", _is_inf, since=10),
    Kernel("LeakyRelu", lambda x, *, alpha=0.01: F.leaky_relu(x, alpha), since=6),
    Kernel("Mean", lambda *inputs: reduce(torch.add, inputs) / len(inputs), since=8),
    Kernel("Mod", lambda x, y, *, fmod=0: (torch.fmod if fmod else torch.remainder)(x, y), since=10),
    Kernel("Pow", lambda x, exponent: torch.pow(x, exponent).to(x.dtype), since=7),
    Kernel("Selu", lambda x, *, alpha=0.0, gamma=0.0: gamma * F.elu(x, alpha), since=6),
    Kernel("Shrink", _shrink, since=9),
    Kernel("Swish", lambda x, *, alpha=1.0: x * torch.sigmoid(alpha * x), since=24),
    Kernel("ThresholdedRelu", lambda x, *, alpha=1.0: torch.where(x > alpha, x, torch.zeros_like(x)), since=10),
    Kernel("Where", torch.where, since=9),
]
