"""How far rounding alone changes PyTorch's own results: it decides about elements that cancellation leaves uncertain.

It is measured in two ways: by the same model on inputs and weights that differ in the last place, and in float64. The model's
choices stay as they are: another choice changes results by any amount, and proves nothing about rounding. For a quantised model
it is measured on the captured program, with numbers moved before they are quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnxplug import logs
from onnxplug.capture.signature import FunctionalGraph
from onnxplug.torch_private import TorchDispatchMode, pytree
from onnxplug.verification.eager import copied, run_graph
from onnxplug.verification.inputs import clone_leaves
from onnxplug.verification.kernels import moved_apart
from onnxplug.verification.repetition import WIDE, Repetition

_LOGGER = logs.logger("verify")

#: How often inputs and weights are changed by one unit of rounding.
_RUNS = 3

#: A network rounds at each layer, not only its inputs: the factor by which results may differ more.
_FACTOR = 16

#: How many times their measured distance the kernels of an operator may be apart.
_KERNELS = 2

#: How far inputs and weights are moved, once each, to see which operators jump.
_UNITS_OF_JUMPS = (1, 2, 4, 8)

Run = Callable[[Any, list[Any]], list[tuple[str, Any]]]
#: A tensor of doubles of each result's shape; ``None`` where the result is not a floating-point tensor, or where nothing is known
#: of it because two runs on the same inputs differ. Empty where a run fails: nothing is known of any result.
Slack = list[torch.Tensor | None]


class Widening:
    """Slack that further runs widen. Iterating begins with the slack that is known, and runs no more than the caller asks for.

    Args:
        measured: The slack after each run; none is narrower than the one before.
    """

    def __init__(self, measured: Iterator[Slack]) -> None:
        self._measured = measured
        self._known: Slack | None = None

    def __iter__(self) -> Iterator[Slack]:
        if self._known is not None:
            yield self._known
        for slack in self._measured:
            self._known = slack
            yield slack


def slack_by_runs(
    run: Run,
    model: Any,
    leaves: Sequence[Any],
    precision: torch.dtype | None = None,
    same_choices: bool = True,
    each: bool = False,
    runs: int = _RUNS,
) -> Iterator[Slack]:
    """How far rounding may change each element of each result, measured on the eager model itself.

    The model runs again with each floating-point input and weight changed by one unit of rounding, up or down at random. The
    change of an element is its uncertainty: large for a sum of large numbers that nearly cancel, small for an ordinary element,
    and too small to excuse a model that computes something else altogether. In further runs the results of operators whose kernels
    are farther apart (:mod:`onnxplug.verification.kernels`) are moved, and nothing else. Indices, masks, branches and integers are
    those of the first run: a choice that rounding flips gives no slack, :mod:`onnxplug.verification.choices` judges it.

    Args:
        run: Runs a model on flattened inputs, which it may write, and gives its results by name.
        model: The eager model; weights are moved where it is a module, in a copy.
        leaves: The flattened inputs.
        precision: The type whose units of rounding these are; that of each tensor when ``None``.
        same_choices: Keep the choices of the first run. Without it a flipped one counts as rounding.
        each: Change the result of each operator too, in the runs that keep choices.
        runs: How many, besides those for kernels.

    Yields:
        The slack after each run. A run takes several times as long as the model: whoever has enough stops.
    """
    try:
        with _undisturbed():
            once, again = (_results(run, model, clone_leaves(leaves)) for _ in range(2))
        slack = _steady(once, again)
        if all(zeros is None for zeros in slack):  # random numbers, or no floating-point result
            yield slack
            return
        repetition, copied, cloned = Repetition(), _new(model), clone_leaves(leaves)
        with _undisturbed(), repetition:
            first = _results(run, copied, cloned)
        slack = _steady(first, again)
        for seed in range(runs):
            generator = torch.Generator().manual_seed(seed)
            moved_model = _moved_model(model, generator, precision)
            moved_leaves = [_moved(x, generator, precision) for x in leaves]
            move = partial(_moved, generator=generator, precision=precision)
            with _undisturbed(), repetition.again(move, each) if same_choices else nullcontext():
                moved = _results(run, moved_model, moved_leaves)
            slack = _widened(slack, first, moved, _FACTOR)
            yield slack
        for up in (True, False, torch.Generator().manual_seed(runs)) if same_choices and repetition.kernels else ():
            copied, cloned = _new(model), clone_leaves(leaves)
            with _undisturbed(), repetition.again(apart=partial(moved_apart, up=up)):
                moved = _results(run, copied, cloned)
            slack = _widened(slack, first, moved, _KERNELS)
            yield slack
    except Exception as error:
        _LOGGER.debug("how far rounding moves the results is unknown: %s: %s", type(error).__name__, error)
        yield []


def rounding_slack(run: Run, model: Any, leaves: Sequence[Any]) -> Slack:
    """The slack of all runs of :func:`slack_by_runs`, with its defaults."""
    *_, slack = slack_by_runs(run, model, leaves)
    return slack


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers are drawn apart, and torch.cond and its like don't compile: the modes here would disturb later calls too."""
    with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
        yield


def _widened(slack: Slack, first: Slack, moved: Slack, factor: float) -> Slack:
    """Slack that is at least as large as some times the changes of another run."""
    return [
        known.maximum(torch.nan_to_num((x - y).abs(), nan=0.0, posinf=0.0) * factor)
        if known is not None and x is not None and y is not None and x.shape == y.shape
        else known
        for known, x, y in zip(slack, first, moved, strict=True)
    ]


def jumping(functional: FunctionalGraph, values: Mapping[torch.fx.Node, Any]) -> set[torch.fx.Node]:
    """The operators of a captured graph whose results jump where inputs and weights move by some units of rounding.

    Args:
        functional: The graph.
        values: The values of its placeholders.
    """
    jumping_nodes: set[torch.fx.Node] = set()
    repetition = Repetition()

    def visit(node: torch.fx.Node, inputs: Sequence[Any], result: Any) -> Any:
        if repetition.jumped:
            jumping_nodes.add(node)
        repetition.jumped = False
        return result

    try:
        with torch.random.fork_rng(devices=[]), repetition:
            run_graph(functional, values, lambda node, inputs, result: result)
        for seed, units in enumerate(_UNITS_OF_JUMPS):
            generator = torch.Generator().manual_seed(seed)
            moved = {node: _moved(x, generator, units=units) for node, x in values.items()}
            with torch.random.fork_rng(devices=[]), repetition.again(partial(_moved, generator=generator, units=units)):
                run_graph(functional, moved, visit)
    except Exception:  # two runs differ, or one fails
        return set()
    return jumping_nodes


def in_double(run: Run, model: Any, leaves: Sequence[Any]) -> list[torch.Tensor | None]:
    """The results of the eager model in float64: weights, inputs and tensors that its code makes.

    Args:
        run, model, leaves: As for :func:`slack_by_runs`. The code's casts to a narrower dtype are casts to float64.

    Returns:
        A tensor of doubles for each result, ``None`` for other results than floating-point tensors; empty where the model does not
        run in float64.
    """
    try:
        wide = copied(model).double() if isinstance(model, torch.nn.Module) else model
        with torch.random.fork_rng(devices=[]), _Wide():
            return _results(run, wide, [_doubled(leaf) for leaf in leaves])
    except Exception:
        return []


_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class _Wide(TorchFunctionMode):
    """Calls that name a dtype narrower than float64 mean float64, and a narrower result is cast.

    ``torch.set_default_dtype`` would hold in all threads.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        named = {k: WIDE.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        called: Any = torch.Tensor.double if func in _CASTS else func
        return pytree.tree_map_only(torch.Tensor, _widened_result, called(*wide, **named))


def _widened_result(x: torch.Tensor) -> torch.Tensor:
    return x.to(WIDE[x.dtype]) if x.dtype in WIDE else x


def _doubled(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    return leaf.to(torch.complex128 if leaf.is_complex() else torch.float64, copy=True)


def _results(run: Run, model: Any, leaves: list[Any]) -> list[torch.Tensor | None]:
    results: list[torch.Tensor | None] = []
    for _, value in run(model, leaves):
        if isinstance(value, torch.Tensor) and value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        real = isinstance(value, torch.Tensor) and value.is_floating_point()
        results.append(value.detach().cpu().double().clone() if real else None)
    return results


def _steady(first: list[torch.Tensor | None], again: list[torch.Tensor | None]) -> Slack:
    """Zeros for each result that is the same in both runs, and ``None`` for the others."""
    return [
        torch.zeros(x.shape, dtype=torch.float64) if x is not None and y is not None and _same(x, y) else None
        for x, y in zip(first, again, strict=True)
    ]


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _new(model: Any) -> Any:
    """A copy of a model that shares its tensors: like a moved model, it has no results that code keeps by the object.

    A method under ``functools.lru_cache`` calls operators for each new module, and none for one that it knows.
    """
    if not isinstance(model, torch.nn.Module):
        return model
    return copied(model, with_tensors=False)


def _moved_model(model: Any, generator: torch.Generator, precision: torch.dtype | None) -> Any:
    if not isinstance(model, torch.nn.Module):
        return model
    moved = copied(model)
    with torch.no_grad():
        for tensor in (*moved.parameters(), *moved.buffers()):
            tensor.copy_(_moved(tensor, generator, precision))
    return moved


def _moved(value: Any, generator: torch.Generator, precision: torch.dtype | None = None, units: float = 1) -> Any:
    """Each element moved by some units of rounding."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        parts = torch.view_as_real(value.resolve_conj())
        return torch.view_as_complex(_moved(parts, generator, precision, units))
    if not value.is_floating_point():
        return value.clone()
    signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device, torch.float64) * 2 - 1
    moved = value.double() * (1 + signs * units * torch.finfo(precision or value.dtype).eps)
    most = torch.finfo(value.dtype).max
    return torch.where(value.isfinite(), moved.clamp(-most, most), value.double()).to(value.dtype)


# -- quantised models --------------------------------------------------------------------------------------------------
#
# Numbers near the middle between two quanta go either way: PyTorch's kernels and ONNX Runtime's round the same sums in other orders
# and a bias to other integers. Where that flips one number by a quantum, later layers flip more, and a deep network ends some
# quanta off. Neither result is wrong.

#: How far numbers are moved before they are rounded, in quanta, and how often.
_STEP, _QUANTUM_RUNS = 1 / 256, 4
#: The step that surely flips some numbers, for results too small for the other step.
_LARGE_STEP = 1 / 4
#: By how much the difference of one element may exceed the largest measured, and its root mean square that of all.
_MOST, _MOST_ON_AVERAGE = 1.5, 2.0

_QUANTISERS = frozenset(
    {
        "quantized_decomposed::quantize_per_tensor",
        "aten::quantize_per_tensor",
        "quantized_decomposed::quantize_per_channel",
    }
)


def quantises(program: torch.export.ExportedProgram | None) -> bool:
    """Whether a captured program rounds to quanta."""
    return program is not None and any(_name(node.target) in _QUANTISERS for node in program.graph.nodes)


def _name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return schema.name if schema is not None else ""


class _MovedQuanta(TorchDispatchMode):
    """Moves every number that is quantised a little, up or down at random."""

    def __init__(self, step: float, seed: int) -> None:
        super().__init__()
        self._step = step
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) in _QUANTISERS:
            x, scale, *others = args
            signs = torch.randint(0, 2, x.shape, generator=self._generator).to(x.device, x.dtype) * 2 - 1
            scales = scale
            if isinstance(scale, torch.Tensor):
                by_axis = [-1 if a == others[1] % x.dim() else 1 for a in range(x.dim())]
                scales = scale.reshape(by_axis if scale.numel() > 1 else ()).to(x.dtype)
            args = (x + signs * scales * self._step, scale, *others)
        return func(*args, **kwargs or {})


def quantum_slack(
    run: Run,
    program: torch.export.ExportedProgram,
    leaves: Sequence[Any],
    got: Mapping[str, torch.Tensor],
    expected: Sequence[tuple[str, Any]],
) -> Iterator[Slack]:
    """How far each element of each result may be from PyTorch's, measured on the captured program.

    It runs again with all numbers moved a little before they are quantised. A result whose differences are, on average, larger
    than these changes gets no slack: an offset of one quantum everywhere, say, is no rounding.

    Args:
        run: Runs a model on flattened inputs, which it may write, and gives its results by name.
        program: The captured program.
        leaves: The flattened inputs.
        got: ONNX's outputs, by name.
        expected: PyTorch's result for each, in the same order.

    Yields:
        Once, a tensor of doubles of each result's shape; ``None`` where it gets none.
    """
    model = program.module(check_guards=False)
    plain = run(model, clone_leaves(leaves))
    moved = [_run_moved(run, model, leaves, _STEP, seed) for seed in range(_QUANTUM_RUNS)]
    large = _run_moved(run, model, leaves, _LARGE_STEP, _QUANTUM_RUNS)
    slack: Slack = []
    for index, (actual, (_, wanted)) in enumerate(zip(got.values(), expected, strict=True)):
        changes = [_difference(results[index][1], plain[index][1]) for results in moved]
        measured = [x for x in changes if x is not None]
        if not any(bool(x.any()) for x in measured):
            measured = [x for x in [_difference(large[index][1], plain[index][1])] if x is not None]
            spread = 0.0
        else:
            spread = max(_average(x) for x in measured)
        difference = _difference(actual, wanted)
        if difference is None or not measured or not difference.numel():
            slack.append(None)
            continue
        largest = max(float(x.max()) for x in measured)
        limit = _MOST_ON_AVERAGE * max(spread, largest / difference.numel() ** 0.5)
        slack.append(torch.full_like(difference, largest * _MOST) if _average(difference) <= limit else None)
    yield slack


def _run_moved(run: Run, model: Any, leaves: Sequence[Any], step: float, seed: int) -> list[tuple[str, Any]]:
    with _MovedQuanta(step, seed):
        return run(model, clone_leaves(leaves))


def _difference(a: Any, b: Any) -> torch.Tensor | None:
    """The distance of two results, in doubles; ``None`` where they are not numbers of the same shape."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape or a.is_complex():
        return None
    return torch.nan_to_num((a.detach().cpu().double() - b.detach().cpu().double()).abs(), nan=0.0, posinf=0.0)


def _average(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return float(x.square().mean().sqrt())
