"""How far results are from PyTorch's, counted while they are compared."""

from __future__ import annotations

import math

import pytest
import torch
from onnxplug_tools.report.differences import DECADES, CaseDifference, Histogram

import onnxplug
from onnxplug.verification.compare import compare
from onnxplug.verification.differences import ComparedInputs, DifferenceObserver


def test_decades_in_units_of_the_tolerance() -> None:
    expected = torch.zeros(8)
    allowed = 0.5
    multiples = [0.0, 1e-9, 3e-8, 0.3, 1.0, 30.0, 1e6, math.nan]
    actual = torch.tensor(multiples, dtype=torch.float64) * allowed
    comparison = compare(actual, expected.double(), rtol=0.0, atol=allowed, measure=Histogram.of).histogram
    assert comparison is not None
    assert comparison.equal == 1
    assert comparison.not_finite == 1
    counted = {low: count for low, count in zip([-math.inf, *DECADES], comparison.counts, strict=True) if count}
    assert counted == {-math.inf: 1, -8: 1, -1: 2, 1: 1, 4: 1}
    assert comparison.total == 8


def test_a_difference_of_the_tolerance_is_accepted() -> None:
    allowed = torch.tensor([0.5, 0.1, 3e-5, 1e300], dtype=torch.float64)
    zeros, nothing = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.bool)
    comparison = compare(
        torch.tensor([0.5]), torch.tensor([0.0]), rtol=0.0, atol=float(allowed[0]), measure=Histogram.of
    )
    assert comparison.equal
    assert dict(comparison.histogram.bars())["1e-1 to 1e0"] == 1
    assert dict(Histogram.of(allowed, allowed, nothing).bars())["1e-1 to 1e0"] == 4
    more = torch.nextafter(allowed, zeros + torch.inf)
    assert dict(Histogram.of(more, allowed, nothing).bars())["1e0 to 1e1"] == 4
    assert [label for label, _ in Histogram().bars()[1:-1:13]] == ["at most 1e-8", "more than 1e4"]


def test_elements_beyond_the_tolerance_are_those_refused() -> None:
    generator = torch.Generator().manual_seed(1)
    expected = torch.randn(4000, generator=generator)
    actual = expected + torch.randn(4000, generator=generator) * expected.abs() * 1e-4
    comparison = compare(actual, expected, measure=Histogram.of)
    assert comparison.histogram is not None
    beyond = sum(comparison.histogram.counts[DECADES.index(0) + 1 :])
    assert 0 < comparison.count == beyond < 4000


@pytest.mark.parametrize(
    ("actual", "expected", "equal", "beyond", "not_finite"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 5]), 2, 1, 0),  # no tolerance: beyond all
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1, 0),
        (torch.tensor([math.inf, math.nan]), torch.tensor([math.inf, math.nan]), 2, 0, 0),
        (torch.tensor([math.inf, 1.0]), torch.tensor([-math.inf, math.nan]), 0, 0, 2),
        (torch.zeros(0), torch.zeros(0), 0, 0, 0),
        (torch.tensor(2.0), torch.tensor(2.0), 1, 0, 0),
        (torch.ones(2, 2), torch.ones(2, dtype=torch.complex64) * (1 + 1j), 4, 0, 0),
    ],
    ids=["integers", "bools", "same specials", "other specials", "empty", "scalar", "complex"],
)
def test_dtypes(actual: torch.Tensor, expected: torch.Tensor, equal: int, beyond: int, not_finite: int) -> None:
    comparison = compare(actual, expected, measure=Histogram.of).histogram
    assert comparison is not None
    assert (comparison.equal, comparison.counts[-1], comparison.not_finite) == (equal, beyond, not_finite)
    assert comparison.total == actual.numel()


def test_other_shapes_have_no_histogram_and_nothing_is_counted_unasked() -> None:
    assert compare(torch.zeros(2), torch.zeros(3), measure=Histogram.of).histogram is None
    assert compare(torch.zeros(2), torch.zeros(2)).histogram is None


def test_histograms_add_up() -> None:
    together = Histogram(1, [1] * 14, 2)
    together.add(Histogram(2, [2] * 14, 3))
    assert (together.equal, together.counts, together.not_finite) == (3, [3] * 14, 5)


class Cases(DifferenceObserver):
    """Keeps the comparisons of verification, while it ``measures``."""

    def __init__(self) -> None:
        self.measures = True
        self.cases: list[CaseDifference] = []

    def measure(self, difference: torch.Tensor, allowed: torch.Tensor, same: torch.Tensor) -> Histogram:
        return Histogram.of(difference, allowed, same)

    def compared(self, inputs: ComparedInputs) -> None:
        self.cases.append(CaseDifference.of(inputs))


def test_cases_of_a_verification() -> None:
    observer = Cases()
    program = onnxplug.to_onnx(
        torch.nn.Linear(3, 2), (torch.randn(2, 3),), dynamic_shapes=({0: "batch"},), observers=[observer]
    )
    program.verify()
    assert [case.seed for case in observer.cases] == [None, 0, 1, 2]
    assert observer.cases[0].sizes == {"batch": 2}
    for case in observer.cases:
        (output,) = case.outputs
        assert output.histogram is not None
        assert output.elements == output.histogram.total == 2 * case.sizes["batch"]
        assert case.accepted
        assert case.runtime == "onnxruntime"
    observer.measures = False
    program.verify()
    assert len(observer.cases) == 4  # nothing measures any more
