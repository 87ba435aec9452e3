"""The report of verification."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class VerificationCase:
    """A set of inputs that both models ran on.

    Attributes:
        sizes: Size of each dynamic dimension.
        seed: Seed of the generated inputs; ``None`` for the export's own.
        max_abs_difference: Largest difference over all outputs.
        runtime: The runtime or evaluator that ran the model.
        unstable: Number of elements that differ by more than the tolerance, but by no more than rounding of the inputs
            and weights changes them in PyTorch itself, or than PyTorch's own result is from its result in float64.
        ties: Whether PyTorch's results were computed with ONNX's choices among equal elements (topk, sort …).
    """

    sizes: Mapping[str, int]
    seed: int | None
    max_abs_difference: float
    runtime: str
    unstable: int = 0
    ties: bool = False


@dataclass
class VerificationReport:
    """The report of verification.

    Attributes:
        cases: The sets of inputs on which both agree.
        skipped: Drawn sizes that eager PyTorch itself rejects, with its reason; other sizes were drawn instead.
        intermediates: The ``onnxplug_tools.diagnosis.verdict.Verdict`` on the first of these sets, with ``intermediates=True``.
        quantised: The later effect of quantising the model (``program.precision``), where the model before quantising was compared.
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
        """A note that the model before quantising was compared, and how far quantising moved results; else ``None``."""
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


#: Receives each compared set of inputs, and the differences of its outputs element by element; nothing by default.
MEASURED: ContextVar[Any] = ContextVar("onnxplug_differences", default=None)


def begin_case(sizes: Mapping[str, int], seed: int | None, runtime: str) -> None:
    """Tells the measuring object that a set of inputs is compared."""
    if (measured := MEASURED.get()) is not None:
        measured.begin(sizes, seed, runtime)


def drop_case() -> None:
    """Tells the measuring object that the present set of inputs proves nothing, and is not in the report."""
    if (measured := MEASURED.get()) is not None:
        measured.drop()


def open_case() -> Any:
    """The measuring object's record of the present set of inputs; ``None`` where nothing measures."""
    measured = MEASURED.get()
    return measured.case if measured is not None else None
