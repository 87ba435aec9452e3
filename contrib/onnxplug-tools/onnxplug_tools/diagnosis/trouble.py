"""What is wrong with a graph: it can't be converted, its model does not run, or computes something else than PyTorch."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.errors import MissingRuleError, OnnxplugError
from onnxplug.host import RuntimeHost
from onnxplug.run.alignment import Recipe
from onnxplug.run.session import Runner
from onnxplug.verification.compare import compare
from onnxplug.verification.conditioning import rounding_slack
from onnxplug.verification.eager import feed_of, placeholder_values, run_graph
from onnxplug_tools.diagnosis.pieces import Piece


class Kind(Enum):
    """How a graph fails."""

    CONVERSION = "conversion"
    RUN = "run"
    DIFFERENCE = "difference"


_OPERATOR = re.compile(r"cannot convert (\S+?)\(")
_CODE = re.compile(r"\[ONNXRuntimeError\] : (\d+)")


@dataclass(frozen=True)
class Trouble:
    """A failure.

    Attributes:
        error: The error; ``None`` for a difference.
    """

    kind: Kind
    text: str
    error: Exception | None = None

    def is_like(self, other: Trouble | None) -> bool:
        """Whether another graph fails in the same way, so that it shows the same fault."""
        if other is None or self.kind is not other.kind:
            return False
        if self.kind is Kind.DIFFERENCE:
            return True
        if self.kind is Kind.RUN:
            return _CODE.findall(self.text)[:1] == _CODE.findall(other.text)[:1]
        if isinstance(self.error, MissingRuleError) and isinstance(other.error, MissingRuleError):
            return not set(self.error.missing).isdisjoint(other.error.missing)
        return (
            type(self.error) is type(other.error)
            and _OPERATOR.findall(self.text)[:1] == _OPERATOR.findall(other.text)[:1]
        )


def trouble_of(piece: Piece, recipe: Recipe, host: RuntimeHost | None) -> tuple[Trouble | None, ir.Model | None]:
    """Converts and runs a piece as a program is.

    Returns:
        What is wrong, and the model; ``None`` for what there isn't.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = recipe.build(piece.functional, recipe.optimize, recipe.without, None)
    except Exception as error:
        return Trouble(Kind.CONVERSION, _text(error), error), None
    try:
        runner = Runner(model, host)
        results = runner(feed_of(piece.functional, piece.leaves))
    except OnnxplugError as error:
        return Trouble(Kind.RUN, _text(error), error), model
    slack: list[torch.Tensor | None] | None = None
    for index, (actual, expected) in enumerate(zip(results, piece.expected, strict=True)):
        comparison = compare(actual, expected)
        if comparison.count and actual.is_floating_point():
            slack = _slack(piece) if slack is None else slack
            comparison = compare(actual, expected, slack=slack[index] if slack else None)
        if not comparison.equal:
            return Trouble(Kind.DIFFERENCE, f"output {runner.output_names[index]!r} {comparison}"), model
    return None, model


def _text(error: Exception) -> str:
    return error.message if isinstance(error, OnnxplugError) else f"{type(error).__name__}: {error}"


def _slack(piece: Piece) -> list[torch.Tensor | None]:
    """How far rounding of a piece's inputs and weights moves its results."""
    values = placeholder_values(piece.functional, piece.leaves)
    nodes = list(values)

    def again(_: Any, moved: Sequence[Any]) -> list[tuple[str, Any]]:
        results: dict[torch.fx.Node, Any] = {}

        def keep(node: torch.fx.Node, _: Any, result: Any) -> Any:
            results[node] = result
            return result

        run_graph(piece.functional, dict(zip(nodes, moved, strict=True)), keep)
        return [(slot.name, results[slot.value]) for slot in piece.functional.outputs]

    return rounding_slack(again, None, [values[node] for node in nodes])
