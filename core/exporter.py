"""``to_onnx``: from a PyTorch model to an :class:`~onnxplug.program.OnnxProgram`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from onnxplug import arguments, pipeline
from onnxplug.finish.describe import forget
from onnxplug.options import ExportOptions, with_options
from onnxplug.profiling.watch import watched
from onnxplug.program import OnnxProgram
from onnxplug.registry.rule import load_object
from onnxplug.report.active import reported

if TYPE_CHECKING:
    from onnxplug.options import Call
    from onnxplug.pieces.pieces import OnnxPieces
else:
    Call = ExportOptions

#: It calls `to_onnx` for each piece.
_PIECES = "onnxplug.pieces.pieces:export_pieces"


P = ParamSpec("P")


class ToOnnx(Protocol[P]):
    """The type of :func:`to_onnx`."""

    @overload
    def __call__(
        self,
        model: Any,
        args: Any = (),
        f: str | os.PathLike[str] | None = None,
        *,
        pieces: Sequence[str],
        **options: Any,
    ) -> OnnxPieces: ...

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> OnnxProgram: ...


def _takes(call: Callable[P, Any]) -> Callable[[Callable[..., Any]], ToOnnx[P]]:
    """A decorator for a function whose keyword arguments are :class:`ExportOptions`; type checkers see the signature of ``call``."""
    return lambda function: with_options(ExportOptions, function)


@_takes(Call)
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
        ConversionError: A converter failed, or returned something else than torch computes.
        VerificationError: ``verify=True`` and the results differ, or the model does not run.
        SaveError: ``f`` can't be written.
    """
    checked = ExportOptions.of(options)
    if checked.pieces is not None:
        return _pieces(model, args, f, checked)
    given = {"model": model, "args": args, "f": f, **options}
    with reported(checked.report, given, to_onnx) as told, watched(checked.profile, checked.progress) as stage:
        plan = pipeline.plan(model, args, f, checked)
        if told is not None:
            told.selected(plan.host)
        stage("capture")
        captured = pipeline.capture(plan)
        if told is not None:
            told.captured(captured)
        stage("conversion")
        program = pipeline.convert(plan, captured, describes_all=told is not None)
        program.profile = stage.profile
        if told is not None:
            told.exported(program, pipeline.packages_of_rewrites(plan.host))
            forget(program.model, full=plan.metadata.nodes)
        if checked.verify:
            stage("verification")
            program.verify()
        if f is not None:
            stage("saving")
            program.save(f, external_data=checked.external_data)
        return program


def _pieces(model: Any, args: Any, folder: Any, options: ExportOptions) -> OnnxPieces:
    """Exports submodules of a model."""
    args, kwargs = arguments.positional_and_named(model, args, options.kwargs)
    with reported(options.report), watched(options.profile, None) as watch:
        chain: OnnxPieces = load_object(_PIECES, "the exporter of pieces")(
            model, args, folder, dataclasses.replace(options, kwargs=kwargs), to_onnx
        )
        chain.profile = watch.profile
    return chain
