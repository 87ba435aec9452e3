"""The culprit, where the ONNX model computes something else than PyTorch: a rule, a rewrite, ONNX Runtime …"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.capture.signature import FunctionalGraph
from onnxplug.errors import OnnxplugError
from onnxplug.host import RuntimeHost
from onnxplug.run.alignment import Alignment, Recipe
from onnxplug.run.session import lacks_kernel
from onnxplug.verification.compare import Comparison, compare
from onnxplug.verification.eager import feed_of, placeholder_values, run_graph
from onnxplug.verification.inputs import clone_leaves
from onnxplug.verification.runs import LEVELS, Runs
from onnxplug_tools.diagnosis.agreement import Agreement
from onnxplug_tools.diagnosis.delta import minimised
from onnxplug_tools.diagnosis.optimizers import OPTIMIZERS
from onnxplug_tools.diagnosis.walk import Difference, Walk, difference_at, rule_text, walk


class Culprit(Enum):
    """The part that is at fault."""

    NOBODY = "nobody"
    """Every operator agrees, everywhere."""
    RULE = "rule"
    """The plain translation, not optimised, is wrong in the evaluator already."""
    SIMPLIFICATION = "simplification"
    """Folding and simplification make it wrong, without any rewrite."""
    REWRITE = "rewrite"
    """A rewrite makes it wrong."""
    CHANGE = "change"
    """The model was changed after the export."""
    ONNX_RUNTIME = "onnxruntime"
    """The evaluator is right, and ONNX Runtime is not."""
    EVALUATOR = "evaluator"
    """ONNX Runtime is right without its optimisations, and the evaluator is not."""
    CAPTURE = "capture"
    """The captured graph computes something else than the model: torch.export lost or fixed something."""
    UNKNOWN = "unknown"
    """No operator differs on its own inputs: rounding that later operators enlarge, or an operator that was not compared."""


@dataclass
class Verdict:
    """The culprit, and the comparisons that show it.

    Attributes:
        culprit: The part that is at fault.
        name: The rule, the rewrite, or the optimiser or operator of ONNX Runtime; empty where there is none.
        first: The first operator that differs.
        walks: The comparisons of each run of a model, by the kind of the run; for a failed run the text of its error.
    """

    culprit: Culprit
    name: str = ""
    first: Difference | None = None
    walks: dict[str, Walk | str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"at fault: {_WORDS[self.culprit]}{f' {self.name}' if self.name else ''}"]
        if self.first is not None:
            lines.append(f"first operator that differs: {self.first}")
        lines += [f"  {how}: {walk}" for how, walk in self.walks.items()]
        return "\n".join(lines)


_WORDS = {
    Culprit.NOBODY: "nothing; every operator that was compared agrees",
    Culprit.RULE: "the rule",
    Culprit.SIMPLIFICATION: "the simplification of the graph (to_onnx(optimize=False) is right)",
    Culprit.REWRITE: "the rewrite",
    Culprit.CHANGE: "a change of program.model after the export",
    Culprit.ONNX_RUNTIME: "ONNX Runtime,",
    Culprit.EVALUATOR: "the evaluator (onnxplug-reference, or onnx's own)",
    Culprit.CAPTURE: "torch.export; the graph that it captured computes something else than the model",
    Culprit.UNKNOWN: "unknown; no operator that was compared differs on its own inputs",
}

#: The kinds of runs: keys of ``Verdict.walks``.
PLAIN = "evaluator, the rules' plain translation"
EVALUATOR = "evaluator"
ORT_PLAIN = "ONNX Runtime without optimisation, the rules' plain translation"
ORT_OFF = "ONNX Runtime without optimisation"
ORT_ON = "ONNX Runtime"
ORT_ALONE = "ONNX Runtime, the model's own outputs alone"


def judge_program(program: Any, leaves: Sequence[Any], failed: bool = False) -> Verdict:
    """The verdict on a program, for some inputs.

    Args:
        program: An ``OnnxProgram`` with a recipe.
        failed: Whether the program's outputs differ from the PyTorch model's.
    """
    assert program.recipe is not None
    return judge(program.model, program.recipe, program.host, leaves, failed)


def judge(
    model: ir.Model, recipe: Recipe, host: RuntimeHost | None, leaves: Sequence[Any], failed: bool = False
) -> Verdict:
    """The verdict on a model, for some inputs.

    Args:
        failed: Whether the model's outputs differ from the PyTorch model's.
    """
    return _Judge(model, recipe, host, leaves).verdict(failed)


class _Judge:
    def __init__(self, model: ir.Model, recipe: Recipe, host: RuntimeHost | None, leaves: Sequence[Any]) -> None:
        self._recipe = recipe
        self._host = host
        self._leaves = clone_leaves(leaves)
        self._functional: FunctionalGraph = recipe.functional
        self._values = placeholder_values(self._functional, self._leaves)
        self._feed = feed_of(self._functional, self._leaves)
        self._alignment, _ = self._converted(recipe.optimize, recipe.without)
        self._runs = Runs(model, host, self._feed)
        self._agreement = Agreement(recipe, self._leaves)
        self._result = Verdict(Culprit.NOBODY)

    def verdict(self, failed: bool) -> Verdict:
        """Looks for the fault from the first stage on: rules, rewrites, ONNX Runtime."""
        verdict = self._of_rules() or self._of_rewrites() or self._of_onnxruntime()
        if verdict is not None:
            return verdict
        if failed:
            return self._concluded(Culprit.CAPTURE if self._gives_what_was_captured() else Culprit.UNKNOWN)
        return self._result if self._is_compared(EVALUATOR) else self._concluded(Culprit.UNKNOWN)

    def _gives_what_was_captured(self) -> bool:
        """Whether ONNX Runtime's outputs agree with the outputs of the captured graph, which PyTorch runs."""
        try:
            got = self._runs.computed()
        except Exception:
            return False
        if not self._agreement.expected.keys() <= got.keys():
            return False
        return self._agreement.first_difference(got, self._runs.computed) is None

    # -- stages --------------------------------------------------------------------------------------------------------

    def _of_rules(self) -> Verdict | None:
        alignment, model = self._converted(False, ())
        plain = Runs(model, self._host, self._feed)
        first = self._walk(PLAIN, alignment, plain.evaluated)
        if self._is_compared(PLAIN) and first is None:
            return None
        second = self._walk(ORT_PLAIN, alignment, lambda names: plain.computed(names, "disable"))
        if first is not None and second is None and self._is_compared(ORT_PLAIN):
            return self._concluded(Culprit.EVALUATOR, _onnx_operator(model, first), first)
        first = first or second
        return None if first is None else self._concluded(Culprit.RULE, _rule_name(first), first)

    def _of_rewrites(self) -> Verdict | None:
        first = self._walk(EVALUATOR, self._alignment, self._runs.evaluated)
        if self._is_compared(EVALUATOR) and first is None:
            return None
        off = self._walk(ORT_OFF, self._alignment, lambda names: self._runs.computed(names, "disable"))
        if off is None and self._is_compared(ORT_OFF):
            return self._concluded(Culprit.EVALUATOR, _onnx_operator(self._runs.model, first), first) if first else None
        if not self._is_compared(PLAIN):  # no result before the rewrites to compare with
            return None
        if self._is_right(self._recipe.without):
            return self._concluded(Culprit.CHANGE, "", first or off)
        fired = [name for name in self._alignment.fired if name not in self._recipe.without]
        if not self._is_right({*self._recipe.without, *fired}):
            return self._concluded(Culprit.SIMPLIFICATION, "", first or off)
        wrong = minimised(fired, lambda some: self._is_right({*self._recipe.without, *some}))
        return self._concluded(Culprit.REWRITE, " with ".join(wrong), first or off)

    def _of_onnxruntime(self) -> Verdict | None:
        first = self._walk(ORT_OFF, self._alignment, lambda names: self._runs.computed(names, "disable"))
        if first is not None:
            return self._concluded(
                Culprit.ONNX_RUNTIME, f"its kernel of {_onnx_operator(self._runs.model, first)}", first
            )
        off = self._result.walks[ORT_OFF]
        if isinstance(off, str):
            if _is_missing(off):
                return None
            return self._concluded(Culprit.ONNX_RUNTIME, "which does not run the model", self._first_alone("disable"))
        first = self._walk(ORT_ON, self._alignment, lambda names: self._runs.computed(names))
        reference = self._runs.computed((), "disable")

        def wrong(level: str, without: Sequence[str]) -> bool:
            return not self._same_outputs(level, without, reference)

        if not wrong("all", ()):
            if first is None:
                return None
            return self._concluded(
                Culprit.ONNX_RUNTIME, "where it optimises the model with these values as outputs (not as it is)", first
            )
        self._result.walks[ORT_ALONE] = "wrong" if first is not None else "wrong: with more outputs it fuses less"
        level = next(level for level in LEVELS[1:] if wrong(level, ()))
        return self._concluded(
            Culprit.ONNX_RUNTIME, _optimizer(level, wrong), first if first is not None else self._first_alone(level)
        )

    def _is_compared(self, how: str) -> bool:
        """Whether a run came to its end, so that its results were compared."""
        return isinstance(self._result.walks.get(how), Walk)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _converted(self, optimize: bool, without: Collection[str]) -> tuple[Alignment, ir.Model]:
        alignment = Alignment()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = self._recipe.convert(optimize, without, alignment)
        return alignment, model

    def _walk(
        self, how: str, alignment: Alignment, values: Callable[[Collection[str]], Mapping[str, Any]]
    ) -> Difference | None:
        """Runs a model in one way and compares its operators; returns the first that differs."""
        names = {name for names in alignment.names.values() for name in names}
        try:
            actual = values(names)
        except Exception as error:
            self._result.walks[how] = _reason(error)
            return None
        done = self._result.walks[how] = walk(self._functional, self._values, alignment, actual)
        return done.differences[0] if done.differences else None

    def _is_right(self, without: Collection[str]) -> bool:
        """Whether the recipe's model without some rewrites is right in the evaluator."""
        try:
            alignment, model = self._converted(self._recipe.optimize, without)
            names = {name for names in alignment.names.values() for name in names}
            values = Runs(model, self._host, self._feed).evaluated(names)
        except OnnxplugError:
            return False
        return not walk(self._functional, self._values, alignment, values).differences

    def _eager(self, wanted: set[torch.fx.Node]) -> dict[torch.fx.Node, Any]:
        """PyTorch's results for some nodes."""
        values: dict[torch.fx.Node, Any] = {}

        def keep(node: torch.fx.Node, _: Any, result: Any) -> Any:
            if node in wanted:
                values[node] = result
            return result

        run_graph(self._functional, self._values, keep)
        return values

    def _same_outputs(self, level: str, without: Sequence[str], reference: Mapping[str, torch.Tensor]) -> bool:
        """Whether ONNX Runtime's outputs agree with PyTorch's, or with its own outputs without optimisations."""
        try:
            got = self._runs.computed((), level, without)
        except Exception:
            return False
        others = [name for name, value in reference.items() if not compare(got[name], value).equal]
        expected = self._agreement.expected
        if not expected.keys() >= set(others):
            return False
        if all(compare(got[name], expected[name]).equal for name in others):
            return True
        values = partial(self._runs.computed, level=level, without=without)
        return self._agreement.first_difference(got, values) is None

    def _first_alone(self, level: str) -> Difference | None:
        """The first operator whose result is wrong when the model ends with it.

        For a wrong fusion that ONNX Runtime does not make where intermediate values are outputs.
        """
        nodes = [
            node
            for node, names in self._alignment.names.items()
            if len(names) == 1 and self._runs.known(names) and _is_tensor(node)
        ]
        low, high, last = 0, len(nodes), None
        while low < high:
            middle = (low + high) // 2
            difference = self._alone(nodes[middle], level)
            if difference is None:
                low = middle + 1
            else:
                high, last = middle, difference
        return last

    def _alone(self, node: torch.fx.Node, level: str) -> Difference | None:
        """The difference of a node's result in the model that ends with it."""
        name = self._alignment.names[node][0]
        expected = self._eager({node}).get(node)
        if not isinstance(expected, torch.Tensor):
            return None
        try:
            actual = self._runs.computed([name], level, alone=True)[name]
        except Exception as error:
            return difference_at(node, self._alignment, Comparison(problem=_reason(error)), None, expected)
        comparison = compare(actual, expected)
        if comparison.equal or compare(actual, self._runs.computed([name], "disable", alone=True)[name]).equal:
            return None
        return difference_at(node, self._alignment, comparison, actual, expected)

    def _concluded(self, culprit: Culprit, name: str = "", first: Difference | None = None) -> Verdict:
        self._result.culprit, self._result.name, self._result.first = culprit, name, first
        return self._result


def _optimizer(level: str, wrong: Callable[[str, Sequence[str]], bool]) -> str:
    """ONNX Runtime's level of optimisation that is at fault, and the optimisers whose removal corrects it, if any."""
    text = f"its optimisation (level {level!r})"
    if wrong("all", OPTIMIZERS):
        return text
    names = minimised(OPTIMIZERS, lambda some: not wrong("all", some))
    return f"its optimiser{'s' if len(names) > 1 else ''} {', '.join(names)} (level {level!r})"


def _rule_name(difference: Difference) -> str:
    # A higher-order operator has no namespace; the operators in its graphs are not compared one by one.
    within = "" if "::" in difference.operator else ", or that of an operator in its branches or body"
    return f"{difference.rule or 'that translates it'} (for {difference.operator}){within}"


def _onnx_operator(model: ir.Model, difference: Difference) -> str:
    for node in model.graph:
        if any(value.name == difference.value for value in node.outputs):
            return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    return difference.operator


def _is_tensor(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _reason(error: Exception) -> str:
    if lacks_kernel(error):
        return f"{_NO_KERNEL}: {error}"
    if isinstance(error, OnnxplugError):
        return error.message
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


#: Characters of an error of ONNX Runtime that are shown.
_LONGEST = 300

_NO_KERNEL = "not run, it has no kernel"


def _is_missing(text: str) -> bool:
    return text.startswith(_NO_KERNEL)


__all__ = ["Culprit", "Difference", "Verdict", "Walk", "judge", "judge_program", "rule_text"]
