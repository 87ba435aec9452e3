"""Choices among equal elements in an ONNX file, without a captured graph."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch

from onnxplug.host import RuntimeHost
from onnxplug.run.choices import outputs_of_choices
from onnxplug.run.inputs import clone_leaves
from onnxplug.run.outputs import Replay
from onnxplug.run.session import TARGET
from onnxplug.torch_private import pytree

if TYPE_CHECKING:
    from onnxplug.program import OnnxProgram


def choices_of_file(
    path: str,
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any = None,
    host: RuntimeHost | None = None,
) -> Replay:
    """PyTorch's results with a file's choices among equal elements; the model is captured at the first call.

    The file's values are found by the names that an export of the model gives them with the file's opset, target and names of
    inputs and outputs. If the file was made otherwise, no value is found, and nothing is known of its choices.

    Args:
        path: The file.
        model: A module, function or ExportedProgram.
        args, kwargs: Example inputs.
        dynamic_shapes: As ``to_onnx`` takes it.
        host: The plugins that run custom operators.
    """
    if isinstance(model, torch.export.ExportedProgram) and not args and not kwargs and model.example_inputs is not None:
        args, kwargs = model.example_inputs
    spec = pytree.tree_structure((tuple(args), dict(kwargs)))

    @cache
    def exported() -> tuple[ir.Model, OnnxProgram] | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                file = ir.load(path)
                return file, _exported_again(file, model, args, kwargs, dynamic_shapes)
        except Exception:  # it can't be captured: the difference itself is reported
            return None

    def replay(leaves: Sequence[Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        export = exported()
        recipe = export[1].recipe if export is not None else None
        if export is None or recipe is None:
            return None
        file, program = export
        inputs = program.flatten(*pytree.tree_unflatten(clone_leaves(leaves), spec))
        return outputs_of_choices(file, recipe, host, inputs)

    return replay


def _exported_again(
    file: ir.Model, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> OnnxProgram:
    from onnxplug.exporter import to_onnx

    options: dict[str, Any] = {
        "opset_version": dict(file.opset_imports),
        "target": file.graph.metadata_props.get(TARGET),
        "input_names": [value.name for value in file.graph.inputs],
        "output_names": [value.name for value in file.graph.outputs],
    }
    if isinstance(model, torch.export.ExportedProgram):
        return to_onnx(model, **options)
    return to_onnx(model, tuple(args), kwargs=dict(kwargs), dynamic_shapes=dynamic_shapes, **options)
