"""Two models run on the same inputs, and their values compared one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from onnxplug.build.dtypes import to_torch
from onnxplug.errors import OnnxplugError
from onnxplug.host import RuntimeHost
from onnxplug.text import counted
from onnxplug.verification.compare import Comparison, compare
from onnxplug.verification.runs import Runs
from onnxplug_tools.inspection.diff import corresponding
from onnxplug_tools.inspection.feeds import OTHER_INPUTS, feed_of_other, make_feed
from onnxplug_tools.inspection.view import view_with_model

#: The most values that are asked for in one run; each is held until it is compared.
_AT_ONCE = 300


@dataclass(frozen=True, slots=True)
class Compared:
    """A value of both models; a sequence's elements and a map's values are compared one by one and counted together.

    Attributes:
        before, after: Its name in each model.
        module, operator: Module and operator of the first model's node; empty for a value that no node computes.
        largest: The largest difference of two finite elements.
        count, total: Number of elements that differ by more than the tolerance, and of all elements.
    """

    before: str
    after: str
    module: str
    operator: str
    equal: bool
    text: str
    largest: float
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class Runtimes:
    """The comparison of the values of two models.

    Attributes:
        sizes: Sizes of dynamic dimensions by name.
        assumed: Names of the dimensions without a given size: they are 1.
        unmatched: Outputs of one model alone, by name.
        values: The values of corresponding nodes, in the first model's order; empty where they weren't asked for.
        alone: Number of values of the first model that correspond to none of the second.
        problem: The reason why values within the models could not be compared; ``None`` where they were compared, or
            were not asked for.
    """

    inputs: dict[str, str]
    sizes: dict[str, int]
    assumed: tuple[str, ...]
    outputs: tuple[Compared, ...]
    unmatched: tuple[str, ...]
    values: tuple[Compared, ...]
    alone: int
    problem: str | None = None

    @property
    def equal(self) -> bool:
        """Whether the outputs agree."""
        return not self.unmatched and all(output.equal for output in self.outputs)

    @property
    def first(self) -> Compared | None:
        """The first value within the models that differs; ``None`` where none does."""
        return next((value for value in self.values if not value.equal), None)


def compare_runs(
    before: ir.Model,
    after: ir.Model,
    *,
    given: Sequence[tuple[str | None, Any]] = (),
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    intermediates: bool = True,
    host: RuntimeHost | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Runtimes:
    """Runs two models by ONNX Runtime on the same inputs.

    The outputs are compared in runs of the unchanged models. For values within the models, these values are made
    outputs, so that ONNX Runtime fuses less: a difference that only its fusion makes shows in the outputs alone.

    Args:
        given, sizes, seed: Inputs, sizes of dynamic dimensions, and the seed of generated inputs
            (:func:`onnxplug_tools.inspection.feeds.make_feed`).
        rtol, atol: Tolerances instead of those of ``onnxplug.verification.compare``.
        intermediates: Also compare the values of corresponding nodes.
        host: The plugins whose libraries run custom operators; all that are installed when ``None``.
        progress: Called with the name of each step as it begins.
    """
    feed = make_feed(before, given, sizes, seed)
    feed_of_other(after, feed, "the second model")
    runs = Runs(before, host, feed.values), Runs(after, host, feed.values)
    progress("running the models")
    results = [
        {**_lists(run, which), **_computed(run, (), which)}
        for run, which in zip(runs, ("first", "second"), strict=True)
    ]
    pairs, unmatched = _outputs(before, after)
    seen = view_with_model(before)

    def compared(value: ir.Value, name: str, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> Compared | None:
        """``None`` where a model does not have the value: it is a constant."""
        if str(value.name) not in expected or name not in actual:
            return None
        node = value.producer()
        origin = seen.nodes.get(node) if node is not None else None
        module, operator = ("", "") if origin is None else (origin.module, origin.operator)
        outcome = _outcome(expected[str(value.name)], actual[name], rtol, atol)
        return Compared(str(value.name), name, module, operator, *outcome)

    outputs = [compared(value, name, *results) for value, name in pairs]
    values: list[Compared | None] = []
    alone, problem = 0, None
    if intermediates:
        progress("comparing values within")
        one_producer = before.producer_name == after.producer_name
        matched = corresponding(before, after)
        named = [(value, str(other.name)) for value, other in matched.items()]
        alone = sum(1 for node in before.graph for v in node.outputs if v.name and v not in matched and v.uses())
        try:
            for start in range(0, len(named), _AT_ONCE):
                chunk = named[start : start + _AT_ONCE]
                expected = _computed(runs[0], [str(value.name) for value, _ in chunk], "first")
                actual = _computed(runs[1], [name for _, name in chunk], "second")
                for value, name in chunk:
                    if one_producer or _same_shape(expected.get(str(value.name)), actual.get(name)):
                        values.append(compared(value, name, expected, actual))
                    else:  # two exporters' nodes that only looked alike
                        alone += 1
        except OnnxplugError as error:  # the outputs are compared all the same
            problem = error.message
    return Runtimes(
        feed.texts,
        feed.sizes,
        feed.assumed,
        tuple(output for output in outputs if output is not None),
        tuple(unmatched),
        tuple(value for value in values if value is not None),
        alone,
        problem,
    )


def _computed(runs: Runs, names: Sequence[str], which: str) -> dict[str, torch.Tensor]:
    with _running(which, " with the values within it as outputs" if names else ""):
        return runs.computed(names)


def _lists(runs: Runs, which: str) -> dict[str, Any]:
    """The outputs that are no tensors."""
    if all(isinstance(value.type, ir.TensorType) for value in runs.model.graph.outputs):
        return {}
    with _running(which):
        return runs.lists()


@contextlib.contextmanager
def _running(which: str, within: str = "") -> Iterator[None]:
    try:
        yield
    except OnnxplugError:
        raise
    except Exception as error:
        raise OnnxplugError(
            f"ONNX Runtime can't run the {which} model{within}: {error}",
            hint=OTHER_INPUTS,
        ) from error


def _same_shape(expected: torch.Tensor | None, actual: torch.Tensor | None) -> bool:
    return expected is not None and actual is not None and expected.shape == actual.shape


def _outputs(before: ir.Model, after: ir.Model) -> tuple[list[tuple[ir.Value, str]], list[str]]:
    """Pairs of outputs, by name and else by their order; and the outputs of one model alone."""
    theirs = [str(value.name) for value in after.graph.outputs]
    free = [name for name in theirs if name not in {value.name for value in before.graph.outputs}]
    pairs: list[tuple[ir.Value, str]] = []
    alone = []
    for value in before.graph.outputs:
        if value.name in theirs:
            pairs.append((value, str(value.name)))
        elif free:
            pairs.append((value, free.pop(0)))
        else:
            alone.append(str(value.name))
    return pairs, [*alone, *free]


def _outcome(first: Any, second: Any, rtol: float | None, atol: float | None) -> tuple[bool, str, float, int, int]:
    """Whether two values agree, in words too; the largest difference, and the elements that differ, and all."""
    parts, others = dict(_parts(first)), dict(_parts(second))
    if parts.keys() != others.keys() or (first is None) != (second is None):
        return False, f"{_kind(first)}, then {_kind(second)}", 0.0, 0, 0
    equal, text, largest, count, total = True, "agrees", 0.0, 0, 0
    for label, part in parts.items():
        by = compare(others[label], part, rtol=rtol, atol=atol)
        if equal and not by.equal:
            equal, text = False, f"{label}{': ' if label else ''}{_text(by, part, others[label])}"
        largest, count, total = max(largest, by.max_abs_difference), count + by.count, total + by.total
    return equal, text, largest, count, total


def _parts(value: Any, label: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors in a value, with their places: of a sequence the elements, of a map the values, of an absent optional none."""
    if isinstance(value, list | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _parts(item, f"{label}[{key!r}]")
    elif value is not None:
        yield label, value if isinstance(value, torch.Tensor) else to_torch(np.asarray(value))


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return f"a sequence of {counted(len(value), 'element')}"
    if isinstance(value, dict):
        return f"a map of {counted(len(value), 'key')}"
    return "nothing" if value is None else "a tensor"


def _text(comparison: Comparison, expected: torch.Tensor, actual: torch.Tensor) -> str:
    if comparison.problem:
        kinds = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (expected, actual)]
        return f"{kinds[0]}, then {kinds[1]}"
    if comparison.equal:
        return "agrees"
    return (
        f"at {list(comparison.index or ())}: {comparison.expected!r}, then {comparison.actual!r}, "
        f"tolerance {comparison.allowed:.3g}; {comparison.count:,} of {comparison.total:,} elements differ"
    )
