"""``onnxplug export SCHEME:NAME``: the command and its options for a plugin's source that exports its models itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.main

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
from onnxplug.cli.sources import SCHEME, find_scheme, label, not_importable
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.plugins.api import ExportedFile, ExportRequest, ModelSource
from onnxplug.registry.rule import object_of


def export_command(arguments: Sequence[str], ordinary: Any) -> Any:
    """The command for ``onnxplug export``: the ordinary command, or the command of the source that the arguments name.

    Args:
        arguments: The arguments after ``export`` on the command line.
        ordinary: The ordinary command; it parses the flags that select plugins.
    """
    if not any(SCHEME.fullmatch(text) for text in arguments):
        return ordinary
    _remember_flags(arguments, ordinary)
    for text in arguments:
        match = find_scheme(text)
        if match is not None and match[0].export is not None:
            return _command_of(match[0])
    return ordinary


def _remember_flags(arguments: Sequence[str], ordinary: Any) -> None:
    """Applies the plugin flags before plugins are loaded; the command itself parses them again."""
    context = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": True}
    flag_values = ordinary.make_context("export", list(arguments), resilient_parsing=True, **context).params
    flags = ("no_plugin", "only_plugin", "require_plugin", "prefer", "strict_plugins")
    choice.remember(**{flag: flag_values.get(flag) for flag in flags})


def _command_of(source: ModelSource) -> Any:
    """A command with the options of every export, and the options of the source's function."""
    function = object_of(source.export, f"the export of {label(source)}")
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

        own_values = {p.name: values.pop(p.name) for p in own}
        arguments = _common(**values)
        verify = arguments["options"]["verify"]
        with profiled(arguments["profile"]), reporting(arguments["report"], verify=verify):
            _run(source, function, arguments, own_values)

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
    """The options that mean the same for every model; returns them by name, the options of ``to_onnx`` as ``options``."""
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
            raise not_importable(source, error) from error
    for item in written:
        if not isinstance(item, ExportedFile):
            raise OnnxplugError(f"the export of {source.scheme}: returned {item!r}, which is not an ExportedFile")
        for text in item.notes:
            note(text)
        summary(item.program, item.path)
        if item.report is not None:
            verification(item.report)
