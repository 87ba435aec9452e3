"""An observer that warns of captured training operators: dropout, and normalisation by the batch's own statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.locations import is_torch_file, source_location
from onnxplug.capture.signature import Captured
from onnxplug.errors import CaptureError
from onnxplug.observers import Observer, Span
from onnxplug.torch_private import OpOverload
from onnxplug.warn import warn

#: How many places a message names.
_MOST = 3


def _has_statistics(arguments: dict[str, Any]) -> bool:
    """A batch norm without running statistics uses the batch's in evaluation too."""
    return bool(arguments.get("training", True)) and arguments.get("running_mean") is not None


def _ignores_statistics(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("use_input_stats")) and arguments.get("running_mean") is not None


def _drops(arguments: dict[str, Any]) -> bool:
    probability = arguments.get("p", arguments.get("dropout", 0))
    return arguments.get("train") is not False and not (isinstance(probability, int | float) and probability == 0)


def _drops_attention(arguments: dict[str, Any]) -> bool:
    return isinstance(arguments.get("dropout_p"), int | float) and arguments["dropout_p"] > 0


def _is_random(arguments: dict[str, Any]) -> bool:
    return bool(arguments.get("training"))


_DROPOUT, _NORM = "dropout stays random", "batch norm uses the batch's statistics"
#: Name of the operator to its behaviour in training, and the test of its arguments for training.
_OPERATORS: dict[str, tuple[str, Callable[[dict[str, Any]], bool]]] = {
    **{
        f"aten::{prefix}{name}{suffix}": (_DROPOUT, _drops)
        for name in ("dropout", "alpha_dropout")
        for prefix in ("", "feature_")
        for suffix in ("", "_")
    },
    "aten::native_dropout": (_DROPOUT, _drops),
    **{
        f"aten::{name}": ("dropout between its layers stays random", _drops)
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    "aten::scaled_dot_product_attention": ("dropout of attention stays random", _drops_attention),
    **{f"aten::rrelu{suffix}": ("rrelu stays random", _is_random) for suffix in ("", "_")},
    **{
        f"aten::{name}": (_NORM, _has_statistics)
        for name in (
            "batch_norm",
            "native_batch_norm",
            "_native_batch_norm_legit",
            "_native_batch_norm_legit_functional",
        )
    },
    # torch.export keeps no change of the running statistics by this operator.
    "aten::instance_norm": ("instance norm uses each instance's statistics", _ignores_statistics),
    "aten::_batch_norm_with_update": (_NORM, _has_statistics),
    "aten::_batch_norm_with_update_functional": (_NORM, _has_statistics),
}


class TrainingWarnings(Observer):
    """Warns of training behaviour in a captured model."""

    stays = False

    def end(self, span: Span) -> None:
        """Examines a capture that has ended, or the model if it failed."""
        if span.name != "capture" or span.kind != "stage":
            return
        text = None
        if isinstance(span.result, Captured):
            text = training_text(span.result.program, whole=bool(getattr(span.result.reference, "training", False)))
        elif isinstance(span.error, CaptureError) and isinstance(span.subject.model, torch.nn.Module):
            text = training_text_of(span.subject.model)
        if text is not None:
            warn(text)


def training_text(program: torch.export.ExportedProgram, whole: bool) -> str | None:
    """The warning about training operators in a program; ``None`` where it has none.

    Args:
        program: The program.
        whole: Whether the model as a whole is in training mode.
    """
    places: dict[str, dict[str, None]] = {}
    for behaviour, place in _training_operators(program):
        places.setdefault(behaviour, {})[place or ""] = None
    if not places:
        return None
    texts = []
    for behaviour, places_of_kind in places.items():
        known = [place for place in places_of_kind if place]
        shown = ", ".join(known[:_MOST]) + (" and elsewhere" if len(known) > _MOST else "")
        texts.append(f"{behaviour} ({shown})" if shown else behaviour)
    if whole:
        start, hint = "the model is in training mode", "Call model.eval() first for inference."
    else:
        start = "parts of the model are in training mode"
        hint = "For inference, call model.eval() before it is captured, and give F.dropout training=self.training."
    return f"{start}: {' and '.join(texts)} in the exported model too. {hint}"


def training_text_of(model: torch.nn.Module) -> str | None:
    """The note on a model in training mode that can't be captured; ``None`` where training changes none of its layers."""
    if not getattr(model, "training", False):  # a frozen ScriptModule has no mode
        return None
    for name, module in model.named_modules():
        kinds = {cls.__module__ for cls in type(module).__mro__}
        if module.training and kinds & {"torch.nn.modules.dropout", "torch.nn.modules.batchnorm"}:
            layer = f"{type(module).__name__} ({name})" if name else type(module).__name__
            return f"the model is in training mode: it has {layer}. Call model.eval() first for inference."
    return None


def _training_operators(program: torch.export.ExportedProgram) -> Iterator[tuple[str, str | None]]:
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            target = node.target
            if isinstance(target, OpOverload) and (entry := _OPERATORS.get(target._schema.name)) is not None:
                behaviour, trains = entry
                if trains(_arguments(node, target)):
                    yield behaviour, _place(node)


def _place(node: torch.fx.Node) -> str | None:
    """The user's line, or the name of the module if the line is torch's own."""
    line = source_location(node)
    if line is not None and not is_torch_file(line.rpartition(":")[0]):
        return line
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("L['self'].") if stack and stack[-1][0] else None


def _arguments(node: torch.fx.Node, target: Any) -> dict[str, Any]:
    schema = target._schema.arguments
    passed = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: passed.get(a.name, a.default_value if a.has_default_value() else None) for a in schema}
