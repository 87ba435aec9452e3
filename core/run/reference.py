"""Models run node by node, by the evaluators of plugins (``onnxplug_evaluators``); onnx's own is the builtin plugin's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from onnxplug.errors import EvaluationError, OnnxplugError
from onnxplug.host import RuntimeHost
from onnxplug.registry.rule import object_of
from onnxplug.text import in_a_line


def make_evaluator(source: str | bytes, kernels: Collection[type], host: RuntimeHost) -> tuple[str, Any]:
    """The first evaluator that accepts a model.

    Args:
        source: The model's file, or the model serialised.
        kernels: ``OpRun`` classes of its custom operators.
        host: The plugins.

    Returns:
        The evaluator's name, and an object like an ``onnx.reference.ReferenceEvaluator``.

    Raises:
        EvaluationError: None accepts it.
        PluginError: An evaluator can't be imported.
    """
    refusals: list[tuple[str, str | None]] = []
    for evaluator in host.evaluators():
        make = object_of(evaluator.make, f"the evaluator {evaluator.name}")
        try:
            return evaluator.name, make(source, kernels)
        except OnnxplugError as error:
            refusals.append((f"{evaluator.name} can't run the model: {error.message}", error.hint))
        except Exception as error:
            refusals.append((f"{evaluator.name} can't run the model: {in_a_line(error)}", None))
    refusals = refusals or [("there is no evaluator: onnxplug's own plugin is left out", None)]
    raise EvaluationError("\n".join(text for text, _ in refusals), hint=refusals[0][1])
