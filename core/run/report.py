"""What verification is asked, and its report: what a verifier of the hook ``onnxplug_verifier`` takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.kinds import check_flags, check_kind, check_lists, check_mappings, check_seeds


@dataclass(frozen=True)
class VerificationRequest:
    """The arguments of :meth:`onnxplug.OnnxProgram.verify`, which explains them.

    Raises:
        UsageError: One is malformed.
    """

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    rtol: float | None = None
    atol: float | None = None
    seeds: Sequence[int] = (0, 1, 2)
    intermediates: bool = False

    def __post_init__(self) -> None:
        check_flags(intermediates=self.intermediates)
        check_seeds(self.seeds)
        for name, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            check_kind(name, tolerance, (int, float, type(None)), "a number")
            if tolerance is not None and not tolerance >= 0:
                raise UsageError(f"{name}= takes a number of at least 0, got {tolerance!r}")
        check_lists(args=() if self.args is None else self.args)
        check_mappings(kwargs=self.kwargs)


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


#: Compares an ``OnnxProgram`` with PyTorch; raises a ``VerificationError`` where they differ.
Verifier = Callable[[Any, VerificationRequest], VerificationReport]
