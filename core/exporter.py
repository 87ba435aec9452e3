"""``to_onnx``: from a PyTorch model to an :class:`~onnxplug.program.OnnxProgram`."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

from onnxplug import arguments, pipeline
from onnxplug.options import ExportOptions, exporting
from onnxplug.packages import load
from onnxplug.program import OnnxProgram

if TYPE_CHECKING:
    from onnxplug import OnnxPieces
    from onnxplug.options import Call
else:
    Call = ExportOptions


@exporting(Call)
def to_onnx(
    model: Any, args: Any = (), f: str | os.PathLike[str] | None = None, **options: Any
) -> OnnxProgram | OnnxPieces:
    """Exports a PyTorch model to ONNX.

    Args:
        model: A Module, a function, an ``ExportedProgram``, a ``GraphModule``, a ScriptModule or a ScriptFunction.
        args: Example positional inputs; a dict at the end holds keyword inputs, as in ``torch.onnx.export``.
        f: File to save to; not saved when ``None``.
        {options}

    Returns:
        The exported program; it runs, saves and verifies itself. With ``pieces`` the programs and their chain, which does so too.

    Raises:
        UsageError: An argument is malformed, or nothing knows the target.
        OpsetError: The opset is unknown.
        OnnxplugError: ``verify=True``, and ONNX Runtime is missing or too old for the opset.
        CaptureError: torch.export can't capture the model, or a dynamic dimension came out static.
        MissingRuleError: Operators have no rule; all are listed.
        ConversionError: A converter failed, or its results differ from torch's.
        VerificationError: ``verify=True`` and the results differ, or the model does not run.
        SaveError: ``f`` can't be written.
    """
    checked = ExportOptions.of(options)
    if checked.pieces is not None:
        return _pieces(model, args, f, checked)
    arguments = {"model": model, "args": args, "f": f, **options}
    with pipeline.export(checked, (arguments, to_onnx)) as call:
        program = call.result = pipeline.run(model, args, f, checked)
    return program


def _pieces(model: Any, args: Any, folder: Any, options: ExportOptions) -> OnnxPieces:
    """Exports submodules of a model."""
    args, kwargs = arguments.positional_and_named(model, args, options.kwargs)
    options = dataclasses.replace(options, kwargs=kwargs)
    # Each piece reports its own stages.
    with pipeline.export(dataclasses.replace(options, progress=None)) as call:
        chain: OnnxPieces = load("pieces=")(model, args, folder, options, to_onnx)
        call.result = chain
    return chain
