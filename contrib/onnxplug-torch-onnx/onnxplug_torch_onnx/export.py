"""``onnxplug.export``: the signature of ``torch.onnx.export``."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.onnx import OnnxExporterError, OperatorExportTypes, TrainingMode

from onnxplug import arguments
from onnxplug.errors import MissingRuleError, NameCountError, OnnxplugError
from onnxplug.exporter import to_onnx
from onnxplug.host import plugins_of_call
from onnxplug.observers import observed, stage
from onnxplug.opsets import resolve_opsets
from onnxplug.packages import load
from onnxplug.verification.ready import check_verifiable
from onnxplug_torch_onnx.artifacts import Artifacts
from onnxplug_torch_onnx.axes import Axes, DynamicAxes, checked_axes, name_given_axes, name_output_axes
from onnxplug_torch_onnx.old_opsets import lower
from onnxplug_torch_onnx.request import Request, warn
from onnxplug_torch_onnx.saving import save, with_parameter_names
from onnxplug_torch_onnx.translations import autograd_rules, kept_operators, registered_rules

if TYPE_CHECKING:
    from onnxplug.program import OnnxProgram


def export(
    model: torch.nn.Module | torch.export.ExportedProgram | torch.jit.ScriptModule | torch.jit.ScriptFunction[Any, Any],
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: dict[str, Any] | None = None,
    verbose: bool | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int | None = None,
    dynamo: bool = True,
    external_data: bool = True,
    dynamic_shapes: dict[str, Any] | tuple[Any, ...] | list[Any] | None = None,
    custom_translation_table: dict[Callable[..., Any], Callable[..., Any]] | None = None,
    report: bool = False,
    optimize: bool = True,
    verify: bool = False,
    profile: bool = False,
    dump_exported_program: bool = False,
    artifacts_dir: str | os.PathLike[str] = ".",
    export_params: bool = True,
    keep_initializers_as_inputs: bool = False,
    dynamic_axes: Mapping[str, Mapping[int, str]] | Mapping[str, Sequence[int]] | None = None,
    training: TrainingMode = TrainingMode.EVAL,
    operator_export_type: OperatorExportTypes = OperatorExportTypes.ONNX,
    do_constant_folding: bool = True,
    custom_opsets: Mapping[str, int] | None = None,
    export_modules_as_functions: bool | Collection[type[torch.nn.Module]] = False,
    autograd_inlining: bool = True,
) -> OnnxProgram | None:
    """Exports a PyTorch model to ONNX, with the arguments of ``torch.onnx.export``; :func:`onnxplug.to_onnx` has fewer.

    docs/coming-from-torch-onnx.md lists how each differs from torch's, and why.

    Args:
        model: A Module, a function, an ``ExportedProgram``, a ScriptModule, a ScriptFunction, or a
            ``torch.onnx.ExportableModule``, which brings its inputs and their names.
        args: Example positional inputs, or one tensor; a dict at the end holds keyword inputs.
        f: File to write, a path or a binary file object; ``None`` writes no file.
        kwargs: Example keyword inputs.
        verbose: ``True`` prints each stage, the exported program and its statistics.
        input_names, output_names: Names of the graph's inputs and outputs, in order. With ``dynamo=False``, further names of
            inputs are names of weights, in the order of ``state_dict()``.
        opset_version: Version of ai.onnx; 21 for ``None``. A model of 9 to 12 is lowered from 13, as far as its
            operators have a form there; an older version gives 13 with a warning.
        dynamo: ``False`` exports as the exporter that was the default before torch 2.9: ``training`` counts, keyword
            inputs are in the order of the signature, the ``symbolic`` of autograd functions translates them, weights
            are stored beside the model only where they are large, and nothing is returned. The model is captured by
            torch.export anyhow.
        external_data: Store the weights beside the model; ``False`` does so only above 1.5 GB.
        dynamic_shapes: Dynamic dimensions, as ``torch.export.export`` takes them, or named by strings. For an
            ``ExportedProgram`` the names of its dynamic dimensions.
        custom_translation_table: Operator to the function that translates it.
        report: Write a report of the export to ``artifacts_dir``, of a failed export too.
        optimize: Fold, share and rewrite; ``False`` gives the plain translation.
        verify: Compare the result with eager PyTorch before it is written; a difference is an error.
        profile: Print a profile of the export; with ``report``, write it to the report instead, and as a file for
            Perfetto and speedscope to ``artifacts_dir``. The program has it as ``program.profile``.
        dump_exported_program: Write the captured program to ``artifacts_dir``.
        artifacts_dir: A folder, made if it doesn't exist.
        export_params: ``False`` leaves parameters and buffers out of the file.
        keep_initializers_as_inputs: List the stored weights among the inputs of the file's graph too.
        dynamic_axes: By names of inputs and outputs, axes and their names (``{"x": {0: "batch"}}``), or axes (``{"x": [0]}``).
        training: With ``dynamo=False``: the mode in which the model is exported. It has no effect otherwise, as in torch: the
            model is exported in the mode that it is in.
        operator_export_type: ``ONNX_FALLTHROUGH`` and ``ONNX_ATEN_FALLBACK`` keep operators without a translation as
            nodes of their namespace's domain, or as ``org.pytorch.aten::ATen``. The other types mean ``ONNX``.
        do_constant_folding: ``False`` has the effect of ``optimize=False``.
        custom_opsets: Versions of the domains that symbolic functions emit.
        export_modules_as_functions: ``True``, or classes of modules: their calls become calls of ONNX functions.
        autograd_inlining: ``False`` has the ``symbolic`` of autograd functions translate them with ``dynamo=True`` too.

    Returns:
        The program, which is a ``torch.onnx.ONNXProgram``; ``None`` with ``dynamo=False``.

    Raises:
        OnnxplugError: As :func:`onnxplug.to_onnx` does; each is a ``torch.onnx.OnnxExporterError`` as well.
    """
    request = Request(
        model=model,
        args=args,
        f=f,
        kwargs=kwargs,
        verbose=verbose,
        input_names=input_names,
        output_names=output_names,
        opset_version=opset_version,
        dynamo=dynamo,
        external_data=external_data,
        dynamic_shapes=dynamic_shapes,
        custom_translation_table=custom_translation_table,
        report=report,
        optimize=optimize,
        verify=verify,
        profile=profile,
        dump_exported_program=dump_exported_program,
        artifacts_dir=artifacts_dir,
        export_params=export_params,
        keep_initializers_as_inputs=keep_initializers_as_inputs,
        dynamic_axes=dynamic_axes,
        training=training,
        operator_export_type=operator_export_type,
        do_constant_folding=do_constant_folding,
        custom_opsets=custom_opsets,
        export_modules_as_functions=export_modules_as_functions,
        autograd_inlining=autograd_inlining,
    )
    program = run(request, {})
    return program if request.dynamo else None


def run(request: Request, options: Mapping[str, Any], *, verify_drawn: bool = True) -> OnnxProgram:
    """Runs the export of a call.

    Args:
        options: Arguments of :func:`onnxplug.to_onnx` that ``torch.onnx.export`` lacks, and ``verify``.
        verify_drawn: Whether verification that only the call asks for also uses inputs drawn at random.

    Returns:
        The program, also with ``dynamo=False``.
    """
    with _errors_of_torch():
        request.settle()
        arguments.check_destination(request.f)
        exporter = _Exporter(request, options, verify_drawn)
        artifacts = Artifacts(request)
        reports = [load("report=")(artifacts.write)] if request.report else []
        profiles = [load("profile=")(True)] if request.profile else []
        with observed(*(observer for observer in reports if observer is not None)):
            try:
                with (
                    observed(*profiles),
                    stage("torch.onnx.export", subject=(vars(request), export)) as whole,
                ):
                    program = whole.result = exporter.run(artifacts)
            except Exception as error:
                artifacts.finish(None, error, error.profile if request.profile else None)  # type: ignore[attr-defined]
                raise
            artifacts.finish(program, None, program.profile if request.profile else None)
        return program


class _Exporter:
    """One export."""

    def __init__(self, request: Request, options: Mapping[str, Any], verify_drawn: bool) -> None:
        self.request = request
        requested = options.get("verify", False)
        self._verifies_example = request.verify and not requested and not verify_drawn
        self._verifies = requested or (request.verify and verify_drawn)
        self._verifies_lowered = self._verifies and request.lowered_to is not None
        if self._verifies_example:
            check_verifiable(resolve_opsets(request.opset_version)[""])
        self._is_captured = isinstance(request.model, torch.export.ExportedProgram)
        versions = request.custom_opsets or {}
        plugins, prefer = options.get("plugins"), options.get("prefer")
        registry = options.get("registry") or functools.partial(plugins_of_call, plugins=plugins, prefer=prefer)
        table, _ = registry(call_rules=())
        self._rules = [*options.get("rules", ()), *registered_rules(table, versions)]
        # Autograd functions are kept whole in torch.export's non-strict mode alone.
        if (not request.dynamo or not request.autograd_inlining) and not options.get("strict"):
            self._rules += autograd_rules(versions)
        self._axes: dict[str, Axes] = checked_axes(request.dynamic_axes) if request.dynamic_axes else {}
        request.inputs_in_order()
        self._options: dict[str, Any] = {
            "mutations": "ignore",
            **{name: value for name, value in options.items() if name not in ("plugins", "prefer", "rules")},
            "registry": lambda rules: registry(call_rules=rules),
            "custom_translation_table": request.custom_translation_table,
            "functions": request.functions() or options.get("functions"),
            "optimize": request.optimize and request.do_constant_folding and options.get("optimize", True),
            "verify": self._verifies if request.lowered_to is None else False,
            "kwargs": request.kwargs,
            "opset_version": request.opset_version,
            "dynamic_shapes": self._dynamic_shapes(),
        }

    def _dynamic_shapes(self) -> Any:
        request = self.request
        if self._is_captured:
            if self._axes:
                warn("dynamic_axes has no effect: the shapes of an ExportedProgram are fixed already")
            return None
        if request.dynamic_axes is None:
            return request.dynamic_shapes
        return DynamicAxes(self._axes, request.input_names, request.output_names, strict=request.dynamo)

    def run(self, artifacts: Artifacts) -> OnnxProgram:
        """Exports, names and saves."""
        request = self.request
        with _in_mode(request.model, request.training) if not request.dynamo else contextlib.nullcontext():
            program = self._exported(artifacts)
        if self._axes and not self._is_captured:
            outputs = {str(value.name) for value in program.model.graph.outputs}
            of_inputs = {name: axes for name, axes in self._axes.items() if name not in outputs}
            name_output_axes(program, self._axes, of_inputs)
        if self._is_captured and request.dynamic_shapes:
            name_given_axes(program, request.dynamic_shapes)
        if request.lowered_to is not None:
            lower(program.model, request.lowered_to)
        if self._verifies_example or self._verifies_lowered:
            artifacts.stages("verification")
            if self._verifies_example:
                program.verify(seeds=())
            else:
                program.verify()
        if request.f is not None:
            artifacts.stages("saving")
            save(program, request)
        return program

    def _exported(self, artifacts: Artifacts) -> OnnxProgram:
        """The program, by as many attempts as it takes.

        An attempt may find more or fewer names than values, or operators without a translation to keep as nodes.
        """
        request = self.request
        names = {"input_names": request.input_names, "output_names": request.output_names}
        spare: dict[str, Sequence[str]] = {}
        kept: set[str] = set()
        while True:
            try:
                with warnings.catch_warnings():
                    if request.export_modules_as_functions is True:  # a module of which no node is left is no mistake
                        warnings.filterwarnings("ignore", "no function was made of")
                    program = to_onnx(
                        request.model,
                        request.args,
                        rules=self._rules,
                        progress=artifacts.stages,
                        **names,
                        **self._options,
                    )
                break
            except NameCountError as error:
                named = names[error.argument] or ()
                outputs = error.argument == "output_names"
                if len(named) < error.count:
                    if error.nested and not outputs:  # which of the parts are meant is not known
                        raise
                    rest = (f"{name}_1" if name in named else name for name in error.called[len(named) :])
                    names[error.argument] = [*named, *rest]
                    continue
                if outputs and not request.dynamo:
                    raise
                spare[error.argument] = [*named[error.count :], *spare.get(error.argument, ())]
                names[error.argument] = named[: error.count]
            except MissingRuleError as error:
                added = kept_operators(error.missing, request.operator_export_type)
                if not added or not {rule.op for rule in added} - kept:
                    raise
                kept |= {rule.op for rule in added}
                self._rules += added
        for argument, names_ in spare.items():
            if argument == "input_names" and not request.dynamo:
                with_parameter_names(program, request.model, names_)
            else:
                warn(f"{argument} has {len(names_)} more names than the graph has values: {', '.join(names_)}")
        return program


@contextlib.contextmanager
def _in_mode(model: Any, mode: Any) -> Iterator[None]:
    """Holds a module in training or evaluation mode; afterwards each of its submodules is in its earlier mode again."""
    if not isinstance(model, torch.nn.Module) or mode is TrainingMode.PRESERVE or mode == TrainingMode.PRESERVE:
        yield
        return
    before = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    model.train(mode == TrainingMode.TRAINING)
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@contextlib.contextmanager
def _errors_of_torch() -> Iterator[None]:
    """Makes each OnnxplugError a ``torch.onnx.OnnxExporterError`` as well, for programs that catch the latter."""
    try:
        yield
    except OnnxplugError as error:
        with contextlib.suppress(TypeError):  # a plugin's error of another layout
            cls: Any = type(error)
            error.__class__ = _of_torch_too(cls)
        raise


@functools.cache
def _of_torch_too(cls: type[OnnxplugError]) -> type[OnnxplugError]:
    if issubclass(cls, OnnxExporterError):
        return cls

    def reduce(self: Any) -> Any:
        """Pickles the error as onnxplug's own class, for other processes."""
        return (cls, *BaseException.__reduce__(self)[1:])

    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": reduce,
    }
    return type(cls.__name__, (cls, OnnxExporterError), body)
