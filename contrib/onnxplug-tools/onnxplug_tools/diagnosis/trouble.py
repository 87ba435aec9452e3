"""Faults of a graph: it can't be converted, its model does not run, or computes something else than PyTorch."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from enum import Enum

import onnx_ir as ir

from onnxplug.errors import MissingRuleError, OnnxplugError
from onnxplug.host import RuntimeHost
from onnxplug.run.alignment import Recipe
from onnxplug.run.session import Runner
from onnxplug.verification.eager import feed_of
from onnxplug.verification.runs import Runs
from onnxplug_tools.diagnosis.agreement import Agreement
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
    """Converts a piece and runs its model, as is done for a program.

    Returns:
        The fault, ``None`` where there is none; and the model, ``None`` where the piece can't be converted.
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
    names = [slot.name for slot in piece.functional.outputs]
    agreement = Agreement(
        replace(recipe, functional=piece.functional), piece.leaves, dict(zip(names, piece.expected, strict=True))
    )
    difference = agreement.first_difference(
        dict(zip(names, results, strict=True)),
        lambda wanted: Runs(model, host, feed_of(piece.functional, piece.leaves)).computed(wanted),
    )
    if difference is None:
        return None, model
    name, comparison = difference
    return Trouble(Kind.DIFFERENCE, f"output {name!r} {comparison}"), model


def _text(error: Exception) -> str:
    return error.message if isinstance(error, OnnxplugError) else f"{type(error).__name__}: {error}"
