"""A difference by rounding alone is accepted, and a fault beside it is reported."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug import Rule, VerificationError
from onnxplug.verification import repetition
from onnxplug.verification.conditioning import rounding_slack
from tests.support.check import Call


def hilbert(n: int) -> torch.Tensor:
    places = torch.arange(n, dtype=torch.float32)
    return 1 / (places[:, None] + places[None, :] + 1)


def times(factor: float) -> Any:
    return lambda g, node: g.op.Mul(g.call_next(node), g.const(factor, node.args[0].dtype))


def plus(amount: float) -> Any:
    return lambda g, node: g.op.Add(g.call_next(node), g.const(amount, node.args[0].dtype))


def plus_of_real(amount: float) -> Any:
    """Adds to the real result of a complex operand."""
    return lambda g, node: g.op.Add(g.call_next(node), g.const(amount, torch.float32))


def imaginary_plus(amount: float) -> Any:
    """Adds to the imaginary parts of a complex tensor."""

    def convert(g: Any, node: Any) -> Any:
        result = g.call_next(node)
        return type(result)(result.real, g.op.Add(result.imag, g.const(amount, torch.float32)))

    return convert


def masked(x: torch.Tensor) -> torch.Tensor:
    """Scores with a mask of the largest numbers, which moving a mask by one unit would lift."""
    mask = (x > 0).float()
    return (x.exp() + (1 - mask) * torch.finfo(torch.float32).min).softmax(-1) * 8


#: A model, its input, and rules that make it wrong.
CASES: dict[str, tuple[Callable[..., Any], torch.Tensor, dict[str, Any]]] = {
    "floor of numbers that are whole but for rounding": (
        lambda x: (x @ torch.linalg.inv(x)).floor(),
        torch.randn(3, 5, 5, generator=torch.Generator().manual_seed(1)),
        {
            "aten::floor": lambda g, node: g.op.Ceil(node.args[0]),
            "aten::linalg_inv": times(1.001),
            "aten::matmul": plus(1e-3),
        },
    ),
    "angles of what is 0 but for rounding": (
        lambda x: torch.fft.fft(torch.sin(torch.arange(16) * torch.pi / 8) * x).angle(),
        torch.randn(3, 1, generator=torch.Generator().manual_seed(2)),
        {"complex:aten::angle": plus_of_real(0.01), "complex:aten::fft_fft": imaginary_plus(1e-3)},
    ),
    "angles of what is exactly 0 in PyTorch": (
        lambda x: torch.fft.fft(x * 3).angle(),
        torch.ones(2, 8),
        {"complex:aten::angle": plus_of_real(0.01)},
    ),
    "inverse of a constant that is nearly singular": (
        lambda x: torch.linalg.inv(hilbert(6)) + 0 * x,
        torch.ones(()),
        {"aten::linalg_inv": times(-9.0)},
    ),
    "inverse of a nearly singular matrix": (torch.linalg.inv, hilbert(6), {"aten::linalg_inv": times(9.0)}),
    "logarithm of what is 0 but for rounding": (
        lambda x: torch.log1p(-x.softmax(-1).sum(-1)),
        torch.randn(40, 7, generator=torch.Generator().manual_seed(3)),
        {"aten::log1p": plus(0.01), "aten::neg": times(0.999), "aten::sum.dim_IntList": times(1.0001)},
    ),
    "masks of the largest numbers": (
        masked,
        torch.randn(3, 9, generator=torch.Generator().manual_seed(4)),
        {"aten::softmax.int": times(1.01), "aten::exp": times(1.01)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_choices_of_rounding_are_no_difference(name: str) -> None:
    function, x, _ = CASES[name]
    onnxplug.to_onnx(Call(function), (x,)).verify(seeds=range(4))


@pytest.mark.parametrize(("name", "operator"), [(name, operator) for name in CASES for operator in CASES[name][2]])
def test_a_fault_beside_it_is_an_error(name: str, operator: str) -> None:
    function, x, faults = CASES[name]
    program = onnxplug.to_onnx(Call(function), (x,), rules=[Rule(operator, faults[operator])])
    with pytest.raises(VerificationError):
        program.verify(seeds=())


class Mixed(torch.nn.Module):
    """Computes in a type of 16 bits, and returns float32: by ``torch.autocast``, or as the type of its weights and inputs."""

    def __init__(self, dtype: torch.dtype, autocast: bool) -> None:
        super().__init__()
        self.dtype, self.autocast = dtype, autocast
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16)
        )
        if not autocast:
            self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.autocast):
            return self.layers(x).softmax(-1).float()


def mixed(dtype: torch.dtype, autocast: bool, **options: Any) -> onnxplug.OnnxProgram:
    torch.manual_seed(0)
    x = torch.randn(4, 64, dtype=torch.float32 if autocast else dtype)
    return onnxplug.to_onnx(Mixed(dtype, autocast).eval(), (x,), dynamic_shapes=({0: "n"},), **options)


HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
AUTOCAST = pytest.mark.parametrize("autocast", [True, False])


@HALVES
@AUTOCAST
def test_numbers_that_were_rounded_to_16_bits_stay_uncertain_in_float32(dtype: torch.dtype, autocast: bool) -> None:
    mixed(dtype, autocast).verify(seeds=range(8))


@HALVES
@AUTOCAST
@pytest.mark.parametrize("operator", ["aten::linear", "aten::softmax.int"])
def test_faults_are_found_in_numbers_that_were_rounded_to_16_bits(
    dtype: torch.dtype, autocast: bool, operator: str
) -> None:
    program = mixed(dtype, autocast, rules=[Rule(operator, times(1.25 if dtype == torch.bfloat16 else 1.05))])
    with pytest.raises(VerificationError):
        program.verify(seeds=())


def test_numbers_that_were_rounded_to_float32_stay_uncertain_in_float64() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 16)
    function = Call(lambda x: (x.float() @ weight).softmax(-1).double())
    onnxplug.to_onnx(function, (torch.randn(4, 64, dtype=torch.float64),)).verify(seeds=range(8))


def test_inputs_without_information_are_reported() -> None:
    program = onnxplug.to_onnx(Call(torch.linalg.inv), (torch.eye(10),))
    program.verify(seeds=())
    with pytest.raises(VerificationError, match="do not tell whether the export is right"):
        program.verify(args=(hilbert(10),), seeds=())


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_inputs_whose_result_rounding_decides_are_drawn_again(offset: float) -> None:
    """For some inputs the model inverts a matrix that is nearly singular."""
    eye, singular = torch.eye(10), hilbert(10)
    function = Call(lambda x: torch.linalg.inv(torch.where(x > 0, eye + x, singular * x)))
    program = onnxplug.to_onnx(function, (torch.ones(1),), rules=[Rule("aten::linalg_inv", plus(offset))])
    if offset:
        with pytest.raises(VerificationError):
            program.verify(seeds=range(4))
    else:
        report = program.verify(seeds=range(4))
        assert any("rounding alone" in reason for reason in report.skipped)
        assert len(report.cases) == 5


ATEN = torch.ops.aten
#: An operator, the shapes of its floating-point operands, and the arguments after them.
POLYNOMIALS: list[tuple[Any, tuple[tuple[int, ...], ...], tuple[Any, ...]]] = [
    (ATEN.convolution.default, ((2, 3, 6, 6), (4, 3, 3, 3), (4,)), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)),
    (ATEN.mm.default, ((3, 4), (4, 5)), ()),
    (ATEN.baddbmm.default, ((2, 3, 5), (2, 3, 4), (2, 4, 5)), ()),
    (ATEN.addmm.default, ((5,), (3, 4), (4, 5)), ()),
    (ATEN.add.Tensor, ((3, 4), (3, 4)), ()),
    (ATEN.sub.Tensor, ((3, 4), (3, 4)), ()),
    (ATEN.mul.Tensor, ((3, 4), (3, 4)), ()),
    (ATEN.addcmul.default, ((3, 4), (3, 4), (3, 4)), ()),
    (ATEN.sum.dim_IntList, ((3, 8),), ([1],)),
    (ATEN.mean.dim, ((3, 8),), ([1],)),
    (ATEN.avg_pool2d.default, ((1, 2, 6, 6),), ([2, 2],)),
    (ATEN.upsample_bilinear2d.default, ((1, 2, 4, 4),), ([7, 7], False)),
    (ATEN.constant_pad_nd.default, ((3, 4),), ([1, 2],)),
]


@pytest.mark.parametrize(("operator", "shapes", "rest"), POLYNOMIALS, ids=[str(row[0]) for row in POLYNOMIALS])
def test_polynomials_do_not_jump(operator: Any, shapes: Any, rest: Any, seeded: None) -> None:
    """Polynomials don't jump where sums cancel, operands pass through 0 or change by much: they need no examination."""
    assert operator._schema.name in repetition.STEADY
    for scale in (1e-7, 1e-3, 10.0):
        before = [torch.randn(shape) for shape in shapes]
        for after in ([x * (1 + scale * torch.randn_like(x)) for x in before], [-scale * x for x in before]):
            result = operator(*after, *rest)
            _, (mask,) = repetition.jumps(operator, ((*before, *rest), {}), ((*after, *rest), {}), [result])
            assert mask is not None
            assert not mask.any()


#: Functions whose results move at most twice as far as their operands, how many operands, and the arguments after them.
FUNCTIONS: list[tuple[Any, int, tuple[Any, ...]]] = [
    *((getattr(ATEN, name).default, 1, ()) for name in "relu hardswish abs silu mish".split()),
    *((getattr(ATEN, name).default, 2, ()) for name in "maximum minimum".split()),
    (ATEN.clamp_min.default, 1, (0.25,)),
    (ATEN.gelu.default, 1, ()),
    (partial(ATEN.gelu.default, approximate="tanh"), 1, ()),
    (ATEN.amax.default, 1, ([1],)),
    (ATEN.amin.default, 1, ([0, 1],)),
    (ATEN._log_softmax.default, 1, (0, False)),
]


def _pooled(x: torch.Tensor) -> torch.Tensor:
    return ATEN.max_pool2d_with_indices.default(x[None], [3, 3], [1, 1])[0]


@pytest.mark.parametrize(("function", "count", "rest"), [*FUNCTIONS, (_pooled, 1, ())])
def test_functions_move_no_more_than_twice_as_far(function: Any, count: int, rest: Any, seeded: None) -> None:
    """Results are compared near kinks, in the steepest part and far out, in float64, so that rounding plays no part."""
    assert function is _pooled or getattr(function, "func", function)._schema.name in repetition.STEADY
    for size, step in itertools.product((1e-6, 0.1, 1.0, 5.0, 100.0), (1e-6, 1e-2, 1.0, 10.0)):
        before = [size * torch.randn(40, 50, dtype=torch.float64) for _ in range(count)]
        after = [x + step * torch.randn_like(x) for x in before]
        moved = max(float((x - y).abs().max()) for x, y in zip(before, after, strict=True))
        change = (function(*before, *rest) - function(*after, *rest)).abs()
        assert float(change.max()) <= 2 * moved * (1 + 1e-9)


def test_steady_operators_are_not_examined(monkeypatch: pytest.MonkeyPatch, seeded: None) -> None:
    """The slack is the same without their examination."""
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.Hardshrink(), torch.nn.Flatten(), torch.nn.Linear(64, 5)
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(2, 3, 6, 6)
    examined = []

    def run(model: Any, leaves: Any) -> list[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            return [("output", model(*leaves))]

    def jumps(operator: Any, *operands: Any) -> Any:
        examined.append(operator._schema.name)
        return original(operator, *operands)

    original = repetition.jumps
    monkeypatch.setattr(repetition, "jumps", jumps)
    (slack,) = rounding_slack(run, model, [x])
    assert "aten::hardshrink" in examined
    assert not repetition.STEADY.intersection(examined)
    monkeypatch.setattr(repetition, "STEADY", frozenset())
    (whole,) = rounding_slack(run, model, [x])
    assert "aten::convolution" in examined
    assert slack is not None
    assert whole is not None
    assert slack.any()
    assert torch.equal(slack, whole)


class Laid(torch.nn.Module):
    """A group norm copies its operand first where the strides are those of a transposed tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = x.transpose(1, 2) + 1
        written = torch.empty_like(moved)
        written.copy_(moved * 2)
        return torch.nn.functional.group_norm(written, 1)


def test_other_runs_have_the_strides_of_the_first(seeded: None) -> None:
    """With other strides the runs would call other operators: the effect of rounding would be unknown."""
    slack = rounding_slack(lambda model, leaves: [("output", model(*leaves))], Laid(), [torch.randn(2, 3, 4)])
    assert [None if x is None else tuple(x.shape) for x in slack] == [(2, 4, 3)]
    assert float(slack[0].max()) > 0  # type: ignore[union-attr]
