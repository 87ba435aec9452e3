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


def div(x: Tensor, y: Tensor) -> Tensor:
    """A quotient; integers are rounded towards zero."""
    return torch.div(x, y, rounding_mode=None if x.is_floating_point() else "trunc")


def pow_(x: Tensor, exponent: Tensor) -> Tensor:
    """A power, of x's dtype."""
    return torch.pow(x, exponent).to(x.dtype)


def mod(x: Tensor, y: Tensor, *, fmod: int = 0) -> Tensor:
    """A remainder, with the sign of y, or of x (``fmod``)."""
    return torch.fmod(x, y) if fmod else torch.remainder(x, y)


def bit_shift(x: Tensor, y: Tensor, *, direction: str) -> Tensor:
    """Bits moved to the left or right."""
    wide, places = x.to(torch.int64), y.to(torch.int64)
    moved = wide << places if direction == "LEFT" else wide >> places
    return moved.to(x.dtype)


def mean(*inputs: Tensor) -> Tensor:
    """The mean of tensors, element by element."""
    return reduce(torch.add, inputs) / len(inputs)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where the condition holds, y elsewhere."""
    return torch.where(condition, x, y)


def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """x kept within limits."""
    x = x if low is None else torch.maximum(x, low)
    return x if high is None else torch.minimum(x, high)


def clip_6(x: Tensor, *, max: float = 3.4028234663852886e38, min: float = -3.4028234663852886e38) -> Tensor:
    """The same with limits that are attributes."""
    return x.clamp(min, max)


def elu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x, or alpha (exp(x) - 1) below 0."""
    return F.elu(x, alpha)


def celu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x, or alpha (exp(x / alpha) - 1) below 0."""
    return F.celu(x, alpha)


def selu(x: Tensor, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Tensor:
    """gamma elu(x)."""
    return gamma * F.elu(x, alpha)


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x times the normal distribution function."""
    return F.gelu(x, approximate=approximate)


def hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """alpha x + beta, within 0 and 1."""
    return (alpha * x + beta).clamp(0, 1)


def leaky_relu(x: Tensor, *, alpha: float = 0.01) -> Tensor:
    """x, or alpha x below 0."""
    return F.leaky_relu(x, alpha)


def thresholded_relu(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x above alpha, else 0."""
    return torch.where(x > alpha, x, torch.zeros_like(x))


def shrink(x: Tensor, *, bias: float = 0.0, lambd: float = 0.5) -> Tensor:
    """x moved towards 0 by a bias beyond ± lambd, else 0."""
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, torch.zeros_like(x))).to(x.dtype)


def swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x sigmoid(alpha x)."""
    return x * torch.sigmoid(alpha * x)


def is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Which elements are infinite, of the signs that are looked for."""
    found = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    found = found | torch.isposinf(x) if detect_positive else found
    return found | torch.isneginf(x) if detect_negative else found


KERNELS = [
    *(Kernel(op, function, since=7) for op, function in _ALL.items()),
    *(Kernel(op, _folded(function), since=8) for op, function in _VARIADIC.items()),
    Kernel("BitShift", bit_shift, since=11),
    Kernel("Celu", celu, since=12),
    Kernel("Clip", clip_6, since=6),
    Kernel("Clip", clip, since=11),
    Kernel("Div", div, since=7),
    Kernel("Elu", elu, since=6),
    Kernel("Gelu", gelu, since=20),
    Kernel("HardSigmoid", hard_sigmoid, since=6),
    Kernel("IsInf", is_inf, since=10),
    Kernel("LeakyRelu", leaky_relu, since=6),
    Kernel("Mean", mean, since=8),
    Kernel("Mod", mod, since=10),
    Kernel("Pow", pow_, since=7),
    Kernel("Selu", selu, since=6),
    Kernel("Shrink", shrink, since=9),
    Kernel("Swish", swish, since=24),
    Kernel("ThresholdedRelu", thresholded_relu, since=10),
    Kernel("Where", where, since=9),
]
