"""How far results are from PyTorch's, element by element, counted while they are compared; no tensor is kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from onnxplug.verification.differences import ComparedInputs

#: The powers of ten at which the bins of a histogram begin and end; one bin more lies before the first, and one after the last.
DECADES = tuple(range(-8, 5))


@dataclass
class Histogram:
    """Differences of elements, each in units of the element's own tolerance: 1 is the largest accepted difference.

    Attributes:
        counts: Number of elements that differ, by decade: at most 1e-8 of the tolerance, 1e-8 to 1e-7, …, more than 1e4. A
            difference at an edge belongs to the bin before it, as a difference of the tolerance itself is accepted.
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
        """
        differing = ~same
        finite = differing & difference.isfinite()
        edges = torch.tensor([10.0**power for power in DECADES], dtype=torch.float64)
        # A tolerance of 0 gives an infinity, which lies beyond the last edge.
        bins = torch.bucketize(difference[finite] / allowed.expand_as(difference)[finite], edges)
        counts = torch.bincount(bins, minlength=len(DECADES) + 1).tolist()
        return cls(int(same.sum()), counts, int(differing.sum()) - int(finite.sum()))

    @property
    def total(self) -> int:
        """Number of all elements."""
        return self.equal + sum(self.counts) + self.not_finite

    def bars(self) -> list[tuple[str, int]]:
        """Its bins in words, each with the number of its elements."""
        between = [f"1e{low} to 1e{low + 1}" for low in DECADES[:-1]]
        labels = [f"at most 1e{DECADES[0]}", *between, f"more than 1e{DECADES[-1]}"]
        counted = zip(labels, self.counts, strict=True)
        return [("the same", self.equal), *counted, ("NaN or infinite in one alone", self.not_finite)]

    def add(self, other: Histogram) -> None:
        """Adds the numbers of another histogram."""
        self.equal += other.equal
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.not_finite += other.not_finite


@dataclass(frozen=True)
class OutputDifference:
    """The comparison of one output.

    Attributes:
        max_abs_difference: Largest difference of two finite elements.
        beyond: Number of elements that differ by more than the tolerance.
        histogram: The differences; ``None`` where dtype or shape differ.
        problem: The difference in words; empty where the output is accepted.
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
        seed: Seed of the generated inputs; ``None`` for given inputs.
        outputs: The outputs that were compared: up to the first that is not accepted.
    """

    sizes: Mapping[str, int]
    seed: int | None
    runtime: str
    outputs: list[OutputDifference] = field(default_factory=list)

    @classmethod
    def of(cls, inputs: ComparedInputs) -> CaseDifference:
        """The differences of a set of inputs that verification compared."""
        outputs = [
            OutputDifference(
                output.name,
                output.dtype,
                output.elements,
                output.comparison.max_abs_difference,
                output.comparison.count if output.dtype != "string" else int(not output.comparison.equal),
                output.comparison.histogram,
                "" if output.comparison.equal else str(output.comparison),
            )
            for output in inputs.outputs
        ]
        return cls(inputs.sizes, inputs.seed, inputs.runtime, outputs)

    @property
    def accepted(self) -> bool:
        """Whether no output is outside of its tolerance."""
        return not any(output.problem for output in self.outputs)
