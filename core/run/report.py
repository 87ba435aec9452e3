"""What verification compared, and how far results are from PyTorch's, element by element; no tensor is kept.

Differences are counted only while something measures: verification itself needs the largest one alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class VerificationCase:
    """One set of inputs that both models ran on.

    Attributes:
        sizes: Size of each dynamic dimension.
        seed: Seed of the generated inputs; ``None`` for the export's own.
        max_abs_difference: Largest difference over all outputs.
        runtime: What ran the model.
        unstable: Number of elements that differ by more than the tolerance, and by no more than rounding of the inputs
            and weights changes them in PyTorch itself, or by no more than PyTorch's own result is from that in float64.
        ties: Whether the results are those that PyTorch has where it chooses, among equal elements, as ONNX did (topk, sort …).
    """

    sizes: Mapping[str, int]
    seed: int | None
    max_abs_difference: float
    runtime: str
    unstable: int = 0
    ties: bool = False


@dataclass
class VerificationReport:
    """What verification compared.

    Attributes:
        cases: The sets of inputs on which both agree.
        skipped: Sizes that were drawn and that eager PyTorch itself rejects, with its reason; others were drawn instead.
        intermediates: The ``onnxplug_tools.diagnosis.verdict.Verdict`` on the first of these sets, with ``intermediates=True``.
    """

    cases: list[VerificationCase] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    intermediates: Any = None

    @property
    def max_abs_difference(self) -> float:
        """Largest difference over all cases."""
        return max((case.max_abs_difference for case in self.cases), default=0.0)


# -- differences -------------------------------------------------------------------------------------------------------

#: The powers of ten at which the bins of a histogram begin and end; one bin more lies before the first, and one after the last.
DECADES = tuple(range(-8, 5))


@dataclass
class Histogram:
    """Differences of elements, each in units of the element's own tolerance: 1 is what is just accepted.

    Attributes:
        equal: Number of elements that are the same.
        counts: Number of elements that differ, by decade: less than 1e-8 of the tolerance, 1e-8 to 1e-7, …, 1e4 and more.
        not_finite: Number of elements that are NaN or infinite in one result and something else in the other.
    """

    equal: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * (len(DECADES) + 1))
    not_finite: int = 0

    @classmethod
    def of(cls, difference: torch.Tensor, allowed: torch.Tensor, same: torch.Tensor) -> Histogram:
        """The histogram of one comparison.

        Args:
            difference: ``|ONNX - PyTorch|`` of each element.
            allowed: Its tolerance.
            same: Whether both are equal.
        """
        differing = ~same
        finite = differing & difference.isfinite()
        edges = torch.tensor([10.0**power for power in DECADES], dtype=torch.float64)
        # A tolerance of 0 gives an infinity, which lies beyond the last edge.
        bins = torch.bucketize(difference[finite] / allowed.expand_as(difference)[finite], edges, right=True)
        counts = torch.bincount(bins, minlength=len(DECADES) + 1).tolist()
        return cls(int(same.sum()), counts, int(differing.sum()) - int(finite.sum()))

    @property
    def total(self) -> int:
        """Number of all elements."""
        return self.equal + sum(self.counts) + self.not_finite

    def add(self, other: Histogram) -> None:
        """Adds another one's numbers."""
        self.equal += other.equal
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.not_finite += other.not_finite


@dataclass(frozen=True)
class OutputDifference:
    """How one output compares.

    Attributes:
        name: The output.
        dtype: Its dtype in PyTorch.
        elements: How many it has.
        max_abs_difference: Largest difference of two finite elements.
        beyond: Number of elements that differ by more than the tolerance.
        histogram: The differences; ``None`` where dtype or shape differ.
        problem: What differs, in words; empty where the output is accepted.
    """

    name: str
    dtype: str
    elements: int
    max_abs_difference: float
    beyond: int
    histogram: Histogram | None
    problem: str = ""


@dataclass
class CaseDifference:
    """One set of inputs that was compared.

    Attributes:
        sizes: Size of each dynamic dimension.
        seed: Seed of the generated inputs; ``None`` for those that were given.
        runtime: What ran the model.
        outputs: Its outputs; those after the first that is not accepted are not compared.
    """

    sizes: Mapping[str, int]
    seed: int | None
    runtime: str
    outputs: list[OutputDifference] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Whether no output is outside of its tolerance."""
        return not any(output.problem for output in self.outputs)


_measured: ContextVar[list[CaseDifference] | None] = ContextVar("onnxplug_differences", default=None)


@contextlib.contextmanager
def measuring() -> Iterator[list[CaseDifference]]:
    """The sets of inputs that are compared while the context lasts; one that fails is among them."""
    cases: list[CaseDifference] = []
    token = _measured.set(cases)
    try:
        yield cases
    finally:
        _measured.reset(token)


def begin_case(sizes: Mapping[str, int], seed: int | None, runtime: str) -> None:
    """Notes that a set of inputs is compared, where something measures."""
    cases = _measured.get()
    if cases is not None:
        cases.append(CaseDifference(dict(sizes), seed, runtime))


def open_case() -> CaseDifference | None:
    """The set of inputs at work; ``None`` where nothing measures."""
    cases = _measured.get()
    return cases[-1] if cases else None
