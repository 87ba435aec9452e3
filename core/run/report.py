"""What verification compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


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
        quantised: What quantising did to the model afterwards (``program.precision``), where the model before it was compared.
    """

    cases: list[VerificationCase] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    intermediates: Any = None
    quantised: Any = None

    @property
    def max_abs_difference(self) -> float:
        """Largest difference over all cases."""
        return max((case.max_abs_difference for case in self.cases), default=0.0)

    @property
    def about_quantising(self) -> str | None:
        """That another model than the quantised one was compared, and how far quantising moved results; ``None`` elsewhere."""
        if self.quantised is None:
            return None
        moved = [f"output {accuracy}" for accuracy in self.quantised.accuracy] or ["no output is in floating point"]
        return "\n".join(
            [
                f"compared is the model before quantising, not the quantised one ({self.quantised.kind}); how far that is from the "
                "model before quantising, on the example inputs and the data of calibrate=:",
                *moved,
            ]
        )

    def __str__(self) -> str:
        lines = [
            f"{', '.join(f'{name}={size}' for name, size in case.sizes.items()) or 'static sizes'}, "
            f"{'the inputs of the export' if case.seed is None else f'seed {case.seed}'}: "
            f"largest difference {case.max_abs_difference:.1e} ({case.runtime})"
            for case in self.cases
        ]
        lines += [f"skipped: {reason}" for reason in self.skipped]
        return "\n".join([*lines, *filter(None, [self.about_quantising])])


#: What takes each set of inputs that is compared, and the differences of its outputs element by element; nothing by default.
MEASURED: ContextVar[Any] = ContextVar("onnxplug_differences", default=None)


def begin_case(sizes: Mapping[str, int], seed: int | None, runtime: str) -> None:
    """Tells that a set of inputs is compared, where something measures."""
    if (measured := MEASURED.get()) is not None:
        measured.begin(sizes, seed, runtime)


def drop_case() -> None:
    """Tells that the set of inputs at work shows nothing, and is no part of the report."""
    if (measured := MEASURED.get()) is not None:
        measured.drop()


def open_case() -> Any:
    """The set of inputs at work, of what measures; ``None`` where nothing does."""
    measured = MEASURED.get()
    return measured.case if measured is not None else None
