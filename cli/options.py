"""Options that commands share: the options of an export, made from :class:`~onnxplug.options.ExportOptions`, and the selection of
plugins, from the command line and the user's ``pyproject.toml``."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from onnxplug.errors import UsageError
from onnxplug.observers import stage
from onnxplug.options import GRAPH, NAMES, WEIGHTS, ExportOptions, option
from onnxplug.text import type_with_article

_PLUGINS = "Plugins"


def _option(names: str, help: str, metavar: str = "", group: str | None = None) -> Any:
    return typer.Option(*names.split(" "), help=help, metavar=metavar, rich_help_panel=group)


def flag(name: str) -> Any:
    """The command line's option for an option of ``to_onnx``."""
    described = option(name).flag
    assert described is not None, f"{name} has no flag"
    return _option(described.names, described.help, described.metavar, described.group)


NoPlugin = Annotated[
    list[str] | None, _option("--no-plugin", "Leave a plugin out; it is not imported", "NAME", _PLUGINS)
]
OnlyPlugin = Annotated[
    list[str] | None, _option("--only-plugin", "Use only this plugin and the builtin rules", "NAME", _PLUGINS)
]
RequirePlugin = Annotated[
    list[str] | None, _option("--require-plugin", "'NAME>=1.2': fail without it", "SPEC", _PLUGINS)
]
Prefer = Annotated[
    list[str] | None, _option("--prefer", "'mylib::nms=DISTRIBUTION': whose rule wins", "RULE", _PLUGINS)
]
RuntimeOption = Annotated[str, flag("target")]
ExactOption = Annotated[bool, flag("exact")]
TargetArgument = Annotated[
    str,
    typer.Argument(
        help="package.module:callable, file.py:callable, FILE.pt2 or timm:NAME. All of these are code, which is run: FILE.pt2 too, "
        "which holds pickled Python"
    ),
]
InputOption = Annotated[
    list[str] | None,
    _option(
        "--input", "'x=float32[2,3,224,224]', 'ids=int64[2,8]{0..99}' or 'k=3'; repeat for each input", "SPEC", NAMES
    ),
]
PretrainedOption = Annotated[
    bool, _option("--pretrained", "Trained weights for timm:NAME instead of random ones", group=WEIGHTS)
]
DynamicOption = Annotated[
    list[str] | None, _option("--dynamic", "'x=batch,_,_,_': names of dynamic axes", "SPEC", NAMES)
]
MetadataOption = Annotated[str | None, flag("metadata")]
AbsolutePathsOption = Annotated[
    bool, _option("--absolute-paths", "The metadata name source files by their whole paths", group=GRAPH)
]
ReportOption = Annotated[Path | None, flag("report")]
PiecesOption = Annotated[str | None, flag("pieces")]
TritonOption = Annotated[
    str | None,
    _option(
        "--triton",
        "With --pieces: the folder becomes a model repository of Triton, whose ensemble NAME chains them",
        "NAME",
        GRAPH,
    ),
]
FunctionsOption = Annotated[bool, flag("functions")]
FunctionClassesOption = Annotated[
    str | None,
    _option("--function-classes", "'Block,Attention': modules of these classes become ONNX functions", "NAMES", GRAPH),
]
FunctionDomainOption = Annotated[
    str | None, _option("--function-domain", "Domain of these functions; onnxplug.modules by default", "DOMAIN", GRAPH)
]
WeightsOption = Annotated[
    list[Path] | None,
    _option(
        "--weights",
        "File of the weights (.safetensors, .bin, .pt, .index.json) or its folder; repeat for several. The model itself is "
        "made without numbers",
        "FILE",
        WEIGHTS,
    ),
]
StrictWeightsOption = Annotated[
    bool | None,
    _option(
        "--strict-weights/--no-strict-weights",
        "Whether --weights must have every weight of the model and no other",
        group=WEIGHTS,
    ),
]
ShardOption = Annotated[
    str | None, _option("--shard", "2GB: weights go into files beside the model of at most this size", "SIZE", WEIGHTS)
]
ExternalOption = Annotated[
    str | None,
    _option(
        "--external",
        "safetensors: the model refers to the weights in those files, and copies none it needn't",
        "KIND",
        WEIGHTS,
    ),
]
DebugOption = Annotated[bool, _option("--debug", "Show tracebacks")]
StrictPlugins = Annotated[
    bool, _option("--strict-plugins", "A broken plugin or a refused rule is an error, not a warning", group=_PLUGINS)
]


def parse_runtime(text: str) -> str | None:
    """The runtime that ``--target`` names; ``none`` is portable ONNX."""
    return None if text.lower() == "none" else text


@dataclass
class Choice:
    """The values of one command line's flags."""

    only: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    require: list[str] = field(default_factory=list)
    prefer: list[str] = field(default_factory=list)
    strict: bool = False
    debug: bool = False

    def reset(self, debug: bool = False) -> None:
        """Forgets the last command line."""
        self.only, self.without, self.require, self.prefer = [], [], [], []
        self.strict, self.debug = False, debug

    def remember(
        self,
        no_plugin: list[str] | None = None,
        only_plugin: list[str] | None = None,
        require_plugin: list[str] | None = None,
        prefer: list[str] | None = None,
        strict_plugins: bool = False,
        debug: bool = False,
    ) -> None:
        """These flags mean the same before and after the subcommand."""
        self.without += no_plugin or []
        self.only += only_plugin or []
        self.require += require_plugin or []
        self.prefer += prefer or []
        self.strict = self.strict or strict_plugins
        self.debug = self.debug or debug


choice = Choice()


def _debug_flag(debug: DebugOption = False) -> None:
    """The parameter that :func:`debug_option` adds."""


def _flags(
    no_plugin: NoPlugin = None,
    only_plugin: OnlyPlugin = None,
    require_plugin: RequirePlugin = None,
    prefer: Prefer = None,
    strict_plugins: StrictPlugins = False,
    debug: DebugOption = False,
) -> None:
    """The parameters that :func:`plugin_options` adds."""


def debug_option(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command ``--debug``; the function itself does not see it."""
    return _with_flags(function, _debug_flag)


def plugin_options(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the plugin flags and ``--debug``; the function itself does not see them."""
    return _with_flags(function, _flags)


# -- options of to_onnx ------------------------------------------------------------------------------------------------

#: The parameters of a command for options whose names have another meaning there.
_PARAMETERS = {"target": "runtime", "opset_version": "opset"}


def to_onnx_options(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for commands that export: they have the flags of these options, whose values they get as ``options``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        flags = [_parameter(name) for name in names]
        hints = get_type_hints(function, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for p in inspect.signature(function).parameters.values()
            if p.name != "options"
        ]

        @functools.wraps(function)
        def command(**values: Any) -> Any:
            options = {name: _read(name, values.pop(p.name)) for name, p in zip(names, flags, strict=True)}
            return function(**values, options=options)

        return _with_signature(command, [*own, *flags])

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    described = ExportOptions.__dataclass_fields__[name]
    kinds: dict[Any, Any] = {"bool": bool, "bool | None": bool | None, "str": str}
    return inspect.Parameter(
        _PARAMETERS.get(name, name),
        inspect.Parameter.KEYWORD_ONLY,
        default=described.default,
        annotation=Annotated[kinds.get(described.type, str | None), flag(name)],
    )


def _read(name: str, value: Any) -> Any:
    """The value of an option of ``to_onnx`` from a text of the command line."""
    if name == "opset_version":
        from onnxplug.cli.inputs import parse_opset

        return parse_opset(value)
    if name == "target":
        return parse_runtime(value)
    if name in ("input_names", "output_names"):
        return value.split(",") if value else None
    return value


def _with_signature(command: Any, parameters: Sequence[inspect.Parameter]) -> Callable[..., Any]:
    del command.__wrapped__
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _with_flags(function: Callable[..., None], described: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(described, include_extras=True)
    flags = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(described).parameters.values()
    ]
    own_hints = get_type_hints(function, include_extras=True)
    own = [
        p.replace(annotation=own_hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
    ]

    @functools.wraps(function)
    def command(**values: Any) -> None:
        choice.remember(**{p.name: values.pop(p.name) for p in flags})
        function(**values)

    return _with_signature(command, [*own, *flags])


# -- pyproject.toml ----------------------------------------------------------------------------------------------------

_LISTS = ("no-plugin", "only-plugin", "require-plugin")
KEYS = (*_LISTS, "prefer", "strict-plugins")


def read_settings(folder: Path) -> dict[str, Any]:
    """``[tool.onnxplug]`` of the nearest ``pyproject.toml`` upwards that has it; keys are the flags' names.

    Raises:
        UsageError: The file is not TOML, or a key is unknown or of the wrong type; the message names the file.
    """
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if not path.is_file():
            continue
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError, RecursionError) as error:
            raise UsageError(f"{path} can't be read: {error}") from None
        if not isinstance(table, Mapping):
            raise UsageError(f"{path} can't be read: tool is {type_with_article(table)}, not a table")
        table = table.get("onnxplug")
        if table is not None:
            return _checked_settings(table, path)
    return {}


def _checked_settings(table: Any, path: Path) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise UsageError(f"{path}: tool.onnxplug must be a table")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        where = f"{path}: [tool.onnxplug] {key}"
        if key not in KEYS:
            raise UsageError(f"{where} is unknown", hint=f"The keys are {', '.join(KEYS)}.")
        if key == "strict-plugins":
            if not isinstance(value, bool):
                raise UsageError(f"{where} must be true or false, got {value!r}")
        elif key == "prefer" and isinstance(value, Mapping):
            value = [f"{op}={distribution}" for op, distribution in value.items()]
        else:
            value = [value] if isinstance(value, str) else value
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                raise UsageError(f"{where} must be a list of strings, got {value!r}")
        settings[key] = value
    return settings


# -- the selected plugins and rules ------------------------------------------------------------------------------------


def selection() -> Any:
    """The plugins that the flags, ``ONNXPLUG_PLUGINS`` and ``pyproject.toml`` select; the first of these wins."""
    from onnxplug.plugins.records import Selection

    settings = read_settings(Path.cwd())
    chosen = Selection.from_environment(choice.only or None)
    only = chosen.only
    if only is None and "only-plugin" in settings:
        only = tuple(settings["only-plugin"])
    configured = [name for name in settings.get("no-plugin", ()) if name not in choice.only]
    return Selection(
        only,
        tuple(dict.fromkeys((*chosen.without, *configured, *choice.without))),
        tuple(dict.fromkeys((*settings.get("require-plugin", ()), *choice.require))),
        choice.strict or settings.get("strict-plugins", False),
    )


def preferences() -> dict[str, str]:
    """The preferences of ``--prefer``, which override those of ``pyproject.toml``.

    Raises:
        UsageError: A preference isn't written as ``operator=distribution``.
    """
    distributions = {}
    for text in (*read_settings(Path.cwd()).get("prefer", ()), *choice.prefer):
        op, separator, distribution = text.rpartition("=")
        if not separator or not op or not distribution:
            raise UsageError(f"--prefer {text!r} can't be read", hint="Write it as 'mylib::nms=DISTRIBUTION'.")
        distributions[op] = distribution
    return distributions


def registry() -> tuple[Any, Any]:
    """The selected rules and plugins, loaded."""
    from onnxplug.plugins.manager import registry_for

    with stage("plugins", "plugins") as loading:
        selected: tuple[Any, Any] = registry_for(prefer=preferences(), selection=selection())
        loading.result = selected
    return selected
