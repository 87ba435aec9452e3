"""Whether a model's outputs agree with the captured graph's, but for rounding and choices that PyTorch leaves open."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

from onnxplug.capture.signature import FunctionalGraph
from onnxplug.run.alignment import Recipe
from onnxplug.verification.choices import results_of_choices
from onnxplug.verification.compare import Comparison, compare
from onnxplug.verification.conditioning import rounding_slack
from onnxplug.verification.eager import placeholder_values, run_graph


class Agreement:
    """Compares the outputs of models of one captured graph with PyTorch's results, as ``program.verify`` does.

    Args:
        recipe: How the graph was converted.
        leaves: Its flattened inputs.
        expected: PyTorch's result for each output by its name, if it is known.
    """

    def __init__(self, recipe: Recipe, leaves: Sequence[Any], expected: Mapping[str, Any] | None = None) -> None:
        self._recipe = recipe
        self._leaves = leaves
        self._values = placeholder_values(recipe.functional, leaves)
        self._known = expected

    @cached_property
    def expected(self) -> Mapping[str, Any]:
        """PyTorch's result for each output by its name, without outputs of nodes that PyTorch does not run alone."""
        return self._known if self._known is not None else outputs_of(self._recipe.functional, self._values)

    def first_difference(
        self, got: Mapping[str, torch.Tensor], values: Callable[[Collection[str]], Mapping[str, Any]]
    ) -> tuple[str, Comparison] | None:
        """The first output that differs, by its name; ``None`` where all agree.

        Args:
            got: The model's outputs.
            values: Gives intermediate values of the model by name: they show which of equal elements the model takes,
                and the order and the phases of its eigenvectors. It may raise any error.
        """
        first = self._first(got, self.expected)
        choices = results_of_choices(self._recipe, self._leaves, values) if first is not None else None
        return None if choices is not None and self._first(got, choices.theirs) is None else first

    def _first(self, got: Mapping[str, torch.Tensor], expected: Mapping[str, Any]) -> tuple[str, Comparison] | None:
        for name in (n for n in self.expected if n in got):
            comparison = compare(got[name], expected[name])
            if comparison.count and isinstance(got[name], torch.Tensor) and got[name].is_floating_point():
                comparison = compare(got[name], expected[name], slack=self._slack.get(name))
            if not comparison.equal:
                return name, comparison
        return None

    @cached_property
    def _slack(self) -> dict[str, torch.Tensor | None]:
        """How far rounding of the graph's inputs and weights moves its results."""
        nodes, names = list(self._values), list(self.expected)

        def again(_: Any, moved: Sequence[Any]) -> list[tuple[str, Any]]:
            results = outputs_of(self._recipe.functional, dict(zip(nodes, moved, strict=True)))
            return [(name, results.get(name)) for name in names]

        slack = rounding_slack(again, None, list(self._values.values()))
        return dict(zip(names, slack, strict=True)) if slack else {}


def outputs_of(functional: FunctionalGraph, values: Mapping[torch.fx.Node, Any]) -> dict[str, Any]:
    """PyTorch's result for each output of a graph by name, without outputs of nodes that PyTorch does not run alone.

    Args:
        values: The values of the graph's placeholders.
    """
    wanted = {slot.name: slot.value for slot in functional.outputs if isinstance(slot.value, torch.fx.Node)}
    nodes, results = set(wanted.values()), {}

    def keep(node: torch.fx.Node, _: Any, result: Any) -> Any:
        if node in nodes:
            results[node] = result
        return result

    run_graph(functional, values, keep)
    return {name: results[node] for name, node in wanted.items() if node in results}
