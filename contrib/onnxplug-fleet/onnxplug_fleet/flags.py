"""The options of ``onnxplug export`` in a manifest: names and types are the command's, from ``ExportOptions``."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.options import ExportOptions
from onnxplug.text import did_you_mean, type_with_article

#: Options that have keys of their own in a manifest, or that a fleet sets itself.
_OWN = {"input": "inputs", "dynamic": "dynamic", "output": None, "report": None, "profile": None, "debug": None}


@functools.cache
def _command(scheme: str) -> Any:
    """The command ``onnxplug export`` for the targets of a scheme; for ``""`` the ordinary command."""
    import typer.main

    from onnxplug.cli.app import app
    from onnxplug.cli.schemes import export_command

    group: Any = typer.main.get_group(app)
    ordinary = group.commands["export"]
    return export_command([f"{scheme}:x"], ordinary) if scheme else ordinary


def command_of(target: str) -> Any:
    """The command that exports a target."""
    scheme, colon, _ = target.partition(":")
    return _command(scheme if colon and not scheme.endswith(".py") and "." not in scheme else "")


def has_own_export(target: str) -> bool:
    """Whether the target's source does the whole export, and decides which files it writes."""
    return command_of(target) is not _command("")


def arguments(target: str, options: Mapping[str, Any]) -> list[str]:
    """The command line's arguments for options.

    Args:
        options: By their names on the command line, without hyphens before them.

    Raises:
        OptionError: An option is unknown, or its value is malformed.
    """
    known = {p.opts[0].removeprefix("--"): p for p in command_of(target).params if p.param_type_name == "option"}
    names = [name for name in known if name not in _OWN]
    made: list[str] = []
    for name, value in options.items():
        if name in _OWN or name not in known:
            instead = _OWN.get(name)
            hint = f"The key {instead} beside target is for it." if instead else None
            raise OptionError(
                name, "no option of a model" if name in _OWN else "unknown", hint or did_you_mean(name, names)
            )
        made += _argument(name, known[name], value)
    _check(target, options, made)
    return made


class OptionError(UsageError):
    """An option of a manifest is unknown or of another kind.

    Attributes:
        option: The option's name; empty where it is not known.
    """

    def __init__(self, option: str, message: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.option = option


def _argument(name: str, parameter: Any, value: Any) -> list[str]:
    """The arguments for one option."""
    flag = parameter.opts[0]
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise OptionError(name, f"takes true or false, got {value!r}")
        return [flag] if value else parameter.secondary_opts[:1]
    if name == "opset" and isinstance(value, Mapping):
        value = [version if domain == "" else f"{domain}={version}" for domain, version in value.items()]
    values = list(value) if isinstance(value, list) else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, str | int | float):
            raise OptionError(name, f"takes a text or a number, got {type_with_article(item)}")
    if parameter.multiple:
        return [part for item in values for part in (flag, str(item))]
    return [flag, ",".join(map(str, values))]


def _check(target: str, options: Mapping[str, Any], made: Sequence[str]) -> None:
    """Lets the command itself parse the arguments, and ``ExportOptions`` check the values of its options."""
    try:
        command_of(target).make_context("export", [target, "--output", "model.onnx", *made])
    except Exception as error:
        message = getattr(error, "message", None) or str(error)
        raise OptionError(_named(message, options), message) from None
    fields = {item.metadata["option"].flag.names.split("/")[0].removeprefix("--"): item.name for item in _flagged()}
    for name, value in options.items():
        try:
            if name == "opset":
                from onnxplug.cli.inputs import parse_opset
                from onnxplug.opsets import resolve_opsets

                resolve_opsets(parse_opset(_argument(name, _opset(target), value)[1]))
            elif name == "metadata":
                from onnxplug.metadata import Metadata

                Metadata.of_option(value)
            elif name in fields and not name.endswith("names"):
                ExportOptions.of({fields[name]: value})
        except Exception as error:
            raise OptionError(name, getattr(error, "message", str(error)), getattr(error, "hint", None)) from None


def _opset(target: str) -> Any:
    return next(p for p in command_of(target).params if "--opset" in p.opts)


def _flagged() -> list[Any]:
    return [f for f in ExportOptions.__dataclass_fields__.values() if f.metadata["option"].flag is not None]


def _named(message: str, options: Mapping[str, Any]) -> str:
    return next((name for name in options if f"--{name}" in message), "")
