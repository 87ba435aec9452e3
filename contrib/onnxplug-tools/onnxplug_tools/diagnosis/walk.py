"""Every operator of a graph compared with PyTorch's, on the operands that it has in ONNX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from onnxplug.capture.locations import source_location
from onnxplug.capture.signature import FunctionalGraph
from onnxplug.functionalize.subgraphs import subgraph_at
from onnxplug.registry.names import qualified_name
from onnxplug.registry.rule import Rule
from onnxplug.run.alignment import Alignment
from onnxplug.torch_private import OpOverload
from onnxplug.verification import spectra
from onnxplug.verification.choices import chooses, chosen, results_of
from onnxplug.verification.compare import Comparison, compare
from onnxplug.verification.conditioning import rounding_slack
from onnxplug.verification.eager import call_again, run_graph
from onnxplug.verification.repetition import is_real

_ATEN = torch.ops.aten
#: Operators that copy elements to other places; views, which the schema marks, move elements too.
_MOVING = frozenset(
    (
        "cat stack hstack vstack dstack clone contiguous reshape flatten index index_select gather take take_along_dim "
        "select_scatter slice_scatter flip fliplr flipud roll rot90 repeat repeat_interleave tile pad constant_pad_nd tril triu "
        "where masked_fill"
    ).split()
)
#: Operators whose result has no defined elements.
_UNDEFINED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


@dataclass(frozen=True)
class Difference:
    """An operator whose result in ONNX isn't PyTorch's on the same inputs.

    Attributes:
        node: Name of the FX node.
        operator: The operator: ``"aten::add.Tensor"``.
        location: The user's line, ``"file:line"``.
        module: Path of the module that it belongs to: ``"encoder.layer.0"``; empty for the root.
        rule: The rule that translated it and where it comes from; empty where none did.
        value: Name of its result in the ONNX model.
        comparison: Where the results differ, and both values.
        actual, expected: Both results.
    """

    node: str
    operator: str
    location: str
    module: str
    rule: str
    value: str
    comparison: Comparison
    actual: Any = field(repr=False, compare=False, default=None)
    expected: Any = field(repr=False, compare=False, default=None)

    def __str__(self) -> str:
        inside = f" in {self.module}" if self.module else ""
        rule = f", by the rule {self.rule}" if self.rule else ""
        return f"{self.operator} ({self.node}) at {self.location}{inside}{rule}: {self.value!r} {self.comparison}"


@dataclass
class Walk:
    """The comparisons of one run of an ONNX model.

    Attributes:
        compared: Number of operators whose results were compared.
        skipped: Each reason why other operators were not compared, to the number of them.
        differences: The operators that differ, in the order of the graph.
        unstable: Number of operators that differ no more than rounding of their inputs changes their results.
    """

    compared: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    differences: list[Difference] = field(default_factory=list)
    unstable: int = 0

    def __str__(self) -> str:
        differing = len(self.differences)
        text = f"{self.compared} compared, {differing if differing else 'none'} differ{'s' if differing == 1 else ''}"
        if self.unstable:
            text += f", {self.unstable} within rounding of their inputs"
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        return f"{text}; not compared: {reasons}" if reasons else text


def rule_text(rule: Rule | None) -> str:
    """A rule with the package that it comes from."""
    if rule is None:
        return ""
    return f"{rule.name} of {rule.source}" if rule.source else rule.name


def walk(
    functional: FunctionalGraph,
    values: Mapping[torch.fx.Node, Any],
    alignment: Alignment,
    onnx_values: Mapping[str, Any],
) -> Walk:
    """Compares each operator's result in an ONNX run with PyTorch's result from the same operands.

    PyTorch goes on with ONNX's results, so that a difference is the operator's own and not that of an operator before
    it. Results that the ONNX model does not have (folded, fused, rewritten away) are PyTorch's. Choices that PyTorch
    leaves open in them (which of equal elements, the order of eigenvalues, the phases of vectors) are ONNX's, as far
    as ONNX's other results show them.
    """
    walker = _Walker(alignment, onnx_values)
    failures = run_graph(functional, values, walker.visit)
    if failures:
        walker.result.skipped["that PyTorch does not run by themselves"] += len(failures)
    return walker.result


class _Walker:
    def __init__(self, alignment: Alignment, onnx_values: Mapping[str, Any]) -> None:
        self._alignment = alignment
        self._values = onnx_values
        #: Nodes with random results of which ONNX's are not known.
        self._random: set[torch.fx.Node] = set()
        #: The operands of the operators whose results are PyTorch's own, because ONNX has none that fit.
        self._read: dict[torch.fx.Node, Sequence[Any]] = {}
        #: Functions that give PyTorch's results of an operator the order and the phases of ONNX's.
        self._arranged: dict[torch.fx.Node, Callable[[Any], Any]] = {}
        self.result = Walk()

    def visit(self, node: torch.fx.Node, operands: Sequence[Any], result: Any) -> Any:
        """Compares one result; returns the value that later nodes read."""
        random = not self._random.isdisjoint(node.all_input_nodes) or _draws(node)
        if chooses(node) and not random:
            result = self._with_choice(node, operands, result)
        if not isinstance(result, torch.Tensor | int | float):
            self._read[node] = operands
            if random:
                self._random.add(node)
            return result
        actual = self._actual(node, result)
        fits = actual is not None and _same_form(actual, result)
        if random or _is_undefined(node):
            if random and not fits:
                self._random.add(node)
            self._skip("random" if random else "without defined elements")
        elif _is_stated_otherwise(node, result):
            self._skip("of another dtype than torch's graph states")
        elif actual is None:
            self._skip("rewritten away" if node in self._alignment.names else "folded or not in the ONNX graph")
        elif self._agrees(node, operands, actual, result):
            return result
        if fits and isinstance(result, torch.Tensor):
            return _laid_out(actual, result)
        self._read[node] = operands
        return result

    def _skip(self, reason: str) -> None:
        self.result.skipped[reason] += 1

    def _actual(self, node: torch.fx.Node, result: Any) -> torch.Tensor | None:
        """The result in ONNX; ``None`` where it has none."""
        parts = [self._values.get(name) for name in self._alignment.names.get(node, ())]
        tensors = [part for part in parts if isinstance(part, torch.Tensor)]
        if not tensors or len(tensors) < len(parts):
            return None
        if len(tensors) == 2:
            return torch.view_as_complex(torch.stack(tensors, -1).contiguous())
        return (
            tensors[0].reshape(()) if not isinstance(result, torch.Tensor) and tensors[0].numel() == 1 else tensors[0]
        )

    def _agrees(self, node: torch.fx.Node, operands: Sequence[Any], actual: torch.Tensor, expected: Any) -> bool:
        """Compares two results and notes a difference; returns whether both are the same to the last bit."""
        self.result.compared += 1
        comparison = compare(actual, expected)
        if comparison.count and is_real(actual) and isinstance(expected, torch.Tensor):
            comparison = compare(actual, expected, slack=self._slack(node, operands))
            self.result.unstable += comparison.equal
        if not comparison.equal:
            self.result.differences.append(self._difference(node, actual, expected, comparison))
        return comparison.equal and not comparison.max_abs_difference

    def _with_choice(self, node: torch.fx.Node, operands: Sequence[Any], result: Any) -> Any:
        """A choosing operator's result with ONNX's choice, if that is right; else PyTorch's own.

        Everything that is computed from the result then has ONNX's choice, also where ONNX has only a part of the
        result, or none of the values that are computed from it first.
        """
        actual = results_of(node, self._alignment, self._values, result)
        if str(node.target) in spectra.OPERATORS:
            arrange = spectra.arrangement(str(node.target), result, actual)
            if arrange is None:
                return result
            self._arranged[node] = arrange
            return arrange(result)
        choice = chosen(node, operands, result, actual)
        return result if choice is None else choice

    def _slack(self, node: torch.fx.Node, operands: Sequence[Any]) -> torch.Tensor | None:
        """How far rounding of an operator's operands moves its result; ``None`` if that is not known.

        Operators before it whose results ONNX doesn't have count as a part of it.
        """
        read = {**self._read, node: operands}
        start: dict[torch.fx.Node, Any] = {}
        pending = [node]
        while pending:
            current = pending.pop()
            for before, value in zip(current.all_input_nodes, read[current], strict=True):
                if before in read:
                    pending.append(before)
                else:
                    start[before] = value

        def again(_: Any, moved: Sequence[Any]) -> list[tuple[str, Any]]:
            env = dict(zip(start, moved, strict=True))

            def value_of(wanted: torch.fx.Node) -> Any:
                if wanted not in env:
                    result = call_again(wanted, [value_of(n) for n in wanted.all_input_nodes])
                    # The slack of an element must be at the place that the element has in ONNX.
                    env[wanted] = self._arranged[wanted](result) if wanted in self._arranged else result
                return env[wanted]

            return [("", value_of(node))]

        slack = rounding_slack(again, None, list(start.values()))
        return slack[0] if slack else None

    def _difference(self, node: torch.fx.Node, actual: Any, expected: Any, comparison: Comparison) -> Difference:
        """The difference, at the operator that computed the elements if operators after it only moved them."""
        value, blamed = self._alignment.names[node][0], node
        while _moves(producer_of(blamed)):
            unknown = [n for n in producer_of(blamed).all_input_nodes if n in self._read]
            if not unknown:  # ONNX has its operands
                break
            blamed = unknown[0]
        return replace(difference_at(blamed, self._alignment, comparison, actual, expected), value=value)


def _moves(node: torch.fx.Node) -> bool:
    """Whether an operator moves elements to other places and computes none."""
    if not isinstance(node.target, OpOverload):
        return False
    returns = node.target._schema.returns
    view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
    return view or operator_of(node).partition("::")[2].partition(".")[0] in _MOVING


def difference_at(
    node: torch.fx.Node, alignment: Alignment, comparison: Comparison, actual: Any = None, expected: Any = None
) -> Difference:
    """A difference, with all that is known of its operator."""
    return Difference(
        node=node.name,
        operator=operator_of(node),
        location=source_location(node) or "unknown source",
        module=_module_path(node),
        rule=rule_text(alignment.rules.get(producer_of(node))),
        value=alignment.names.get(node, ("",))[0],
        comparison=comparison,
        actual=actual,
        expected=expected,
    )


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operator, or one of the graph that it runs, draws random numbers.

    It does not with a probability of 0, nor outside of training mode.
    """
    target = node.target
    if not isinstance(target, OpOverload):
        graphs = (subgraph_at(operand, node.graph.owning_module) for operand in node.all_input_nodes)
        return any(_draws(inner) for module in graphs if module is not None for inner in module.graph.nodes)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(target._schema.arguments):
        if argument.name in ("train", "training", "p", "dropout_p", "dropout"):
            argument_ = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            if not (argument.default_value if argument_ is None else argument_):
                return False
    return True


def _is_undefined(node: torch.fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and operator_of(node).partition("::")[2].partition(".")[0] in _UNDEFINED


def _is_stated_otherwise(node: torch.fx.Node, result: Any) -> bool:
    """Whether PyTorch computes another dtype than its own graph states, which the export relies on."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and isinstance(result, torch.Tensor) and val.dtype != result.dtype


def _same_form(actual: torch.Tensor, expected: Any) -> bool:
    return isinstance(expected, torch.Tensor) and actual.dtype == expected.dtype and actual.shape == expected.shape


def _laid_out(actual: Any, expected: torch.Tensor) -> torch.Tensor:
    """ONNX's result in the memory layout and on the device of PyTorch's result, on which views depend."""
    return torch.empty_like(expected).copy_(actual)


def producer_of(node: torch.fx.Node) -> torch.fx.Node:
    """The node of the operator that a node's result comes from: for an item of a list, the node that made the list."""
    while getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def operator_of(node: torch.fx.Node) -> str:
    """The qualified name of the operator that a node's result comes from."""
    return qualified_name(producer_of(node).target)


def _module_path(fx: torch.fx.Node) -> str:
    """The path of the module that the node belongs to (``"encoder.layer.0"``), empty for the root."""
    stack = fx.meta.get("nn_module_stack")
    if not stack:
        return ""
    return str(next(reversed(stack.values()))[0])
