"""``SCHEME:NAME``: kinds of models that plugins bring, and the options that ``onnxplug export`` has for them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.main

from onnxplug.cli.inputs import check_file
from onnxplug.cli.options import (
    AbsolutePathsOption,
    MetadataOption,
    ReportOption,
    TargetArgument,
    choice,
    plugin_options,
    registry,
    to_onnx_options,
)
from onnxplug.cli.profile import ProfileOption, profiled
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.plugin_api import ExportedFile, ExportRequest, ModelSource
from onnxplug.registry.rule import object_of

_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9-]+):(?P<name>.*)", re.DOTALL)


def find_source(text: str) -> tuple[ModelSource, str] | None:
    """The plugin's source that TARGET names, and what its ``load`` takes; ``None`` where TARGET is of another kind."""
    if _SCHEME.fullmatch(text):
        return _find_scheme(text)
    source = registry()[1].source_of_file(text)
    if source is None:
        return None
    check_file(text)
    return source, text


def _find_scheme(text: str) -> tuple[ModelSource, str] | None:
    match = _SCHEME.fullmatch(text)
    source = registry()[1].source(match["scheme"]) if match is not None else None
    return None if source is None or match is None else (source, match["name"])


def load_from(source: ModelSource, name: str, *, pretrained: bool) -> Any:
    """What a source's ``load`` returns.

    Raises:
        UsageError: ``--pretrained`` for a source that has no choice, or the name is empty.
        OnnxplugError: The source raised.
    """
    if not name:
        raise UsageError(f"{source.scheme}: needs a name after it", hint=source.help or None)
    load = object_of(source.load, f"the load of {_label(source)}")
    takes = takes_pretrained(source)
    if pretrained and not takes:
        of = f"{source.scheme}:NAME, which decides by itself" if source.scheme else "files"
        raise UsageError(f"--pretrained is not for {of}")
    try:
        return load(name, pretrained=pretrained) if takes else load(name)
    except OnnxplugError:
        raise
    except ImportError as error:
        raise _not_importable(source, error) from error
    except Exception as error:
        target = f"{source.scheme}:{name}" if source.scheme else name
        raise OnnxplugError(f"{target} can't be loaded: {type(error).__name__}: {error}") from error


def takes_pretrained(source: ModelSource) -> bool:
    """Whether a source has a choice of random weights and trained ones."""
    load = object_of(source.load, f"the load of {_label(source)}")
    return "pretrained" in inspect.signature(load).parameters


def export_command(arguments: Sequence[str], ordinary: Any) -> Any:
    """The command for ``onnxplug export``: the ordinary one, or that of the source that the arguments name.

    Args:
        arguments: What follows ``export`` on the command line.
        ordinary: The ordinary command; it reads the flags that say which plugins there are.
    """
    if not any(_SCHEME.fullmatch(text) for text in arguments):
        return ordinary
    _remember_flags(arguments, ordinary)
    for text in arguments:
        found = _find_scheme(text)
        if found is not None and found[0].export is not None:
            return _command_of(found[0])
    return ordinary


def _remember_flags(arguments: Sequence[str], ordinary: Any) -> None:
    """Takes the plugin flags into account before plugins are asked; the command itself reads them again."""
    context = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True}
    given = ordinary.make_context("export", list(arguments), resilient_parsing=True, **context).params
    flags = ("no_plugin", "only_plugin", "require_plugin", "prefer", "strict_plugins")
    choice.remember(**{flag: given.get(flag) for flag in flags})


def _command_of(source: ModelSource) -> Any:
    """A command with the options that every export has, and those of the source's function."""
    function = object_of(source.export, f"the export of {_label(source)}")
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise OnnxplugError(f"the options of {source.scheme}: can't be read: {error}") from error
    own = [
        parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    common = list(inspect.signature(_common).parameters.values())
    twice = {parameter.name for parameter in own} & {parameter.name for parameter in common}
    if twice:
        raise OnnxplugError(
            f"the options of {source.scheme}: has one that every export has: {', '.join(sorted(twice))}"
        )

    def command(**values: Any) -> None:
        from onnxplug.cli.report import reporting

        given = {p.name: values.pop(p.name) for p in own}
        arguments = _common(**values)
        verify = arguments["options"]["verify"]
        with profiled(arguments["profile"]), reporting(arguments["report"], verify=verify):
            _run(source, function, arguments, given)

    command.__doc__ = f"Export {source.scheme}:NAME. {source.help}".strip()
    command.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*common, *own)}
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command("export")(plugin_options(command))
    return typer.main.get_command(app)


@to_onnx_options("opset_version", "target", "exact", "optimize", "strict", "capture", "verify", "external_data")
def _common(
    target: TargetArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write")],
    report: ReportOption = None,
    profile: ProfileOption = None,
    metadata: MetadataOption = None,
    absolute_paths: AbsolutePathsOption = False,
    *,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The options that mean the same for every model; returns them by name, those of ``to_onnx`` as ``options``."""
    return dict(locals())


def _run(source: ModelSource, function: Any, common: dict[str, Any], own: dict[str, Any]) -> None:
    from onnxplug.cli.inputs import parse_metadata
    from onnxplug.cli.report import note, progress, summary, verification

    target: str = common["target"]
    scheme, separator, name = target.partition(":")
    if scheme != source.scheme or not separator:
        raise UsageError(f"TARGET {target!r} is not {source.scheme}:NAME")
    if not name:
        raise UsageError(f"{source.scheme}: needs a name after it", hint=source.help or None)
    options = common["options"] | {
        "metadata": parse_metadata(common["metadata"], absolute_paths=common["absolute_paths"]),
        "report": common["report"] is not None,
    }
    verify, external_data = options.pop("verify"), options.pop("external_data")
    with progress() as shown:
        shown("loading")
        import torch

        torch.manual_seed(0)  # as for every other TARGET
        request = ExportRequest(
            name,
            common["output"],
            verify=verify,
            external_data=external_data,
            options={**options, "registry": registry()},
            stage=shown,
        )
        try:
            written = list(function(request, **own))
        except ImportError as error:
            raise _not_importable(source, error) from error
    for item in written:
        if not isinstance(item, ExportedFile):
            raise OnnxplugError(f"the export of {source.scheme}: returned {item!r}, which is not an ExportedFile")
        for text in item.notes:
            note(text)
        summary(item.program, item.path)
        if item.report is not None:
            verification(item.report)


def _not_importable(source: ModelSource, error: ImportError) -> OnnxplugError:
    """The error for a library that is missing or broken; libraries that import lazily name the cause at the end of a chain."""
    cause: BaseException = error
    while (below := cause.__cause__ or cause.__context__) is not None:
        cause = below
    why = "" if cause is error else f", because of {type(cause).__name__}: {cause}"
    return OnnxplugError(
        f"{source.scheme}: needs what can't be imported: {str(error).splitlines()[0]}{why}",
        hint="Install it, or another version of it that fits the other libraries; --debug shows where it fails.",
    )


def _label(source: ModelSource) -> str:
    """What a source is called in messages: its scheme, or the files that it loads."""
    return f"{source.scheme}:" if source.scheme else f"files that end in {' or '.join(source.suffixes)}"
