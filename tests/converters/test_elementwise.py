"""Arithmetic, comparison, activations, casts: a row an operator, two sets of values each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator

from tests.support.check import check

INF, NAN = float("inf"), float("nan")
X = torch.tensor([[-2.5, -1.0, -0.0], [0.5, 1.5, 3.0]])
X2 = torch.tensor([[NAN, INF, -INF], [0.0, -0.5, 1e4], [2.5, -3.5, 0.25]])
Y = torch.tensor([[2.0, -3.0, 0.5], [-0.25, 1.0, 7.0]])
Y2 = torch.tensor([[1.0, -INF, INF], [3.0, NAN, -2.0], [-0.0, 2.0, -1.5]])
I = torch.tensor([[-7, -1, 0], [3, 5, 9]])  # noqa: E741
I2 = torch.tensor([[2**62, -(2**62), 1], [-8, 8, 2], [10, -10, 4]])
J = torch.tensor([[2, -3, 5], [-2, 7, -4]])
J2 = torch.tensor([[3, 3, -1], [3, -3, 5], [-7, 7, 2]])
POSITIVE, POSITIVE2 = torch.tensor([[0.5, 1.0, 2.0], [10.0, 0.1, 3.0]]), torch.tensor([[4.0, INF, 0.0]])
UNIT, UNIT2 = torch.tensor([[-0.9, 0.0, 0.5], [0.99, -0.1, 0.3]]), torch.tensor([[1.0, -1.0, 0.25]])
BOOL, BOOL2 = torch.tensor([[True, False, True]]), torch.tensor([[False, False, True], [True, True, False]])

UNARY: dict[str, tuple[Callable[..., Any], torch.Tensor, torch.Tensor]] = {
    **{
        name: (getattr(torch, name), X, X2)
        for name in [
            "abs",
            "neg",
            "exp",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "erf",
            "floor",
            "ceil",
            "round",
            "trunc",
            "frac",
            "sign",
            "square",
            "isnan",
            "isinf",
            "isfinite",
            "logical_not",
            "expm1",
            "atan",
            "sinh",
            "cosh",
            "asinh",
            "nan_to_num",
        ]
    },
    **{
        name: (getattr(torch, name), POSITIVE, POSITIVE2)
        for name in ["sqrt", "rsqrt", "log", "log2", "log10", "reciprocal"]
    },
    **{name: (getattr(torch, name), UNIT, UNIT2) for name in ["asin", "acos", "tan", "log1p"]},
    **{
        name: (getattr(F, name), X, X2)
        for name in [
            "relu",
            "relu6",
            "silu",
            "selu",
            "elu",
            "celu",
            "hardsigmoid",
            "hardswish",
            "hardtanh",
            "softplus",
            "mish",
            "hardshrink",
            "softshrink",
            "leaky_relu",
            "logsigmoid",
        ]
    },
    # torch's own gelu of an infinity is NaN; ONNX gives the limit.
    "gelu": (F.gelu, X, X2.nan_to_num(posinf=50.0, neginf=-50.0)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), X, X * 20),
    "acosh": (torch.acosh, POSITIVE + 1, POSITIVE2 + 1),
    "atanh": (torch.atanh, UNIT, UNIT2),
    "int_abs": (torch.abs, I, I2),
    "int_neg": (torch.neg, I, I2),
    "int_sqrt": (torch.sqrt, I.abs(), J.abs()),
    "int_floor": (torch.floor, I, I2),
    "int_sign": (torch.sign, I, I2),
    "bitwise_not": (torch.bitwise_not, I, I2),
    "bool_not": (torch.bitwise_not, BOOL, BOOL2),
    "to_int": (lambda x: x.to(torch.int64), X, X * 3),
    "to_bool": (lambda x: x.to(torch.bool), X, X2),
    "to_double": (lambda x: x.double(), X, X2),
    "bool_to_float": (lambda x: x.float(), BOOL, BOOL2),
    "softmax": (lambda x: x.softmax(-1), X, X * 9),
    "log_softmax": (lambda x: x.log_softmax(0), X, X * 9),
    "softmax_0d": (lambda x: x.sum().softmax(0), X, X * 9),
    "glu": (lambda x: F.glu(x.repeat(1, 2)), X, X * 9),
    "clamp": (lambda x: x.clamp(-1, 2), X, X2),
    "clamp_min_above_max": (lambda x: x.clamp(2, -1), X, X2),
    "clamp_int_by_float": (lambda x: x.clamp(0.5), I, J2),
    "clamp_int": (lambda x: x.clamp(-2, 4), I, I2),
    "pow_2": (lambda x: x**2, X, X2),
    "pow_half": (lambda x: x**0.5, POSITIVE, POSITIVE2),
    "pow_negative": (lambda x: x**-1.5, POSITIVE, POSITIVE2),
    "pow_scalar_base": (lambda x: 2**x, X, X * 2),
    "int_pow_of_a_range": (lambda x: (torch.tensor(1_000_000_007) ** torch.arange(3)) * x, I, I2),
    "int_pow_to_a_constant": (
        lambda x: x ** torch.tensor([0, 13, 64]),
        I,
        torch.tensor([[3, -2_000_001, 77], [2, 0, -1]]),
    ),
    "int32_pow_to_a_constant": (lambda x: x.int() ** torch.tensor([1, 2, 33]).int(), I, I2),
    "int_pow": (lambda x: x**3, I, torch.tensor([[2_000_001, -2_000_001, 3]])),
    "rsub": (lambda x: 1 - x, X, X2),
    "add_scaled": (lambda x: torch.add(x, x, alpha=2.5), X, X2),
    "int_add_float_scalar": (lambda x: x + 0.5, I, J2),
    "int_true_div": (lambda x: x / 4, I, J2),
    "int_floor_div": (lambda x: x // 4, I, I2),
    "int_floor_div_negative": (lambda x: x // -3, I, I2),
    "int_mod": (lambda x: x % -3, I, J2),
    "float_mod": (lambda x: x % 0.7, X, X * 3),
    "bool_add_int": (lambda x: x + 1, BOOL, BOOL2),
    "bool_mul_float": (lambda x: x * 0.5, BOOL, BOOL2),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -INF), X, X2),
    "masked_fill_int": (lambda x: x.masked_fill(x > 0, 7), I, I2),
    "where_scalar": (lambda x: torch.where(x > 0, x, 0.0), X, X2),
    "dropout": (lambda x: F.dropout(x, 0.5, training=False), X, X2),
    "logit": (lambda x: torch.logit(x, 1e-6), UNIT.abs(), UNIT2.abs()),
    "threshold": (lambda x: F.threshold(x, 0.1, 20.0), X, X * 3),
    "round_decimals": (lambda x: torch.round(x, decimals=1), X, X * 1.37),
    "half_round_decimals": (lambda x: (x.half().round(decimals=5), x.half().round(decimals=-5)), X, X * 137),
    "round_decimals_beyond_double": (lambda x: x.double().round(decimals=330), X, X * 1.37),
    "int_pow_beyond_64": (
        lambda x: (x**65, x.int() ** 99, x.to(torch.uint8) ** 127, x ** (2**62 + 1)),
        I,
        torch.tensor([[2, 3, -3], [1, 0, -1]]),
    ),
}

BINARY: dict[str, tuple[Callable[..., Any], tuple[Any, Any], tuple[Any, Any]]] = {
    **{
        name: (getattr(torch, name), (X, Y), (X2, Y2))
        for name in ["add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "heaviside"]
    },
    **{
        f"int_{name}": (getattr(torch, name), (I, J), (I2, J2))
        for name in ["add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge", "bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder", "fmod", "heaviside"]
    },
    **{
        f"bool_{name}": (getattr(torch, name), (BOOL, ~BOOL), (BOOL2, BOOL2.flip(0)))
        for name in ["add", "mul", "logical_and", "bitwise_or", "bitwise_xor", "eq", "maximum", "heaviside"]
    },
    "div": (torch.div, (X, Y), (X2, Y2)),
    "div_floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (X, Y), (X * 3.3, Y + 0.1)),
    "div_trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (X, Y), (X * 3.3, Y + 0.1)),
    "int_div_floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (I, J), (I2, J2)),
    "int_div_trunc": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), (I, J), (I2, J2)),
    "int_div": (torch.div, (I, J), (I + 1, J)),
    "remainder": (torch.remainder, (X, Y), (X * 3.3, Y + 0.1)),
    "fmod": (torch.fmod, (X, Y), (X * 3.3, Y + 0.1)),
    "floor_divide_tenth": (torch.floor_divide, (torch.ones(2), torch.full((2,), 0.1)), (X[0], Y[0])),
    "pow": (torch.pow, (POSITIVE, Y), (POSITIVE * 2, X)),
    "atan2": (
        torch.atan2,
        (X, Y),
        (torch.tensor([[0.0, -0.0, 0.0], [-0.0, 1.0, INF]]), torch.tensor([[1.0, -1.0, -0.0], [0.0, 0.0, -INF]])),
    ),
    "int_with_float": (torch.add, (I, Y), (J, X)),
    "int32_with_int64": (torch.mul, (I.int(), J), (J.int(), I)),
    "compare_int_float": (torch.lt, (I, Y), (J, X)),
    "zero_dim_does_not_promote": (torch.mul, (X, torch.tensor(2.5, dtype=torch.float64)), (X2, torch.tensor(-1.0, dtype=torch.float64))),
    "int8": (torch.add, (torch.tensor([100, -100], dtype=torch.int8),) * 2, (torch.tensor([1, 2], dtype=torch.int8),) * 2),
    "uint8": (torch.sub, (torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([2, 1], dtype=torch.uint8)), (torch.tensor([0], dtype=torch.uint8),) * 2),
    "where": (lambda x, y: torch.where(x > y, x, y), (X, Y), (X2, Y2)),
    "where_promotes": (lambda x, y: torch.where(x > 0, x, y), (I, Y), (J, X)),
    "where_bool": (lambda x, y: torch.where(x, y, ~y), (BOOL, ~BOOL), (BOOL2, BOOL2.flip(0))),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), (X, Y), (Y, X)),
    "addcmul": (lambda x, y: torch.addcmul(x, y, y, value=0.5), (X, Y), (Y, X)),
    "addcdiv": (lambda x, y: torch.addcdiv(x, x, y, value=0.5), (X, Y), (Y, X)),
    "clamp_tensor": (lambda x, y: torch.clamp(x, y, y + 1), (X, Y), (Y, X)),
    "prelu": (lambda x, y: F.prelu(x, y[0]), (X, Y), (Y, X)),
    "cross": (torch.linalg.cross, (X, Y), (X2, Y2)),
    "cross_of_columns": (lambda x, y: torch.linalg.cross(x.T, y.T, dim=0), (X, Y), (Y[:0], X[:0])),
    "int_cross": (torch.linalg.cross, (I, J), (I2, J2)),
    "ldexp": (torch.ldexp, (X, J), (X2, J2 * 40)),
    "ldexp_of_small_and_large_numbers": (
        torch.ldexp,
        (torch.tensor([[1e-38, 0.0, INF]]), torch.tensor([[136, 999, -999]])),
        (torch.tensor([[1e-45, 3e38, -1e-30]]), torch.tensor([[270, -270, 150]])),
    ),
    "double_ldexp_of_small_and_large_numbers": (
        torch.ldexp,
        (torch.tensor([[1e-300, 0.0, INF]], dtype=torch.float64), torch.tensor([[1999, 9999, -9999]])),
        (torch.tensor([[5e-324, 1e308, -1e-30]], dtype=torch.float64), torch.tensor([[2097, -2097, 1100]])),
    ),
    "ldexp_of_integers": (torch.ldexp, (I, J), (J2, J2)),
}  # fmt: skip


#: Operators that propagate NaN only with ``exact=True``.
OF_NAN = {"sign"}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    function, first, second = UNARY[name]
    check(function, first, others=[(second,)], dynamic=True, exact=name in OF_NAN)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    function, first, second = BINARY[name]
    check(function, *first, others=[second], dynamic=[_rows(a) for a in first])


def _rows(x: torch.Tensor) -> Any:
    return {0: torch.export.Dim.AUTO} if x.dim() else None


@pytest.mark.parametrize("opset", [13, 17, 18, 20, 23])
@pytest.mark.parametrize("name", ["gelu", "hardswish", "clamp", "softmax", "silu", "mish", "isfinite", "int_floor_div"])
def test_opsets(name: str, opset: int) -> None:
    function, first, second = UNARY[name]
    check(function, first, others=[(second,)], dynamic=True, opset=opset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[-2, 1, 3]], dtype=dtype)
    check(lambda x: (x + x, x * 2, x - 1, x > 0, -x, x.abs()), x, others=[(x.repeat(2, 1),)], dynamic=[_rows(x)])


@pytest.mark.parametrize("opset", [13, 15, 16])
def test_clamping_bfloat16_at_every_opset(opset: int) -> None:
    """ONNX Runtime expands Clip to Where, which takes bfloat16 since opset 16."""
    x = torch.tensor([-3.0, -0.5, 0.25, 1.5, 7.0, float("nan"), float("inf")], dtype=torch.bfloat16)
    for function in (F.relu6, F.hardtanh, F.softshrink, lambda x: x.clamp(-0.5, 0.7), lambda x: x.clamp(max=0.7)):
        check(function, x, opset=opset)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_products_with_numbers_of_wider_dtypes(dtype: torch.dtype) -> None:
    """Torch multiplies by sizes and 0-dim tensors, and divides by them, in float32; the graph does so in every runtime."""

    def model(x: torch.Tensor, y: torch.Tensor) -> Any:
        large = x * torch.tensor(70000.0), x / torch.tensor(70000), x / torch.tensor(1e-8, dtype=torch.float64)
        return *large, x * x.numel(), x / x.numel(), x * y, x / y, torch.mul(x[0, 0], x.numel())

    cases = [
        (torch.rand(300, 250).to(dtype), torch.tensor(0.30001)),
        (torch.rand(2, 3).to(dtype), torch.tensor(1e-7)),
        (-torch.rand(400, 200).to(dtype), torch.tensor(7e4)),
    ]
    program = check(model, *cases[0], others=cases[1:], dynamic=({0: "a", 1: "b"}, None))
    if dtype == torch.float16:  # ONNX Runtime leaves out casts to float16 and back
        evaluator = ReferenceEvaluator(program.model_proto)
        for case in cases:
            feeds = {name: tensor.numpy() for name, tensor in zip(evaluator.input_names, case, strict=True)}
            for result, expected in zip(evaluator.run(None, feeds), model(*case), strict=True):
                torch.testing.assert_close(torch.from_numpy(np.asarray(result)), expected, rtol=0, atol=0)
