"""Compares the outputs of a model with PyTorch's results, with regard to rounding and choices among equal elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any

import torch

from onnxplug import logs
from onnxplug.errors import VerificationError
from onnxplug.verification.choices import Ties
from onnxplug.verification.compare import Scale, compare
from onnxplug.verification.conditioning import Run, Slack, Widening, in_double, quantises, quantum_slack, slack_by_runs
from onnxplug.verification.differences import ComparedInputs
from onnxplug.verification.inputs import clone_leaves

_LOGGER = logs.logger("verify")


@dataclass(frozen=True)
class Tolerances:
    """The tolerances of a comparison: a scale's, or explicit tolerances.

    Attributes:
        scale: The scale.
        rtol, atol: Explicit tolerances.
        precision: The type that the model computes in, if it is narrower than PyTorch's: its tolerances hold.
    """

    scale: Scale = Scale.MODEL
    rtol: float | None = None
    atol: float | None = None
    precision: torch.dtype | None = None

    @property
    def measured(self) -> bool:
        """Whether slack for rounding is added."""
        return self.scale is Scale.MODEL and self.rtol is None and self.atol is None


MODEL = Tolerances()

#: Flattened inputs, and a function that runs the eager model on them, to PyTorch's results for ONNX's choices.
Replay = Callable[[Sequence[Any], Callable[[], Any]], Ties | None]


@dataclass(frozen=True)
class Outputs:
    """The results to compare for a set of inputs.

    Attributes:
        got: ONNX's outputs, by name.
        expected: PyTorch's result for each, in the same order.
        slack: How far rounding moves PyTorch's results, wider with each run.
        exact: Computes PyTorch's results in float64.
        ties: PyTorch's results for ONNX's choices among equal elements; ``None`` where the choices do not differ.
        quantised: Whether the captured program rounds to quanta.
    """

    got: Mapping[str, Any]
    expected: Sequence[tuple[str, Any]]
    slack: Iterable[Slack]
    exact: Callable[[], list[torch.Tensor | None]]
    ties: Callable[[], Ties | None] = lambda: None
    quantised: bool = False


def outputs_of(
    got: Mapping[str, Any],
    expected: Sequence[tuple[str, Any]],
    run: Run,
    model: Any,
    leaves: Sequence[Any],
    replay: Replay | None = None,
    program: torch.export.ExportedProgram | None = None,
    precision: torch.dtype | None = None,
) -> Outputs:
    """The results to compare; the eager model, or a captured program that rounds to quanta, runs again only where they differ."""
    if program is not None and quantises(program):
        return Outputs(
            got, expected, Widening(quantum_slack(run, program, leaves, got, expected)), list, quantised=True
        )
    slack = Widening(slack_by_runs(run, model, leaves, precision))
    exact = cache(lambda: in_double(run, model, leaves) if precision is None else [])

    @cache
    def ties() -> Ties | None:
        # A captured graph equals no model that draws random numbers, and its choices need not be recorded.
        if replay is None or not _is_model(dict(run(model, clone_leaves(leaves))), expected):
            return None
        return replay(leaves, lambda: run(model, clone_leaves(leaves)))

    return Outputs(got, expected, slack, exact, ties)


def compare_all(
    outputs: Outputs,
    tolerances: Tolerances,
    sizes: Mapping[str, int],
    seed: int | None,
    compared: ComparedInputs | None = None,
) -> tuple[float, int, bool]:
    """Compares outputs with PyTorch's; where one differs, compares all again with PyTorch's results for ONNX's choices.

    Returns:
        The largest difference, the number of elements that agree only within the slack of rounding, and whether the choices are
        ONNX's.

    Raises:
        VerificationError: An output differs, or their number does.
    """
    compared = compared if compared is not None else ComparedInputs(sizes, seed, "")
    try:
        return *_compare_each(outputs, tolerances, sizes, seed, compared), False
    except VerificationError:
        with_choices = _with_choices(outputs) if tolerances == MODEL else None
        if with_choices is None:
            raise
        again = compared.anew()
        try:
            worst, unstable = _compare_each(with_choices, tolerances, sizes, seed, again)
        except VerificationError as error:
            _LOGGER.debug("also different with ONNX's choices among equal elements: %s", error.message)
        else:
            compared.outputs = again.outputs
            return worst, unstable, True
        raise


def _with_choices(outputs: Outputs) -> Outputs | None:
    """The same with PyTorch's results for ONNX's choices; ``None`` without any, or where the captured graph is not the model."""
    ties = outputs.ties() if len(outputs.got) == len(outputs.expected) else None
    if ties is None:
        return None
    if any(_is_model(own, outputs.expected) for own in ties.own()):
        return replace(outputs, expected=[(name, ties.theirs[name]) for name, _ in outputs.expected])
    return None


def _is_model(results: Mapping[str, Any], expected: Sequence[tuple[str, Any]]) -> bool:
    """Whether results of the captured graph, by name, are the eager model's."""
    for name, wanted in expected:
        if name not in results:
            return False
        if isinstance(wanted, torch.Tensor):
            if not isinstance(results[name], torch.Tensor) or not compare(results[name], wanted).equal:
                return False
        elif results[name] != wanted:
            return False
    return True


def _compare_each(
    outputs: Outputs, tolerances: Tolerances, sizes: Mapping[str, int], seed: int | None, compared: ComparedInputs
) -> tuple[float, int]:
    got, expected, where = outputs.got, outputs.expected, where_text(sizes, seed)
    if len(got) != len(expected):
        names = ", ".join(name for name, _ in expected)
        raise VerificationError(
            f"the model has {len(got)} outputs ({', '.join(got)}), PyTorch {len(expected)} ({names}); {where}"
        )
    options: dict[str, Any] = {"scale": tolerances.scale, "rtol": tolerances.rtol, "atol": tolerances.atol}
    options |= {"measure": compared.measure, "precision": tolerances.precision}
    measured = tolerances.measured
    worst, unstable = 0.0, 0
    for index, ((name, actual), (_, wanted)) in enumerate(zip(got.items(), expected, strict=True)):
        comparison = compare(actual, wanted, **options)
        if measured and comparison.count and isinstance(actual, torch.Tensor) and _rounds(actual.dtype, outputs):
            unstable += comparison.count
            # The run in float64 comes first: each run for slack takes many times as long.
            exact = (outputs.exact() or [None] * len(got))[index]
            for known in chain([()], outputs.slack):
                comparison = compare(actual, wanted, **options, slack=known[index] if known else None, exact=exact)
                if comparison.equal:
                    break
        compared.add(name, actual, comparison)
        if not comparison.equal:
            again = f"verify(seed={seed}) draws these inputs again; " if seed is not None else ""
            hint = f"{again}verify(intermediates=True) tells whether a rule, a rewrite or ONNX Runtime is wrong; please report it."
            raise VerificationError(f"output {name!r} {comparison}; {where}", hint=hint)
        worst = max(worst, comparison.max_abs_difference)
    return worst, unstable


def _rounds(dtype: torch.dtype, outputs: Outputs) -> bool:
    """Whether rounding may change a result of this dtype: floating point, or the integers of a quantised tensor."""
    return dtype.is_floating_point or (outputs.quantised and dtype in (torch.uint8, torch.int8, torch.int32))


def size_text(sizes: Mapping[str, int]) -> str:
    """Sizes for a message."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "the exported sizes"


def where_text(sizes: Mapping[str, int], seed: int | None) -> str:
    return f"at {size_text(sizes)}, " + ("on the given inputs" if seed is None else f"seed {seed}")
