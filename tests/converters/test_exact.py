"""Values for which others are silently wrong: 64-bit integers, NaN, infinities, ties, empty and 0-dim tensors.

Special values are tested with ``exact=True``; the results of ordinary values are right without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import onnxplug
from tests.support.check import Call, check
from tests.support.sampling import rotated

INF, NAN = float("inf"), float("nan")
MIN, MAX = -(2**63), 2**63 - 1
LARGE = torch.tensor([[2**53, 2**53 + 1, MIN, 5], [2**62, 2**62 + 1, MAX, 1]])
OTHER = torch.tensor([[MAX, -1, -7, 3], [MIN, 2**53 - 1, -(2**61), 10]])

INTEGERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (x.sum(1), x.sum(), x.sum(0, keepdim=True), x.sum((0, 1))),
    "prod": lambda x: (x.prod(1), x.prod()),
    "cumulative": lambda x: (x.cumsum(1), x.cumprod(0)),
    "extrema": lambda x: (x.amax(1), x.amin(0), x.max(1), x.argmax(1), x.cummax(1)),
    "order": lambda x: (x.sort(1)[0], x.topk(2)[0], x.unique(), x.median(1)[0]),
    "powers": lambda x: (x**3, x ** x.clamp(0, 70), x.square()),
    "negative_powers": lambda x: x.clamp(-2, 2) ** x.clamp(-5, -1),
    "floor": lambda x: (torch.div(x, 3, rounding_mode="floor"), torch.div(x, -7, rounding_mode="floor"), x // 5),
    "trunc": lambda x: (torch.div(x, 3, rounding_mode="trunc"), torch.div(x, -7, rounding_mode="trunc")),
    "remainder": lambda x: (x % 7, x % -7, torch.fmod(x, 7), torch.fmod(x, -7)),
    "bits": lambda x: (x & 0x0F0F, x | -2, x ^ x.flip(1), ~x),
    "shifts": lambda x: (x << 3, x >> 3, x << x.clamp(0, 63), x >> x.clamp(0, 63), x >> 63),
    "divisors": lambda x: (
        torch.gcd(x.clamp(-(2**62), 2**62), torch.tensor(12)),
        torch.lcm(x.clamp(-99, 99), torch.tensor(6)),
    ),
    "products": lambda x: (x @ x.t(), torch.dot(x[0], x[1]), torch.einsum("ij,kj->ik", x, x)),
    "comparisons": lambda x: (x == x.flip(1), x < x.flip(1), x >= 2**53 + 1, x.clamp(-5, 2**53 + 1), x.sign(), x.abs()),
    "selection": lambda x: (torch.where(x > 2**53, x, 0), torch.maximum(x, x.flip(1)), x.trace(), x.diff()),
    "scattered": lambda x: x.scatter_add(1, torch.tensor([[0, 0, 1, 1], [3, 3, 3, 3]]), x),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_exact(name: str) -> None:
    check(INTEGERS[name], LARGE, others=[(OTHER,)], exact=True)


#: Powers that stay below 2**53.
SMALLER = {"powers": lambda x: (x**3, x.clamp(-9, 9) ** x.flip(1).clamp(0, 12), x.square(), x.clamp(-9, 9).int() ** 9)}


@pytest.mark.parametrize("target", ["onnxruntime", None], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_ordinary_integers(name: str, target: str | None) -> None:
    """Negative numbers, zero, ties, and numbers whose results exceed 32 bits."""
    x = torch.tensor([[3, -4, 0, 7], [-1, 2, 2, 40_000]])
    others = [(-x,), (torch.tensor([[0, 0, 0, 0], [1, -1, 5_000_000, -1]]),)]
    check(SMALLER.get(name, INTEGERS[name]), x, others=others, target=target)


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_bits_at_every_opset(opset: int) -> None:
    check(lambda x, y: (x & y, x | y, x ^ y), LARGE, OTHER, others=[(OTHER, LARGE)], opset=opset)


#: Counts of shifts: none, some, all bits but one, all bits, and counts that PyTorch takes as all bits.
COUNTS = [0, 1, 3, 7, 8, 15, 16, 31, 32, 63, 64, -1, (0, 4, 6), (5, 70)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("opset", "target"), [(13, "onnxruntime"), (17, None), (18, "onnxruntime"), (20, None)])
def test_shifts_by_constants(dtype: torch.dtype, opset: int, target: str | None) -> None:
    counts = [torch.tensor(count) if isinstance(count, tuple) else count for count in COUNTS]
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x = torch.tensor([[low], [low + 1], [high], [5]], dtype=dtype)
    other = torch.tensor([[high - 1], [1], [0], [high // 3], [low // 3], [low // 2], [100]], dtype=dtype)
    numbers = torch.tensor([7], dtype=dtype)

    def model(x: torch.Tensor) -> list[torch.Tensor]:
        return [*(x << n for n in counts), *(x >> n for n in counts), 3 << (x & 3), numbers >> 1]

    check(model, x, others=[(other,)], dynamic=({0: torch.export.Dim.AUTO},), opset=opset, target=target)


@pytest.mark.parametrize(
    ("dtype", "model", "form"),
    [
        (torch.uint8, lambda x: x << 3, ["BitShift"]),
        (torch.uint8, lambda x: x >> 3, ["BitShift"]),
        (torch.int32, lambda x: x << 31, ["Mul"]),
        (torch.int32, lambda x: x >> 30, ["BitwiseAnd", "Div"]),
        (torch.int64, lambda x: x >> torch.tensor([0, 8]), ["BitwiseAnd", "Div"]),
        (torch.int64, lambda x: x >> 63, ["Less", "Where"]),
    ],
)
def test_form_of_shifts(dtype: torch.dtype, model: Callable[[torch.Tensor], Any], form: list[str]) -> None:
    program = check(model, torch.tensor([[9], [77]]).to(dtype), others=[(torch.tensor([[-9], [0]]).to(dtype),)])
    assert [node.op_type for node in program.model.graph] == form


@pytest.mark.parametrize(
    ("dtype", "form"),
    [(torch.uint16, ["Cast", "Mul", "Cast", "Div", "Cast"]), (torch.uint32, ["BitShift"] * 2)],
    ids=str,
)
def test_shifts_that_pytorch_lacks(dtype: torch.dtype, form: list[str]) -> None:
    """PyTorch has no kernel of these types, and ONNX Runtime no BitShift of 16 bits."""
    size = 2 ** torch.iinfo(dtype).bits
    numbers = [size - 1, 0, size // 2 + 9, 11]
    x = torch.tensor(numbers[:2]).to(dtype)
    program = onnxplug.to_onnx(Call(lambda x: (x << 3, x >> 3)), (x,))
    assert [node.op_type for node in program.model.graph] == form
    for values in (numbers[:2], numbers[2:]):
        left, right = program(torch.tensor(values).to(dtype))
        assert left.tolist() == [number * 8 % size for number in values]
        assert right.tolist() == [number // 8 for number in values]


ROWS = torch.tensor([[1.0, NAN, 2.0, -INF], [INF, 1.0, -0.0, 0.0], [-INF, -INF, -INF, -INF], [INF, INF, NAN, -1.0]])
FINITE = torch.tensor([[1.0, 1.0, -2.0, 0.5], [3.0, 3.0, 3.0, 3.0], [-1.0, 4.0, 4.0, -1.0], [0.0, -0.0, 1e-40, 7.0]])

FLOATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "clamp": lambda x: (x.clamp(-1, 1), x.clamp(min=0.5), x.clamp(torch.tensor(NAN), None), x.clamp(2, 1)),
    "extrema": lambda x: (
        torch.maximum(x, x.flip(1)),
        torch.minimum(x, x.flip(1)),
        x.amax(1),
        x.amin(0),
        x.aminmax(dim=1),
    ),
    "ignoring": lambda x: (torch.fmax(x, x.flip(1)), torch.fmin(x, x.flip(1)), x.nansum(1), x.nanmean(0)),
    "argextrema": lambda x: (x.argmax(1), x.argmin(0), x.max(1), x.min(1)),
    "cumulative": lambda x: (x.cummax(1), x.cummin(0), x.cumsum(1), x.logcumsumexp(1)),
    "signs": lambda x: (
        x.sign(),
        torch.signbit(x),
        torch.copysign(torch.ones_like(x), x),
        x.nan_to_num(nan=3).neg().signbit(),
    ),
    "angles": lambda x: (torch.atan2(x, x.flip(1)), torch.hypot(x, x.flip(1))),
    "exponentials": lambda x: (x.expm1(), x.log1p(), torch.logaddexp(x, x.flip(1)), torch.logaddexp2(x, x)),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)),
    "floor_division": lambda x: (x // 0.3, torch.div(x, -0.7, rounding_mode="floor"), x // 0.0),
    "remainder": lambda x: (x % 0.7, x % -0.7, torch.fmod(x, 0.7), x % INF),
    "rounding": lambda x: (x.round(), x.trunc(), x.ceil(), x.floor(), (x * 2.5).round(), x.frac()),
    "parts": lambda x: torch.frexp(x),
    "neighbours": lambda x: torch.nextafter(x, x.flip(1)),
    "tests": lambda x: (
        x.isnan(),
        x.isinf(),
        x.isposinf(),
        x.isneginf(),
        x.isfinite(),
        x.nan_to_num(),
        x.nan_to_num(1, 2, 3),
    ),
    "median": lambda x: (x.median(1)[0], x.nanmedian(1)[0], x.median(), x.kthvalue(2, 1)[0]),
    "sorted": lambda x: (
        x[:3].nan_to_num(nan=9).sort(dim=1, stable=True),
        x[:1].sort(dim=1, stable=True),
        x[:1].topk(3, 1)[0],
    ),
    "pools": lambda x: (
        F.max_pool1d(x[None], 2),
        F.max_pool2d(x[None], 3, 2, 1),
        F.max_pool2d(x[None, None], (2, 3), 1, ceil_mode=True),
        F.adaptive_max_pool1d(x, 3),
        F.adaptive_max_pool2d(x[None], 2),
        F.adaptive_max_pool2d(x[None], (3, 1)),
    ),
    "norms": lambda x: (x.norm(INF, 1), torch.linalg.vector_norm(x, 1, 1), torch.linalg.vector_norm(x, 0, 1)),
    "variance": lambda x: (x[1:].var(1), x[1:2].var(0), x.std(1, correction=0)),
    "searched": lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 2.0]), x, right=True),
    "powers": lambda x: (x**2, x**0.5, x**-0.5, torch.float_power(x, -0.5), x**-1, x**0, 2.0**x, x ** x.flip(1)),
}


@pytest.mark.parametrize("name", FLOATS)
def test_nan_and_infinity(name: str) -> None:
    check(FLOATS[name], ROWS, others=[(FINITE,), (ROWS.flip(0),)], exact=True)


@pytest.mark.parametrize(
    ("name", "target", "dtype"), rotated(FLOATS, ["onnxruntime", None], [torch.float32, torch.float64], every=2)
)
def test_ordinary_floats(name: str, target: str | None, dtype: torch.dtype) -> None:
    """Finite numbers of any magnitude and sign, with ties and zeros."""
    sizes = torch.tensor(
        [[1e18, 1e17, 1e-30, 2.0], [0.1, 0.1, -0.1, 5.0], [80.0, -80.0, 0.0, 1e8], [-3.5, 2.5, 1.5, 0.5]]
    )
    check(FLOATS[name], FINITE.to(dtype), others=[(sizes.to(dtype),), (-FINITE.to(dtype),)], target=target)


@pytest.mark.parametrize("name", FLOATS)
def test_nan_and_infinity_in_double(name: str) -> None:
    check(FLOATS[name], ROWS.double(), others=[(FINITE.double(),)], exact=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_results_of_sigmoid(dtype: torch.dtype) -> None:
    """Small results, also those of integers, are exact: the logarithm shows their digits."""
    x = torch.tensor([-80.0, -30.0, -18.5, -17.0, -14.0, -1.0, -0.0, 0.5, 17.0, 90.0, INF, float("nan")], dtype=dtype)
    model = lambda x, n: (x.sigmoid().log(), n.sigmoid().log())  # noqa: E731
    n = torch.tensor([-60, -17, 0, 3])
    check(model, x.repeat(9), n, others=[(-x.repeat(9) / 2, -n)], exact=True)


SLICES: dict[str, Callable[[torch.Tensor], Any]] = {
    "negative": lambda x: (x[-2:], x[:-1], x[-100:], x[:-100]),
    "beyond": lambda x: (x[100:], x[:100], x[2:1], x[5:MAX]),
    "steps": lambda x: (x[::2], x[1::3], x[::100]),
    "indices": lambda x: (x[-1], x[torch.tensor([-1, 0, -5])], x.index_select(0, torch.tensor([4, 4, 0]))),
    "uneven": lambda x: (x.split(2), x.chunk(3), x.tensor_split(3), x.tensor_split((1, 4))),
    "rolled": lambda x: (x.roll(2, 0), x.roll(-7, 0), x.flip(0)),
    "by_tensor": lambda x: x[torch.tensor([True, False, True, True, False])],
}


@pytest.mark.parametrize("name", SLICES)
def test_slices(name: str) -> None:
    check(SLICES[name], torch.arange(10.0).reshape(5, 2), others=[(torch.randn(5, 2),)])


INDEX = torch.tensor([0, 0, 2, -1])
SCATTERED: dict[str, Callable[..., Any]] = {
    "index_put": lambda x, v: torch.index_put(x, (INDEX,), v, accumulate=True),
    "index_put_unique": lambda x, v: torch.index_put(x, (torch.tensor([3, 0, 2, 1]),), v),
    "index_add": lambda x, v: x.index_add(0, INDEX.abs(), v, alpha=2),
    "index_copy": lambda x, v: x.index_copy(0, torch.tensor([3, 0, 2, 1]), v),
    "scatter_add": lambda x, v: x.scatter_add(0, INDEX.abs()[:, None].expand(-1, 3), v),
    **{
        f"scatter_reduce_{mode}_{own}": (
            lambda x, v, mode=mode, own=own: x.scatter_reduce(
                0, INDEX.abs()[:, None].expand(-1, 3), v, mode, include_self=own
            )
        )
        for mode in ("sum", "prod", "mean", "amax", "amin")
        for own in (True, False)
    },
    **{
        f"index_reduce_{mode}_{own}": (
            lambda x, v, mode=mode, own=own: x.index_reduce(0, INDEX.abs(), v, mode, include_self=own)
        )
        for mode in ("prod", "mean", "amax", "amin")
        for own in (True, False)
    },
    "masked_scatter": lambda x, v: x.masked_scatter(x > 0, v),
    "put": lambda x, v: (x.put(INDEX, v[0, :1].expand(4), accumulate=True), x.take(INDEX)),
    "diagonal_scatter": lambda x, v: (x.diagonal_scatter(v[0, :2], 1), x.select_scatter(v[0], 0, -1)),
    "as_strided": lambda x, v: (x.as_strided((2, 2), (1, 2), 1), x.as_strided_scatter(v[:2, :2], (2, 2), (1, 3))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("name", SCATTERED)
def test_scattered(name: str, dtype: torch.dtype) -> None:
    x, v = (torch.arange(12).reshape(4, 3) - 5).to(dtype), torch.tensor([[1, -2, 3]] * 4).to(dtype) * 2
    check(SCATTERED[name], x, v, others=[(-x * 3, v + 7)])


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in SCATTERED if "_am" in name])
def test_scattered_nan(name: str, dtype: torch.dtype, opset: int) -> None:
    """NaN of the tensor and of the source, before and after a number, stays."""
    x = torch.tensor([[0, NAN, 1], [NAN, 3, 4], [5, NAN, 6], [7, 8, NAN]], dtype=dtype)
    v = torch.tensor([[NAN, 1, 2], [3, NAN, 4], [5, 6, NAN], [1, INF, 0]], dtype=dtype)
    check(SCATTERED[name], x, v, others=[(v, x), (v.nan_to_num(0), x), (x, -v.flip(0))], opset=opset, exact=True)


@pytest.mark.parametrize("opset", [13, 16])
@pytest.mark.parametrize("name", [name for name in SCATTERED if "strided" not in name])
def test_scattered_at_low_opsets(name: str, opset: int) -> None:
    x, v = torch.arange(12.0).reshape(4, 3) - 5, torch.tensor([[1.0, -2.0, 3.0]] * 4)
    check(SCATTERED[name], x, v, others=[(-x * 3, v + 7)], opset=opset)


@pytest.mark.parametrize("opset", [13, 16, 18])
@pytest.mark.parametrize("mode", ["sum", "prod", "mean", "amax", "amin"])
def test_nothing_to_scatter(mode: str, opset: int) -> None:
    """In opsets without these reductions the maximum of no elements was NaN."""
    x, index, v = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0, 2, 2]), torch.tensor([4.0, -5.0, 6.0])
    for dtype in (torch.float32, torch.int64):
        check(
            lambda x, i, v: x.scatter_reduce(0, i, v, mode),
            x.to(dtype),
            index,
            v.to(dtype),
            dynamic=({0: "n"}, {0: "e"}, {0: "e"}),
            others=[(x.to(dtype), index[:0], v[:0].to(dtype)), (x[:1].to(dtype), index[:1], v[:1].to(dtype))],
            opset=opset,
        )


EMPTY: dict[str, Callable[[torch.Tensor], Any]] = {
    "reduced": lambda x: (x.sum(), x.sum(0), x.prod(1), x.any(), x.all(), x.mean(0)),
    "cumulative": lambda x: (x.cumsum(0), x.cumprod(0), x.cummax(0) if x.numel() else x),
    "shaped": lambda x: (x.reshape(3, -1) if x.numel() else x.reshape(3, 0), x.t(), x.flatten(), torch.cat([x, x])),
    "elementwise": lambda x: (x + 1, x.exp(), x > 0, torch.where(x > 0, x, 0)),
    "products": lambda x: (x @ x.t(), x.t() @ x),
    "ordered": lambda x: (x.sort(0), x.unique(), x.nonzero(), x[x > 0]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_tensors(name: str) -> None:
    check(EMPTY[name], torch.zeros(0, 3), others=[(torch.zeros(0, 3),)])


SCALARS: dict[str, Callable[[torch.Tensor], Any]] = {
    "reduced": lambda x: (x.sum(), x.mean(), x.amax(0), x.argmax(), x.cumsum(0), x.softmax(0), x.norm()),
    "ordered": lambda x: (x.sort(), x.topk(1), x.kthvalue(1), x.median(), x.unique(), x.cummax(0)),
    "indexed": lambda x: (x[None], x.index_select(0, torch.tensor([0])), x.gather(0, torch.tensor(0)), x.nonzero()),
    "scattered": lambda x: (x.index_add(0, torch.tensor([0]), x), x.scatter(0, torch.tensor(0), x * 2)),
    "moved": lambda x: (x.flip(()), x.permute(()), x.squeeze(), x.expand(2, 3), x.unfold(0, 1, 1)),
    "pieces": lambda x: (x.flatten(), x.reshape(1, 1), x.repeat(2), x.tile(3)),
}


@pytest.mark.parametrize("name", SCALARS)
def test_zero_dimensions(name: str) -> None:
    check(SCALARS[name], torch.tensor(2.5), others=[(torch.tensor(-3.0),), (torch.tensor(0.0),)])


#: Numbers that the tensor's dtype can't hold: torch rounds or wraps them before it compares, divides or limits.
NUMBERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "quotients": lambda x: (x // 3, torch.div(x, 0.1, rounding_mode="floor"), torch.div(x, 0.1, rounding_mode="trunc")),
    "comparisons": lambda x: (x == 0.1, x < 0.1, x <= 0.1, x > 3.3, x >= 3.3, x != 3.3),
    "selection": lambda x: (torch.where(x > 3.3, x, 0.3), F.threshold(x, 0.1, 0.3), x.clamp(0.1, 3.3)),
    "scales": lambda x: (x * 1e-6, x / 1e5, x * 0.1, x / 3),
    "any_of_no_axes": lambda x: (x.any([]), x.all([]), (x > 1).any([], keepdim=True)),
}
WRAPPED: dict[str, Callable[[torch.Tensor], Any]] = {
    "quotients": lambda x: (x // -2, torch.div(x, -3, rounding_mode="trunc"), x % -5, torch.fmod(x, -7), x % 300),
    "comparisons": lambda x: (x < -1, x == -1, x >= -250, x > 300),
    "limits": lambda x: (x.clamp(max=-2), x.clamp(min=-255), x.clamp(-250, -3)),
    "sums": lambda x: (x + 300, x - 7, x * -3, x | -2, torch.where(x > 4, x, -1)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_the_dtype_rounds(name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, 3.3, 0.0, 0.3]).to(dtype)
    check(NUMBERS[name], x, others=[(torch.tensor([3.3, 0.1, -0.1, 600.0]).to(dtype),)])


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", WRAPPED)
def test_numbers_that_uint8_wraps(name: str, opset: int) -> None:
    x = torch.tensor([0, 1, 5, 254, 255], dtype=torch.uint8)
    if name == "limits" and not torch.__version__.startswith("2.13."):
        with pytest.raises(RuntimeError, match="outside the representable range"):
            WRAPPED[name](x)
        return
    check(WRAPPED[name], x, others=[(torch.tensor([7, 128, 127, 3, 250], dtype=torch.uint8),)], opset=opset)
