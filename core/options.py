"""ExportOptions: every option of an export, once: its default, its type, its help, and its flag on the command line.

The signature and the docstring of :func:`onnxplug.to_onnx`, the options of :func:`onnxplug.as_torch_onnx` and the flags of
``onnxplug export`` are made from them. Nothing here imports torch.
"""

# ruff: noqa: RUF009

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from onnxplug.errors import UsageError
from onnxplug.kinds import check_flags, check_kind, check_lists, check_mappings
from onnxplug.observers import Observer
from onnxplug.registry.target import DEFAULT_RUNTIME

if TYPE_CHECKING:
    from onnxplug import Functions, OnnxPieces
    from onnxplug.host import PluginHost
    from onnxplug.metadata import Metadata
    from onnxplug.program import OnnxProgram
    from onnxplug.registry.registry import OnnxRegistry
    from onnxplug.registry.rule import Rule

    #: A registry, and its plugin manager.
    Selected = tuple[OnnxRegistry, PluginHost]

#: The headings of options in ``--help``.
NAMES, WEIGHTS, GRAPH = "Inputs and outputs", "Weights", "The ONNX graph"
CAPTURE, CHECKS = "Capture by torch.export", "Verification and reports"


@dataclass(frozen=True)
class Flag:
    """An option on the command line.

    Attributes:
        names: As ``typer`` takes them: ``"--exact"``, ``"--optimize/--no-optimize"``.
        help: Its text in ``--help``.
        metavar: The placeholder for its value in ``--help``; empty by default, as for a flag without a value.
        group: Its heading in ``--help``.
    """

    names: str
    help: str
    metavar: str = ""
    group: str | None = None


@dataclass(frozen=True)
class Option:
    """The description of a field of :class:`ExportOptions`, beyond its name, type and default.

    Attributes:
        help: A paragraph of ``to_onnx``'s docstring.
        flag: Its flag on the command line.
        choices: The values that it takes, each with its meaning; empty where the type tells them.
        takes: The classes of its values and their names in words, where they are checked here and the annotation is no flag
            or dict.
    """

    help: str
    flag: Flag | None = None
    choices: Mapping[str, str] = field(default_factory=dict)
    takes: tuple[tuple[type, ...], str] | None = None


def _option(default: Any, help: str, flag: Flag | None = None, **texts: Any) -> Any:
    return field(default=default, metadata={"option": Option(help, flag, **texts)})


_CAPTURES = {"calls": "one of equal operator calls is traced", "whole": "each is"}
_MUTATIONS = {
    "outputs": "the new values of inputs and buffers that the model writes are outputs",
    "ignore": "they are left away",
}


@dataclass(frozen=True, kw_only=True)
class _OptionsOfTorch:
    """The options that ``torch.onnx.export`` has too."""

    kwargs: Mapping[str, Any] | None = _option(None, "Example keyword inputs.")
    examples: Sequence[Any] | None = _option(
        None,
        "Inputs of several calls, each in the form of ``args`` or a dict of keyword inputs: sizes and ints that differ among the "
        "calls are dynamic, all others static, and verification runs on these inputs too. ``args`` and ``kwargs``, if present, are "
        "the first call.",
    )
    dynamic_shapes: Any = _option(
        None,
        "Dynamic dimensions, in every form that ``torch.export.export`` takes; a dimension may also be named by a string "
        '(``{"x": {0: "batch"}}``), and so may an int that should stay an input (``{"start": "past"}``). The keys are names of the '
        "model's arguments, or names of ``input_names``.",
    )
    input_names: Sequence[str] | None = _option(
        None,
        "Names of the graph's inputs, in order: a name for each input, or for each argument, whose parts become ``past_0_key`` "
        "and so on. Fewer are an error.",
        Flag("--input-names", "Names of the inputs, separated by commas", metavar="NAMES", group=NAMES),
    )
    output_names: Sequence[str] | None = _option(
        None,
        "Names of the graph's outputs, in order: a name for each output, or for each result. Fewer are an error if results are "
        "nested.",
        Flag("--output-names", "Names of the outputs, separated by commas", metavar="NAMES", group=NAMES),
    )
    opset_version: int | Mapping[str, int] | None = _option(
        None,
        'Version of ai.onnx, or of several domains (``{"": 21, "com.microsoft": 1}``). It is emitted exactly.',
        Flag("--opset", "21, or 21,com.microsoft=1", metavar="N", group=GRAPH),
    )
    custom_translation_table: Mapping[Any, Any] | None = _option(
        None,
        "Operator to function (or several, tried in order), as for ``torch.onnx.export``: onnxscript functions, plain functions "
        "over an onnxscript opset, or converters ``(g, node)``. Each becomes a rule.",
    )
    optimize: bool = _option(
        True,
        "Fold, share and rewrite; ``False`` gives the plain translation.",
        Flag("--optimize/--no-optimize", "Simplify and rewrite the graph", group=GRAPH),
    )


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """The options that ``torch.onnx.export`` lacks and that several exports may share, and ``verify``."""

    present_names: bool = _option(
        False,
        "Name an output that is the new value of an input after the input: ``present.0.key`` for ``past_key_values.0.key``, "
        "``present_state`` for ``state``. Such outputs are results that the model returns under the input's name, and inputs that "
        "the model writes.",
        Flag(
            "--present-names",
            "Call the new value of the input past_key_values… present…, of state present_state",
            group=NAMES,
        ),
    )
    rules: Iterable[Rule] = _option(
        (), "Rules of this export alone; they go before plugins' rules and the builtin rules."
    )
    runtime: Iterable[Any] = _option(
        (),
        "``OrtLibrary`` and ``ReferenceOp`` objects that run this export's custom operators; they go before the plugins'.",
    )
    plugins: Sequence[str] | None = _option(
        None, "Names of the plugins to use; ``None`` means all installed plugins, ``[]`` only the builtin rules."
    )
    prefer: Mapping[str, str] | None = _option(
        None, "Qualified operator name to the distribution whose rule wins where two claim it."
    )
    target: str | None = _option(
        DEFAULT_RUNTIME,
        'The runtime that the model is made for: ``"onnxruntime"``, or a part of it, ``"onnxruntime:cpu"`` (operators without a '
        "CPU kernel for a dtype are computed in float32), or a name that a plugin knows. ``None`` gives portable ONNX, without "
        "forms that serve the kernels of a single runtime.",
        Flag(
            "--target",
            "Runtime that runs the model: onnxruntime, onnxruntime:cpu, …; none: portable ONNX",
            metavar="NAME",
            group=GRAPH,
        ),
    )
    exact: bool = _option(
        False,
        "NaN, infinities, ties and integers beyond 2**53 as in PyTorch also where that takes more than the plain ONNX operator; "
        "docs/numerics.md lists the differences without it, and the costs.",
        Flag(
            "--exact", "NaN, infinities, ties and huge integers as in PyTorch, whatever it costs in time", group=GRAPH
        ),
    )
    functions: Functions | Iterable[type[Any] | str] | bool | None = _option(
        None,
        "``True``: modules that the model repeats become ONNX functions, called with their weights. Classes of modules, or their "
        "names: modules of these classes do. ``Functions(classes, domain)`` also sets the domain.",
        Flag("--functions", "Modules that the model repeats become ONNX functions", group=GRAPH),
    )
    verify: bool = _option(
        False,
        "Compare the result with eager PyTorch, on these inputs and on generated inputs.",
        Flag("--verify", "Compare with PyTorch at several sizes", group=CHECKS),
    )
    strict: bool | None = _option(
        None,
        "``torch.export``'s mode; ``None`` tries the non-strict mode first.",
        Flag("--strict/--no-strict", "torch.export's mode", group=CAPTURE),
    )
    capture: str = _option(
        "calls",
        '``"calls"`` traces the first of the operator calls that are equal in kind, and repeats its nodes for the others; '
        '``"whole"`` traces each call. The program is the same.',
        Flag(
            "--capture", "calls: one of equal operator calls is traced; whole: each is", metavar="MODE", group=CAPTURE
        ),
        choices=_CAPTURES,
    )
    mutations: str = _option(
        "outputs",
        '``"outputs"``: the new values of buffers and inputs that the model writes are outputs, ``NAME_out``, after its results. '
        '``"ignore"`` leaves them away, as ``torch.onnx.export`` does.',
        Flag(
            "--mutations",
            "outputs: what the model writes is among the outputs; ignore: it is left away",
            metavar="KIND",
            group=GRAPH,
        ),
        choices=_MUTATIONS,
    )
    checks: bool = _option(
        False,
        "Put the known facts about sizes into the graph too: ranges, equal names, expressions, and the conditions on sizes that "
        "the model's code branches on. The model fails at run time where a fact does not hold, and the message names it.",
        Flag(
            "--checks", "The model fails where sizes are not what the export knows of them, and says why", group=GRAPH
        ),
    )
    decompositions: Mapping[Any, Callable[..., Any]] | str | None = _option(
        None,
        "Operators that torch decomposes in the captured program before it is converted: a table from overloads to functions, as "
        'for ``ExportedProgram.run_decompositions``, or ``"core"`` for torch\'s own table of all operators outside of Core ATen. '
        "``None`` decomposes the program only where nothing else translates it.",
        Flag(
            "--decompositions",
            "core: torch decomposes the program into Core ATen before it is converted",
            metavar="core",
            group=CAPTURE,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(CommonOptions, _OptionsOfTorch):
    """The keyword arguments of :func:`onnxplug.to_onnx`, whose docstring explains each.

    Raises:
        UsageError: A value is of another kind than the option takes.
    """

    report: bool | str | os.PathLike[str] = _option(
        False,
        "Make a report: ``program.report``, or ``error.report`` of an export that fails. With the path of a folder it is also "
        "written there, as Markdown, HTML, SARIF and JSON; docs/reports.md describes it.",
        Flag(
            "--report",
            "Write a report to DIR, of a failed export too: report.html, report.md, report.sarif, report.json",
            metavar="DIR",
            group=CHECKS,
        ),
        takes=((bool, str, os.PathLike), "True, False or a folder"),
    )
    profile: bool | str | os.PathLike[str] = _option(
        False,
        "Record the times: ``program.profile``, or ``error.profile`` of an export that fails. With the name of a file the profile "
        "is also written there, for Perfetto and speedscope; docs/profiling.md explains it.",
        Flag(
            "--profile",
            "Print where the time goes; to FILE.json also write it, for Perfetto and speedscope",
            metavar="[FILE.json]",
            group=CHECKS,
        ),
    )
    metadata: str | Metadata | None = _option(
        None,
        'Metadata about the origin of nodes: ``"none"``, ``"short"`` (modules, operators and source lines), or ``"full"`` (all '
        'that ``torch.onnx.export`` writes, and the rules); ``Metadata("full", absolute_paths=True)`` names files by their whole '
        'paths. ``None``: the environment variable ``ONNXPLUG_METADATA``, else ``"short"``.',
        Flag(
            "--metadata",
            "What the model says of where it comes from: none; short: modules, operators, source lines; full: all that "
            "torch.onnx.export writes, rules, the captured program",
            metavar="LEVEL",
            group=GRAPH,
        ),
    )
    external_data: bool | None = _option(
        None,
        "Save the weights in a separate file; ``None`` decides by size.",
        Flag(
            "--external-data/--single-file",
            "Store the weights in a file beside the model; by default only large ones",
            group=WEIGHTS,
        ),
    )
    dtype: str | None = _option(
        None,
        '``"float16"`` or ``"bfloat16"``: weights and values become of this type. Nodes that overflow on the example inputs, need '
        "more digits, or can't be of this type stay in float32; ``program.precision`` has each of them with the reason.",
        Flag("--dtype", "float16 or bfloat16: weights and values become of this type", metavar="TYPE", group=WEIGHTS),
    )
    keep_io: bool = _option(
        True,
        "With ``dtype``: inputs and outputs stay in float32.",
        Flag("--keep-io/--no-keep-io", "With --dtype: inputs and outputs stay in float32", group=WEIGHTS),
    )
    quantize: str | None = _option(
        None,
        '``"dynamic"``: weights and activations of 8 bits, whose scales are computed when the model runs; ``"qdq"``: with scales '
        'from ``calibrate``\'s data; ``"int4"``: weights of 4 bits. Settings follow a colon: ``"qdq:method=percentile"``, '
        '``"int4:block_size=64,symmetric=no"``; docs/precision.md lists them.',
        Flag(
            "--quantize",
            "dynamic, qdq or int4; with settings: int4:block_size=64,symmetric=no",
            metavar="KIND",
            group=WEIGHTS,
        ),
    )
    calibrate: Sequence[Any] | str | os.PathLike[str] | None = _option(
        None,
        "Inputs of several calls, in the form of ``examples``, or a ``.npz`` file, or a folder of such files: the data of "
        '``quantize="qdq"``, and additional inputs for ``dtype``.',
        Flag(
            "--calibrate",
            "A .npz file with inputs by name, or a folder of such, for --quantize qdq and --dtype",
            metavar="DATA",
            group=WEIGHTS,
        ),
    )
    pieces: Sequence[str] | None = _option(
        None,
        "Paths of submodules: each becomes a separate model, with its inputs from a run of the model; ``f`` is then a folder, "
        "which also gets the program that chains them.",
        Flag(
            "--pieces",
            "Submodules, separated by commas: each becomes a model in the folder that --output names",
            metavar="NAMES",
            group=GRAPH,
        ),
    )
    progress: Callable[[str], Any] | bool | None = _option(
        None,
        "``True`` shows the running stage and its seconds on standard error, if that is a terminal. A function is called with the "
        "name of each stage as it begins.",
    )
    observers: Sequence[Observer] = _option(
        (),
        ":class:`onnxplug.Observer` objects, which receive the events of the export: its stages, rules and rewrites.",
    )
    registry: Selected | Callable[[Sequence[Rule]], Selected] | None = _option(
        None,
        "A registry and its plugin manager, instead of the selection by ``plugins`` and ``prefer``; or a function that makes them "
        "with the rules of the call.",
    )

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            _check(item, getattr(self, item.name))
        check_lists(plugins=() if self.plugins is None else self.plugins, observers=self.observers)
        for observer in self.observers:
            if not isinstance(observer, Observer):
                raise UsageError(f"observers= takes objects of onnxplug.Observer, got {observer!r}")
        if self.pieces is not None and (self.input_names or self.output_names or self.examples is not None):
            raise UsageError(
                "input_names=, output_names= and examples= can't be given together with pieces=",
                hint="A piece's inputs and outputs have the names that it gives them; dynamic_shapes= names dynamic dimensions.",
            )
        if self.pieces is not None and (self.dtype is not None or self.quantize is not None):
            raise UsageError(
                "dtype= and quantize= can't be given together with pieces=", hint="onnxplug convert FILE converts each."
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ExportOptions:
        """The options of a call.

        Args:
            arguments: By name.

        Raises:
            UsageError: There is no such option, or its value is of another kind.
        """
        for name in arguments:
            if name not in cls.__dataclass_fields__:
                raise _unknown(name)
        return cls(**arguments)

    def common(self) -> dict[str, Any]:
        """The options that exports of several models may share, by name: all but the options of a model's inputs and files."""
        own = set(
            "kwargs examples dynamic_shapes input_names output_names verify external_data pieces profile report".split()
        )
        own |= set("observers dtype keep_io quantize calibrate".split())
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self) if item.name not in own}


def option(name: str) -> Option:
    """The description of an option of :class:`ExportOptions`."""
    described: Option = ExportOptions.__dataclass_fields__[name].metadata["option"]
    return described


def _check(item: dataclasses.Field[Any], value: Any) -> None:
    """Checks the kind of a value against the annotation or :class:`Option`."""
    described: Option = item.metadata["option"]
    kinds = set(re.sub(r"\[.*?\]", "", str(item.type)).split(" | "))
    if kinds == {"bool"}:
        check_flags(**{item.name: value})
    elif kinds == {"bool", "None"}:
        check_kind(item.name, value, (bool, type(None)), "True, False or None")
    elif kinds == {"Mapping", "None"}:
        check_mappings(**{item.name: value})
    elif described.takes is not None:
        check_kind(item.name, value, *described.takes)
    elif described.choices and value not in list(described.choices):
        words = " or ".join(f"{choice!r} ({meaning})" for choice, meaning in described.choices.items())
        raise UsageError(f"{item.name}= takes {words}, not {value!r}")


#: The replacement of arguments of torch.onnx.export that to_onnx lacks.
_ARGUMENTS_OF_TORCH = {
    "dynamic_axes": "dynamic_shapes, by the names of the model's own inputs: {'x': {0: 'batch'}}",
    "example_inputs": "args and kwargs",
    "verbose": "progress=True, or print(program)",
    "do_constant_folding": "optimize=False, for the plain translation",
    "training": "model.train() or model.eval() before the export",
    "custom_opsets": "opset_version, as {'': 21, 'com.acme': 1}",
    "opset": "opset_version",
    "input_shapes": "args, example inputs",
    "output_path": "f",
    "path": "f",
    "export_params": "program.model.graph.initializers, which can be changed before program.save()",
    "keep_initializers_as_inputs": "program.apply_weights(), to exchange weights",
    "autograd_inlining": "rules=[compat.autograd_function(...)], to keep a function whole",
    "operator_export_type": "rules=, for operators without a translation",
    "dump_exported_program": "program.exported_program",
    "artifacts_dir": "report, the path of a folder",
    "export_modules_as_functions": "functions",
    "optimizer": "optimize",
    "dynamo": "nothing: the model is always captured by torch.export",
    "fallback": "nothing: the model is always captured by torch.export",
}


def _unknown(name: str) -> UsageError:
    """The error for an argument that ``to_onnx`` doesn't have, with the argument that is meant."""
    import torch

    near = difflib.get_close_matches(name, ["model", "args", "f", *ExportOptions.__dataclass_fields__], 1)
    hint = (
        f"Use {_ARGUMENTS_OF_TORCH[name]}."
        if name in _ARGUMENTS_OF_TORCH
        else f"Did you mean {near[0]!r}?"
        if near
        else None
    )
    if name in inspect.signature(torch.onnx.export).parameters:
        hint = f"{hint or ''} onnxplug.export takes every argument of torch.onnx.export.".lstrip()
    return UsageError(f"to_onnx has no argument {name!r}", hint=hint)


# -- signatures --------------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from onnxplug import Functions, OnnxPieces

    @dataclass(frozen=True)
    class Call(ExportOptions):
        """The arguments of :func:`onnxplug.to_onnx`, for type checkers."""

        model: Any
        args: Any = ()
        f: str | os.PathLike[str] | None = None


def with_options(cls: type[CommonOptions], function: Callable[..., Any]) -> Any:
    """Gives a function that takes ``**options`` the signature and the docstring of these options.

    Args:
        cls: The dataclass of the options.
        function: The function; ``{options}`` in its docstring is replaced by theirs.
    """
    fields = dataclasses.fields(cls)
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    named = [
        inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=item.type)
        for item in fields
    ]
    function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
    if function.__doc__ is not None:
        texts = [
            textwrap.fill(
                f"{i.name}: {i.metadata['option'].help}",
                120,
                initial_indent=" " * 8,
                subsequent_indent=" " * 12,
                break_on_hyphens=False,
            )
            for i in fields
        ]
        function.__doc__ = function.__doc__.replace("{options}", "\n".join(texts).lstrip())
    return function


P = ParamSpec("P")


class ToOnnx(Protocol[P]):
    """The type of :func:`onnxplug.to_onnx`."""

    @overload  # a call with pieces= fits this overload too
    def __call__(  # type: ignore[overload-overlap]
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


def exporting(call: Callable[P, Any]) -> Callable[[Callable[..., Any]], ToOnnx[P]]:
    """A decorator for a function that takes :class:`ExportOptions`; type checkers see the signature of ``call``."""
    return lambda function: with_options(ExportOptions, function)
