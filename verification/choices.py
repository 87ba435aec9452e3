"""Operators that choose among elements (topk, sort, argmax …): which of equal elements it is, PyTorch mostly leaves open; operators
that jump (comparisons, casts to integers, steps); and operators that choose the order and the phases of vectors
(:mod:`onnxplug.verification.spectra`).

The choices differ, too, where rounding made elements differ that are equal in PyTorch, or the reverse. All results computed from
the chosen elements then differ, and neither is wrong. :func:`chosen` decides whether a result of ONNX is a right choice;
:func:`outputs_of_choices` lets PyTorch go on from the choices of ONNX, so that later results can be compared.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import onnx_ir as ir
import torch

from onnxplug.capture.signature import FunctionalGraph
from onnxplug.host import RuntimeHost
from onnxplug.run.alignment import Alignment, Recipe
from onnxplug.torch_private import OpOverload
from onnxplug.verification import spectra
from onnxplug.verification.compare import compare
from onnxplug.verification.conditioning import Widening, jumping, slack_by_runs
from onnxplug.verification.eager import Visit, arguments_of, call_again, feed_of, placeholder_values, run_graph
from onnxplug.verification.inputs import clone_leaves
from onnxplug.verification.recording import EagerValues
from onnxplug.verification.repetition import beyond_rounding, is_real, jumps
from onnxplug.verification.runs import Runs

#: Operators whose last result is indices, where the order of equal elements is open.
_OPEN = frozenset(
    f"aten.{name}"
    for name in (
        "topk.default sort.default sort.stable argsort.default argsort.stable kthvalue.default median.dim nanmedian.dim "
        "mode.default"
    ).split()
)
#: The same, but with a defined choice among equal elements.
_STATED = frozenset(
    f"aten.{name}" for name in "argmax.default argmin.default max.dim min.dim cummax.default cummin.default".split()
)
_UNIQUE = "aten._unique2.default"
#: Operators in floating point whose results jump, in addition to operators with integers or bools as results. If an operator is
#: missing here, a difference by rounding is reported needlessly; the table does not decide which differences rounding excuses.
_STEPS = frozenset(
    """ceil fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask floor floor_divide
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams hardshrink heaviside mode round sgn sign threshold trunc""".split()
)

#: How often what choosing operators read is moved: in fewer runs, a small difference of large numbers often stays what it was.
_RUNS = 8

#: Operators whose result depends on the sign of a zero: no rounding moves a zero, and no run of PyTorch alone shows the jump.
_CUT = frozenset({"angle", "atan2"})
#: The same of complex operands.
_COMPLEX_CUT = frozenset("log log2 log10 log1p sqrt rsqrt pow acos acosh asin asinh atan atanh".split())


def chooses(node: torch.fx.Node) -> bool:
    """Whether a node's results are indices, or elements in an order, that depend on comparisons or are otherwise open."""
    name = str(node.target)
    return node.op == "call_function" and (
        name in _OPEN or name in _STATED or name == _UNIQUE or name in spectra.OPERATORS or _jumps(node)
    )


def _jumps(node: torch.fx.Node) -> bool:
    """Whether a node gives one tensor of integers, bools or steps of floating-point operands, which rounding flips near a step."""
    result = node.meta.get("val")
    if not isinstance(node.target, OpOverload) or not isinstance(result, torch.Tensor):
        return False
    operands = [n.meta.get("val") for n in node.all_input_nodes]
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in operands):
        return False
    return not (result.is_floating_point() or result.is_complex()) or _steps(node)


def _steps(node: torch.fx.Node) -> bool:
    name = str(node.target).split(".")[1]
    return name in _STEPS or (name == "div" and node.kwargs.get("rounding_mode") is not None)


def _is_cut(node: torch.fx.Node) -> bool:
    """Whether a node's operator has a branch cut."""
    if not isinstance(node.target, OpOverload):
        return False
    name = str(node.target).split(".")[1]
    result = node.meta.get("val")
    return name in _CUT or (name in _COMPLEX_CUT and isinstance(result, torch.Tensor) and result.is_complex())


def chosen(node: torch.fx.Node, operands: Sequence[Any], expected: Any, actual: Sequence[Any]) -> Any:
    """PyTorch's result with the choice of ONNX, if that is a right choice; else ``None``.

    Args:
        node: An operator for which :func:`chooses` is true.
        operands: The values of its ``all_input_nodes``.
        expected: PyTorch's result.
        actual: ONNX's results, in the order of PyTorch's; ``None`` for unknown results.
    """
    if str(node.target) in spectra.OPERATORS:
        return spectra.taken(str(node.target), expected, actual)
    return _taken(node, operands, expected, actual) if _is_right(node, operands, expected, actual) else None


def _is_right(node: torch.fx.Node, operands: Sequence[Any], expected: Any, actual: Sequence[Any]) -> bool:
    if str(node.target) in spectra.OPERATORS:  # nothing is known of ONNX's results
        return False
    if str(node.target) not in (*_OPEN, *_STATED, _UNIQUE):
        return isinstance(actual[-1], torch.Tensor) and _same(actual[-1], expected)
    named = _arguments(node, operands)
    x = named["self"]
    if str(node.target) == _UNIQUE:
        return not named["sorted"] and _is_right_unique(x, expected, actual)
    indices, wanted = actual[-1], _parts(expected)[-1]
    if not isinstance(indices, torch.Tensor) or indices.dtype != wanted.dtype or indices.shape != wanted.shape:
        return False
    if torch.equal(indices, wanted):
        return True
    if str(node.target) not in _OPEN or named.get("stable") or not x.dim():
        return False
    axis = named["dim"]
    kept = indices if indices.dim() == x.dim() else indices.unsqueeze(axis)
    if bool(((kept < 0) | (kept >= x.shape[axis])).any()) or bool((kept.sort(axis)[0].diff(dim=axis) == 0).any()):
        return False  # no indices, or one element taken twice
    values, others = _at(x, indices, axis), _at(x, wanted, axis)
    if named.get("sorted") is False:  # of topk: in any order
        values, others = values.sort(axis)[0], others.sort(axis)[0]
    return _same(values, others)


def _is_right_unique(x: torch.Tensor, expected: Sequence[torch.Tensor], actual: Sequence[Any]) -> bool:
    """Whether these are the distinct elements in any order, with the inverse and the counts of that order."""
    for indices, wanted in zip(actual, expected, strict=True):
        if wanted.numel() and (not isinstance(indices, torch.Tensor) or indices.shape != wanted.shape):
            return False
    values, inverse, counts = actual
    if not expected[0].numel() or not _same(values.sort()[0], expected[0].sort()[0]):
        return False
    if expected[1].numel():
        inside = bool(((inverse >= 0) & (inverse < values.numel())).all())
        if not inside or not _same(values[inverse], x):
            return False
    return not expected[2].numel() or torch.equal(counts[values.argsort()], expected[2][expected[0].argsort()])


def _taken(node: torch.fx.Node, operands: Sequence[Any], expected: Any, actual: Sequence[Any]) -> Any:
    """PyTorch's result with the indices of ONNX, and the elements of PyTorch's operand at these indices."""
    if str(node.target) == _UNIQUE:
        return tuple(a if e.numel() else e for a, e in zip(actual, expected, strict=True))
    if isinstance(expected, torch.Tensor):
        return actual[-1]
    named = _arguments(node, operands)
    return _at(named["self"], actual[-1], named["dim"]), actual[-1]


def _at(x: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    """The elements at indices along an axis, which the indices may lack."""
    if not x.dim():
        return x
    return (
        x.gather(axis, indices) if indices.dim() == x.dim() else x.gather(axis, indices.unsqueeze(axis)).squeeze(axis)
    )


def _parts(result: Any) -> Sequence[torch.Tensor]:
    return result if isinstance(result, tuple | list) else (result,)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())


def _arguments(node: torch.fx.Node, operands: Sequence[Any]) -> dict[str, Any]:
    """An operator's arguments by their names, defaults among them."""
    env = dict(zip(node.all_input_nodes, operands, strict=True))
    args = torch.fx.node.map_arg(node.args, env.__getitem__)
    kwargs = torch.fx.node.map_arg(node.kwargs, env.__getitem__)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {a.name: args[i] if i < len(args) else kwargs.get(a.name, a.default_value) for i, a in enumerate(schema)}


def results_of(node: torch.fx.Node, alignment: Alignment, values: Mapping[str, Any], expected: Any) -> list[Any]:
    """ONNX's results of an operator; ``None`` for results that are not in the model, NaN for a missing part of a complex result.

    A real result that is not in the model is read off one that is and has its elements at other places, as of a transposition.

    Args:
        node: The operator.
        alignment: The ONNX values of FX nodes.
        values: ONNX's values by name.
        expected: PyTorch's result.
    """
    wanted = expected if isinstance(expected, tuple | list) else [expected]
    results: list[Any] = [None] * len(wanted)
    places = {0: node} if alignment.names.get(node) else {}
    for user in node.users:
        if getattr(user.target, "__name__", "") == "getitem":
            places[int(user.args[1])] = user  # type: ignore[arg-type]
    for place, result in places.items():
        parts = [values.get(name) for name in alignment.names.get(result, ())]
        known = [part for part in parts if isinstance(part, torch.Tensor)]
        if place < len(results) and known:
            results[place] = known[0] if len(parts) == 1 else torch.complex(*(_or_nan(p, known[0]) for p in parts))
        elif place < len(results):
            results[place] = _moved_back(result, alignment, values, wanted[place])
    return results


def _moved_back(node: torch.fx.Node, alignment: Alignment, values: Mapping[str, Any], expected: Any) -> Any:
    """ONNX's result of a node by that of a view of it, NaN for elements that the view lacks; ``None`` where there is none."""
    if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
        return None
    for user in node.users:
        names = alignment.names.get(user, ())
        moved = values.get(names[0]) if len(names) == 1 else None
        is_view = isinstance(user.target, OpOverload) and user.target.is_view and user.all_input_nodes == [node]
        if not is_view or not isinstance(moved, torch.Tensor) or moved.dtype != expected.dtype:
            continue
        places = call_again(user, [torch.arange(expected.numel()).reshape(expected.shape)])
        if isinstance(places, torch.Tensor) and (places.shape, places.dtype) == (moved.shape, torch.int64):
            result = torch.full((expected.numel(),), torch.nan, dtype=expected.dtype)
            result[places.flatten()] = moved.flatten()
            return result.reshape(expected.shape)
    return None


def _or_nan(part: Any, other: torch.Tensor) -> torch.Tensor:
    return part if isinstance(part, torch.Tensor) else torch.full_like(other, torch.nan)


def outputs_of_choices(
    model: ir.Model,
    recipe: Recipe,
    host: RuntimeHost | None,
    leaves: Sequence[Any],
    eager: Callable[[], Any] | None = None,
) -> Ties | None:
    """PyTorch's results if it chooses, among equal elements, as an ONNX model does.

    A choice of ONNX is used only if it is right for PyTorch's elements or, to the last bit, for the ONNX model's own elements, if
    these agree with PyTorch's within the tolerances of verification.

    Args:
        model: The model.
        recipe: How it was converted.
        host: The plugins that run its custom operators.
        leaves: The flattened inputs.
        eager: Runs the eager model on these inputs.

    Returns:
        The results; ``None`` where ONNX has no other right choice, or ONNX Runtime does not run the model with more outputs.
    """
    feed = feed_of(recipe.functional, leaves)
    return results_of_choices(recipe, leaves, lambda names: Runs(model, host, feed).computed(names), eager)


def results_of_choices(
    recipe: Recipe,
    leaves: Sequence[Any],
    computed: Callable[[Collection[str]], Mapping[str, Any]],
    eager: Callable[[], Any] | None = None,
) -> Ties | None:
    """The same of any run of the model.

    Args:
        recipe, leaves, eager: As for :func:`outputs_of_choices`.
        computed: Gives ONNX's values of some names.
    """
    functional = recipe.functional
    alignment, leaves = Alignment(), clone_leaves(leaves)
    values = placeholder_values(functional, leaves)
    jump = jumping(functional, values)
    choosing = [node for node in functional.graph.nodes if node in jump or chooses(node) or _is_cut(node)]
    if not choosing:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recipe.convert(recipe.optimize, recipe.without, alignment)
        results = {result for node in choosing for result in (node, *node.users)}
        near = results.union(*([*node.users, *node.all_input_nodes] for node in results))
        names = {name for node in near for name in alignment.names.get(node, ())}
        known = computed(names)
    except Exception:  # ONNX Runtime lacks a kernel, or the model was changed since: nothing is known of its choices
        return None
    replay = _Replay(functional, values, _OnnxValues(alignment, known))
    theirs = replay.outputs(choosing)
    if not replay.taken:
        return None

    def own() -> Iterator[Mapping[str, Any]]:
        yield replay.outputs(())
        try:
            others = EagerValues.of(eager, functional, choosing) if eager is not None else None
        except Exception:  # the eager model takes no mode of PyTorch: nothing is known of its choices
            return
        if others is not None:
            yield _Replay(functional, values, others).outputs(choosing)

    return Ties(own, theirs)


@dataclass(frozen=True)
class Ties:
    """PyTorch's results with its own choices among equal elements, and with ONNX's.

    Attributes:
        own: The results of the captured graph by the names of the outputs: with the choices of the captured graph, then with the
            choices of the eager model. The captured graph rounds otherwise than the eager model where capture decomposes an
            operator, and then may choose otherwise.
        theirs: The same with ONNX's choices.
    """

    own: Callable[[], Iterator[Mapping[str, Any]]]
    theirs: Mapping[str, Any]


class _Values(Protocol):
    """Another run of a captured graph's operators, whose choices PyTorch takes where they are right."""

    def results(self, node: torch.fx.Node, expected: Any) -> list[Any]:
        """The results of a choosing operator there; ``None`` for unknown results.

        Args:
            node: The operator.
            expected: PyTorch's result.
        """

    def operand(self, node: torch.fx.Node, operand: torch.fx.Node, expected: Any) -> Any:
        """What a choosing operator reads there; ``None`` where it is not known.

        Args:
            node: The operator.
            operand: The node whose result it reads.
            expected: PyTorch's value.
        """


@dataclass(frozen=True)
class _OnnxValues:
    """The values of a run of the ONNX model, by their names."""

    alignment: Alignment
    known: Mapping[str, Any]

    def results(self, node: torch.fx.Node, expected: Any) -> list[Any]:
        return self._beside(expected, results_of(node, self.alignment, self.known, expected))

    def operand(self, node: torch.fx.Node, operand: torch.fx.Node, expected: Any) -> Any:
        return self._beside(expected, results_of(operand, self.alignment, self.known, expected))[0]

    def _beside(self, expected: Any, values: list[Any]) -> list[Any]:
        """ONNX Runtime's values on the device where PyTorch has its own."""
        devices = [value.device for value in _parts(expected) if isinstance(value, torch.Tensor)]
        return [value.to(devices[0]) if isinstance(value, torch.Tensor) and devices else value for value in values]


class _Replay:
    """Runs a captured graph by PyTorch, with the choices of another run instead of PyTorch's.

    Attributes:
        taken: The operators whose choice is the other run's, and what they give with it.
    """

    def __init__(
        self,
        functional: FunctionalGraph,
        values: Mapping[torch.fx.Node, Any],
        others: _Values,
    ) -> None:
        self._functional = functional
        self._values = values
        self._others = others
        #: What choosing operators read; and how far rounding moves it with the choices that were taken then.
        self._operands: list[torch.fx.Node] = []
        self._measured: tuple[Collection[torch.fx.Node], Widening] | None = None
        self.taken: dict[torch.fx.Node, Any] = {}

    def outputs(self, choosing: Sequence[torch.fx.Node]) -> dict[str, Any]:
        """The results of the graph by name; given operators choose as the other run, where its choices are right."""
        self._operands = list(dict.fromkeys(before for node in choosing for before in node.all_input_nodes))

        def choose(node: torch.fx.Node, inputs: Sequence[Any], result: Any) -> Any:
            return self._choice(node, inputs, result) if node in choosing else result

        kept = self._run(self._values, {slot.value for slot in self._functional.outputs}, choose)
        return {slot.name: kept.get(slot.value, slot.value) for slot in self._functional.outputs}

    def _run(self, values: Mapping[torch.fx.Node, Any], wanted: Collection[Any], choose: Visit) -> dict[Any, Any]:
        """The results of some nodes, and the values of all placeholders."""
        kept = dict(values)

        def visit(node: torch.fx.Node, inputs: Sequence[Any], result: Any) -> Any:
            result = choose(node, inputs, result)
            if node in wanted:
                kept[node] = result
            return result

        run_graph(self._functional, values, visit)
        return kept

    def _choice(self, node: torch.fx.Node, inputs: Sequence[Any], result: Any) -> Any:
        actual = self._others.results(node, result)
        choice = chosen(node, inputs, result, actual) if chooses(node) else None
        own = self._own(node, inputs) if choice is None else None
        if own is not None:
            there = call_again(node, own)
            if chooses(node) and _is_right(node, own, there, actual):
                choice = _taken(node, inputs, result, actual)
            elif isinstance(there, torch.Tensor) and isinstance(actual[0], torch.Tensor):
                choice = self._there(node, inputs, own, there) if compare(actual[0], there).equal else None
        if choice is None or all(map(_same, _parts(choice), _parts(result))):
            return result
        self.taken[node] = choice
        return choice

    def _own(self, node: torch.fx.Node, inputs: Sequence[Any]) -> list[Any] | None:
        """An operator's operands in the other run; ``None`` where they are not known, or differ from its operands in PyTorch."""
        own = []
        for before, value in zip(node.all_input_nodes, inputs, strict=True):
            if not isinstance(value, torch.Tensor) or before.op != "call_function":
                own.append(value)
                continue
            there = self._others.operand(node, before, value)
            if there is None:
                return None
            slacks = self._moves(before)
            if not compare(there, value).equal and not any(compare(there, value, slack=s).equal for s in slacks):
                return None
            own.append(there)
        return own

    def _moves(self, operand: torch.fx.Node) -> Iterator[torch.Tensor | None]:
        """How far rounding moves an operand of a choosing operator, with the choices taken before; wider after each run."""
        if self._measured is None or _follows(operand, self.taken.keys() - self._measured[0]):
            taken, operands, places = dict(self.taken), self._operands, list(self._values)

            def run(_: Any, values: list[Any]) -> list[tuple[str, Any]]:
                moved = dict(zip(places, values, strict=True))
                kept = self._run(moved, operands, lambda node, inputs, result: taken.get(node, result))
                return [(node.name, kept.get(node)) for node in operands]

            slack = slack_by_runs(run, None, list(self._values.values()), each=True, runs=_RUNS)
            self._measured = taken.keys(), Widening(slack)
        place = self._operands.index(operand)
        for slacks in self._measured[1]:
            yield slacks[place] if slacks else None

    def _there(
        self,
        node: torch.fx.Node,
        inputs: Sequence[Any],
        own: Sequence[Any],
        there: torch.Tensor,
    ) -> torch.Tensor | None:
        """PyTorch's result with its elements for the operator's operands in the other run, where rounding moves them as far.

        For a pointwise operator these are all such elements, for another operator the elements that jump on the way there.
        """
        near, is_pointwise = torch.ones((), dtype=torch.bool), torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
        for operand, x, y in zip(node.all_input_nodes, inputs, own, strict=True):
            if is_real(x):
                elements = _is_near(x, y, self._moves(operand))
                near = near & (
                    elements if is_pointwise else elements.all()
                )  # operands of others have sizes of their own
        first, masks = jumps(node.target, arguments_of(node, inputs), arguments_of(node, own), [there])
        if masks[0] is None:
            return None
        if is_pointwise:
            return torch.where(near, there, first[0])
        return torch.where(masks[0], there, first[0]) if near else None


def _follows(node: torch.fx.Node, others: Collection[torch.fx.Node]) -> bool:
    """Whether a node is computed from one of some others, or is one."""
    waiting, known = [node] if others else [], {node}
    while waiting:
        before = waiting.pop()
        if before in others:
            return True
        new = [x for x in before.all_input_nodes if x not in known]
        known.update(new)
        waiting += new
    return False


def _is_near(x: torch.Tensor, y: torch.Tensor, slacks: Iterable[torch.Tensor | None]) -> torch.Tensor:
    """The elements whose difference rounding explains."""
    near = ~beyond_rounding(x, y)
    widening = iter(slacks)
    while not bool(near.all()) and (slack := next(widening, None)) is not None:
        if x.is_complex():  # a part of a complex number is rounded as the larger part is
            slack = slack.norm(dim=-1)
        near = near | ((x - y).abs() <= slack)
    return near
