"""The comparison of two tensors: differences to refuse and to accept; no element widens another element's tolerance."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.testing import assert_close

from onnxplug.verification.compare import Scale, compare
from onnxplug.verification.conditioning import rounding_slack

INF, NAN, LOWEST = float("inf"), float("nan"), torch.finfo(torch.float32).min
NORMAL = torch.randn(40, 25, generator=torch.Generator().manual_seed(0))
HALVES = (torch.float16, torch.bfloat16)


def other(x: torch.Tensor, index: int, value: float) -> torch.Tensor:
    """A copy with one element changed."""
    changed = x.clone()
    changed.view(-1)[index] = value
    return changed


def masked(fill: float, share: float) -> torch.Tensor:
    """Normal numbers, a share of them replaced by a fill."""
    hidden = torch.rand(NORMAL.shape, generator=torch.Generator().manual_seed(1)) < share
    return NORMAL.masked_fill(hidden, fill)


def spread(x: torch.Tensor, wrong: float) -> torch.Tensor:
    """A copy whose elements of ordinary size are each off by an amount."""
    return torch.where((x.abs() < 1e3) & (x != 0), x + wrong, x)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.ones(2), torch.ones(3), "shape"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "float32, PyTorch has torch.float64"),
        (torch.ones(()), torch.ones((), dtype=torch.float64), "float32, PyTorch has torch.float64"),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), r"index \[1\]: ONNX has 2.0, PyTorch 2.5 \(float32"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), r"index \[1\]: ONNX has 2, PyTorch 3"),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62]), "differs"),
        (torch.tensor([NAN]), torch.tensor([0.0]), "nan"),
        (torch.tensor([0.0]), torch.tensor([NAN]), "nan"),
        (torch.tensor([INF]), torch.tensor([-INF]), "inf"),
        (torch.tensor([INF]), torch.tensor([3e38]), "inf"),
        (torch.tensor([True]), torch.tensor([False]), "differs"),
        (torch.tensor(1.0), torch.tensor(2.0), r"index \[\].*1 of 1 element differs"),
        (torch.tensor(2), 2.5, "number 2.5"),
        (torch.tensor(2.0), 2, "number 2"),
        (torch.tensor(2), 3, "PyTorch 3"),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([1 + 3j]), r"index \[0, 1\]"),
        (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, 30.0]), "1 of 3 elements differs"),
        (torch.zeros(4), torch.full((4,), 2e-5), "4 of 4"),
        (torch.full((4,), 2e-5), torch.zeros(4), "4 of 4"),
        (torch.tensor([100.0, 1.1e-5]), torch.tensor([100.0, 1e-5]), "1 of 2"),
    ],
)
def test_differences_are_reported(actual: torch.Tensor, expected: Any, message: str) -> None:
    comparison = compare(actual, expected)
    assert not comparison.equal
    assert re.search(message, str(comparison))


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([NAN, INF, -INF]), torch.tensor([NAN, INF, -INF])),
        (torch.zeros(0), torch.zeros(0)),
        (torch.tensor(2.0), 2.0),
        (torch.tensor(2), 2),
        (torch.tensor(True), True),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.01], dtype=torch.bfloat16)),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([1 + 2j])),
        (torch.tensor([[1e-5, 100.0]]), torch.tensor([2e-5 + 100j])),
        (NORMAL * (1 + 2e-5), NORMAL),
        (NORMAL + 5e-6, NORMAL),
        (torch.zeros(5), torch.zeros(5)),
        (torch.full((5,), 1.00001), torch.ones(5)),
        (spread(masked(LOWEST, 0.95), 1e-6), masked(LOWEST, 0.95)),
        (torch.tensor([1.0, -1e9]), torch.tensor([1.00001, -1e9 - 64])),
    ],
)
def test_no_difference(actual: torch.Tensor, expected: Any) -> None:
    comparison = compare(actual, expected)
    assert comparison.equal, str(comparison)


@pytest.mark.parametrize(
    "expected",
    [
        *[masked(fill, share) for fill in (LOWEST, -1e9, -1e4, 1e30) for share in (0.001, 0.1, 0.5, 0.9, 0.99)],
        masked(-INF, 0.5),
        masked(NAN, 0.5),
        masked(0.0, 0.99),
        other(NORMAL, 7, 1e6),
        other(NORMAL, 7, LOWEST),
        NORMAL[0, :3],
        other(NORMAL[0, :3], 1, 1e30),
        torch.where(NORMAL > 0, NORMAL * 1e-3, 10 + NORMAL),
        torch.where(NORMAL > 1, NORMAL * 1e-3, 1e4 + NORMAL),
        torch.cat([masked(LOWEST, 0.5), masked(-1e9, 0.5), torch.full((40, 25), 7.0)]),
    ],
)
def test_no_extreme_hides_an_error_of_the_others(expected: torch.Tensor) -> None:
    """A tenth of the ordinary elements' own size is an error, whatever stands beside them."""
    ordinary = (expected.abs() < 100) & (expected != 0)
    assert not compare(torch.where(ordinary, expected * 1.1, expected), expected).equal
    assert not compare(torch.where(ordinary, -expected, expected), expected).equal
    assert compare(expected, expected).equal
    first = int(ordinary.view(-1).nonzero()[0])
    comparison = compare(other(expected, first, 1.1 * float(expected.view(-1)[first])), expected)
    assert (comparison.count, comparison.total) == (1, expected.numel())
    assert comparison.index == tuple(int(i) for i in torch.unravel_index(torch.tensor(first), expected.shape))


@pytest.mark.parametrize("dtype", HALVES)
def test_halves(dtype: torch.dtype) -> None:
    expected = masked(torch.finfo(dtype).min, 0.5).to(dtype)
    assert compare(
        (expected.float() * (1 + torch.finfo(dtype).eps)).clamp_min(torch.finfo(dtype).min).to(dtype), expected
    ).equal
    assert not compare(spread(expected, 0.5).to(dtype), expected).equal


def test_steps_between_subnormal_halves_are_rounding() -> None:
    """The steps are 6e-8: a share of a subnormal number would be less than a step."""
    expected = torch.arange(1, 40, dtype=torch.float16) * 2.0**-24
    assert compare(expected + 2.0**-24, expected).equal
    assert not compare(expected + 2.0**-19, expected).equal
    assert not compare(expected * 0, expected).equal
    tiny = expected.float()  # ordinary numbers to float32
    assert not compare(tiny + 2.0**-24, tiny).equal


def test_rounding_of_large_summands_may_show_in_small_elements() -> None:
    """A third of the elements are remainders of a cancellation of numbers of size 10."""
    summands = NORMAL.flatten() * 10
    exact = torch.where(torch.arange(1000) % 3 == 0, summands * 1e-3, summands)
    noise = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 10 * 2**-24
    assert compare(exact + noise, exact).equal
    assert not compare(exact + 1000 * noise, exact).equal


def test_the_index_is_that_of_the_worst_element_by_its_tolerance() -> None:
    expected = masked(-1e9, 0.3)
    wrong = expected * torch.where(expected < -1e8, 1.001, 1.0)
    assert compare(wrong, expected).actual < -1e9
    ordinary = int((expected.abs() < 100).view(-1).nonzero()[5])
    comparison = compare(other(wrong, ordinary, 50.0), expected)
    assert comparison.actual == 50.0
    assert comparison.max_abs_difference > 1e5


def test_tolerances_of_the_call() -> None:
    assert not compare(torch.tensor([1.0]), torch.tensor([1.00001]), rtol=1e-7, atol=0.0).equal
    assert compare(torch.tensor([1.0]), torch.tensor([1.5]), rtol=0.0, atol=1.0).max_abs_difference == 0.5
    assert compare(torch.tensor([7]), torch.tensor([8]), atol=1).equal
    assert not compare(torch.tensor([7]), torch.tensor([9]), atol=1).equal
    assert not compare(torch.tensor([2**62 + 1]), torch.tensor([2**62]), atol=0.5).equal


@pytest.mark.parametrize("actual", [5.0, -INF, NAN])
def test_no_tolerance_takes_a_number_for_an_infinity(actual: float) -> None:
    assert not compare(torch.tensor([actual]), torch.tensor([INF]), rtol=1e-3, atol=1e-3).equal
    assert not compare(torch.tensor([INF]), torch.tensor([actual]), rtol=1e-3, atol=1e-3).equal
    assert compare(torch.tensor([INF]), torch.tensor([INF]), rtol=1e-3, atol=1e-3).max_abs_difference == 0.0


def test_large_tensors_are_measured_by_a_sample() -> None:
    expected = torch.randn(3000, 300, generator=torch.Generator().manual_seed(3))
    assert compare(expected + 1e-6, expected).equal
    comparison = compare(other(expected, 5, float(expected.view(-1)[5]) + 0.01), expected)
    assert comparison.index == (0, 5)
    sparse = torch.zeros(3000, 300)
    sparse[7] = expected[7]
    assert not compare(sparse * 1.001, sparse).equal


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(FINITE, min_size=1, max_size=40), st.data())
@settings(max_examples=300, deadline=None)
def test_operators_are_compared_as_torch_testing_does(values: list[float], data: st.DataObject) -> None:
    expected = torch.tensor(values)
    steps = data.draw(
        st.lists(st.sampled_from([0.0, 1e-6, -1e-6, 2e-5, 1.0]), min_size=len(values), max_size=len(values))
    )
    actual = expected * (1 + torch.tensor(steps)) + torch.tensor(steps) * 0.5
    try:
        assert_close(actual.double(), expected.double(), rtol=1.3e-6, atol=1e-5)
        equal = True
    except AssertionError:
        equal = False
    assert compare(actual, expected, scale=Scale.OPERATOR).equal == equal


@given(st.lists(FINITE, min_size=2, max_size=60), st.floats(1, 1e30))
@settings(max_examples=300, deadline=None)
def test_the_largest_element_is_no_part_of_the_tolerance(values: list[float], growth: float) -> None:
    """Growing it changes what is allowed for no other element."""
    expected = torch.tensor(values)
    largest = int(expected.abs().argmax())
    if int((expected.abs() == expected.abs().max()).sum()) > 1 or not float(expected.abs().max()):
        return  # several are the largest, or all are 0
    place = 0 if largest else 1
    if not float(expected[place]):
        return
    allowed = compare(other(expected, place, NAN), expected).allowed
    bound = torch.finfo(torch.float32).max
    grown = other(expected, largest, max(-bound, min(bound, float(expected[largest]) * growth)))
    if abs(float(grown[largest])) > float(expected[place].abs()):
        assert compare(other(grown, place, NAN), grown).allowed == allowed


@given(st.lists(st.one_of(FINITE, st.sampled_from([NAN, INF, -INF])), max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_a_tensor_equals_itself_and_the_order_of_elements_does_not_matter(values: list[float], random: Any) -> None:
    expected = torch.tensor(values)
    assert compare(expected.clone(), expected).equal
    wrong = expected * torch.where(torch.arange(len(values)) % 2 == 0, 1.0, 1.001)
    order = list(range(len(values)))
    random.shuffle(order)
    assert compare(wrong[order], expected[order]).count == compare(wrong, expected).count


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=10), st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_integers_are_equal_or_not(values: list[int], place: int) -> None:
    expected = torch.tensor(values)
    actual = expected.clone()
    actual[place % len(values)] ^= 1
    comparison = compare(actual, expected)
    assert (comparison.count, comparison.index) == (1, (place % len(values),))


def cancelling(x: torch.Tensor) -> torch.Tensor:
    """A sum that is nearly 0, of numbers of size 1000."""
    return (x * 1000).sum() - (x * 1000).flip(0).sum() + 1e-6


def slack_of(model: Any, x: torch.Tensor) -> list[torch.Tensor | None]:
    return rounding_slack(lambda m, leaves: [("out", m(*leaves))], model, [x])


def test_an_element_that_rounding_decides_may_differ_by_as_much() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (slack,) = slack_of(cancelling, x)
    assert slack is not None
    assert 1e-4 < float(slack) < 10
    assert compare(torch.tensor(2e-4), torch.tensor(1e-6), slack=slack).equal
    assert not compare(torch.tensor(30.0), torch.tensor(1e-6), slack=slack).equal


def test_well_conditioned_results_get_next_to_no_allowance() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 3)), torch.randn(4, 8)
    before = model[0].weight.detach().clone()
    (slack,) = slack_of(model, x)
    assert slack is not None
    assert 0 < float(slack.max()) < 1e-4
    assert torch.equal(model[0].weight, before)
    (outlier,) = slack_of(lambda y: torch.cat([y.sigmoid(), torch.full((1, 8), 1e6)]), x)
    assert outlier is not None
    assert float(outlier.max()) < 1e-4


@pytest.mark.parametrize(
    "model",
    [lambda x: x + torch.rand_like(x), lambda x: x.argmax(), lambda x: x.long()],
    ids=["random", "index", "integer"],
)
def test_random_and_integer_results_get_no_allowance(model: Any) -> None:
    assert slack_of(model, torch.randn(7)) == [None]


def test_a_model_that_fails_gets_no_allowance() -> None:
    assert slack_of(lambda x: x.view(3), torch.randn(7)) == []
