"""The command line: ``onnxplug export | verify | why | ops | plugins``, and the commands of plugins."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from onnxplug import logs
from onnxplug.cli.console import forgiving_streams
from onnxplug.cli.options import (
    AbsolutePathsOption,
    DynamicOption,
    ExternalOption,
    FunctionClassesOption,
    FunctionDomainOption,
    FunctionsOption,
    InputOption,
    MetadataOption,
    PiecesOption,
    PretrainedOption,
    ReportOption,
    ShardOption,
    StrictWeightsOption,
    TargetArgument,
    TritonOption,
    WeightsOption,
    choice,
    plugin_options,
    registry,
    selection,
    to_onnx_options,
)
from onnxplug.cli.profile import ProfileOption, profiled, with_value
from onnxplug.cli.schemes import export_command
from onnxplug.cli.warned import warnings_shown
from onnxplug.errors import OnnxplugError, OpsetError, SaveError, UnknownPluginError, UsageError
from onnxplug.observers import span
from onnxplug.packages import PACKAGES, distribution_of, load, missing_package
from onnxplug.text import did_you_mean, printable, shortened
from onnxplug.version import VERSION

#: The exit status of a program that SIGINT ended, as shells have it.
_INTERRUPTED = 130


class PluginGroup(typer.core.TyperGroup):
    """The commands, with plugins'. Plugins are imported for the list of all, and for a command that isn't onnxplug's own."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands, in the order in which people need them; commands of other packages at the end."""
        names = [*super().list_commands(ctx), *_commands_of_plugins(ctx)]
        order = {name: position for position, name in enumerate(_ORDER)}
        return sorted(dict.fromkeys(names), key=lambda name: order.get(name, len(order)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return _with_plain_values(own, ctx)
        full_name = f"onnxplug {cmd_name}"
        package = distribution_of(full_name) if full_name in PACKAGES else None
        command = _commands_of_plugins(ctx, package).get(cmd_name)
        if command is not None or ctx.resilient_parsing:
            return command if command is None else _with_plain_values(command, ctx)
        if package is not None:
            raise missing_package(full_name)
        raise UsageError(f"No such command {cmd_name!r}.", hint=did_you_mean(cmd_name, self.list_commands(ctx)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """A command by the command line; `export` has other options for the models of a plugin."""
        name, command, rest = super().resolve_command(ctx, args)
        if name != "export":
            return name, command, rest
        rest = with_value(rest)
        return name, export_command(rest, command), rest


#: The placeholder of an option's value in the help, by its type.
_VALUES = {
    "bool": "",
    "str": "TEXT",
    "path": "PATH",
    "Path": "PATH",
    "int": "N",
    "int range": "N",
    "float": "X",
    "float range": "X",
}


def _with_plain_values(command: Any, ctx: Any) -> Any:
    """A command whose help shows ``PATH`` or no placeholder for an option's value, instead of Python's types."""
    for parameter in command.get_params(ctx):
        if parameter.metavar is None and parameter.param_type_name == "option":
            kind = parameter.display_type(ctx).removeprefix("<list[").strip("<>]")
            parameter.metavar = _VALUES.get(kind)
    for subcommand in getattr(command, "commands", {}).values():
        _with_plain_values(subcommand, ctx)
    return command


def _commands_of_plugins(ctx: Any, package: str | None = None) -> Mapping[str, Any]:
    """The commands that plugins add, by name.

    Args:
        ctx: The context, with the flags before the command.
        package: A package of onnxplug's own: only it is imported, whatever plugins the flags select.
    """
    from onnxplug.plugins.manager import PluginManager
    from onnxplug.plugins.records import Selection

    known: dict[str | None, Mapping[str, Any]] = ctx.meta.setdefault(f"{__name__}.commands", {})
    if package in known:
        return known[package]
    if package is None:
        flags = ("no_plugin", "only_plugin", "require_plugin", "prefer", "strict_plugins")
        choice.remember(**{flag: ctx.params.get(flag) for flag in flags})
        chosen = selection()
        choice.reset(choice.debug)
    else:
        chosen = Selection(only=(package,))
    added = typer.Typer(pretty_exceptions_enable=False)
    try:
        PluginManager(chosen).commands(added)
    except UnknownPluginError:
        if package is None:
            raise
    known[package] = typer.main.get_group(added).commands
    return known[package]


#: Of the commands in the help.
_ORDER = (
    "export",
    "verify",
    "run",
    "diagnose",
    "bisect",
    "inspect",
    "compare",
    "bench",
    "convert",
    "fleet",
    "why",
    "ops",
    "plugins",
)

app = typer.Typer(
    name="onnxplug",
    cls=PluginGroup,
    help="Export PyTorch models to ONNX; every translation is a rule, and installed plugins add more.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(is_requested: bool) -> None:
    if is_requested:
        sys.stdout.write(f"onnxplug {VERSION}\n")
        raise typer.Exit()


@app.callback()
@plugin_options
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version")
    ] = False,
) -> None:
    pass


@app.command()
@plugin_options
@to_onnx_options(
    "opset_version",
    "target",
    "exact",
    "optimize",
    "strict",
    "capture",
    "decompositions",
    "input_names",
    "output_names",
    "present_names",
    "mutations",
    "checks",
    "verify",
    "external_data",
    "dtype",
    "keep_io",
    "quantize",
    "calibrate",
)
def export(
    target: TargetArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", help="File to write; with --pieces the folder")
    ],
    inputs: InputOption = None,
    dynamic: DynamicOption = None,
    pretrained: PretrainedOption = False,
    weights: WeightsOption = None,
    strict_weights: StrictWeightsOption = None,
    shard: ShardOption = None,
    external: ExternalOption = None,
    functions: FunctionsOption = False,
    function_classes: FunctionClassesOption = None,
    function_domain: FunctionDomainOption = None,
    pieces: PiecesOption = None,
    triton: TritonOption = None,
    metadata: MetadataOption = None,
    absolute_paths: AbsolutePathsOption = False,
    report: ReportOption = None,
    profile: ProfileOption = None,
    *,
    options: dict[str, Any],
) -> None:
    """Export a model to an ONNX file."""
    from onnxplug.cli.inputs import parse_dynamic, parse_functions, parse_input, parse_metadata
    from onnxplug.cli.report import progress, reporting, summary, summary_of_pieces, verification
    from onnxplug.cli.targets import check_target_file, load_for_export

    verify, external_data = options.pop("verify"), options.pop("external_data")
    options["metadata"] = parse_metadata(metadata, absolute_paths=absolute_paths)
    options["dynamic_shapes"] = parse_dynamic(dynamic or [])
    specs = [parse_input(text) for text in inputs or []]
    options["functions"] = parse_functions(functions, function_classes, function_domain)
    saving = {"weights": weights, "strict": strict_weights, "shard": shard, "external": external}
    _check_saving(saving, verify=verify, pieces=pieces)
    if triton is not None and pieces is None:
        raise UsageError("--triton is about --pieces, which is not given")
    if weights and (options["dtype"] is not None or options["quantize"] is not None):
        raise UsageError(
            "--dtype and --quantize run the model, which has no numbers where --weights gives them",
            hint="Have TARGET load the weights, or use onnxplug convert on the file.",
        )
    with profiled(profile), reporting(report, verify=verify):
        check_target_file(target)
        with progress() as shown:
            shown("loading")
            with span("loading"):
                from onnxplug.arguments import check_destination
                from onnxplug.exporter import to_onnx
                from onnxplug.opsets import resolve_opsets
                from onnxplug.run.save import check_settings
                from onnxplug.verification.ready import check_verifiable

                check_settings(external_data, shard=shard, external=external)
                if weights:
                    load("weights=", "--weights")(weights)  # check that they exist before any long step

                names = pieces.split(",") if pieces is not None else None
                if triton is not None:
                    load("OnnxPieces", "--triton").check_triton(output, triton)
                if names is None:
                    try:
                        check_destination(output)
                    except SaveError as error:
                        raise UsageError(error.message, hint=error.hint) from None
                if verify:
                    check_verifiable(resolve_opsets(options["opset_version"])[""])
                with load("fake_weights", "--weights")() if weights else contextlib.nullcontext():
                    loaded = load_for_export(target, specs, pretrained=pretrained)
            options |= {
                "kwargs": loaded.kwargs,
                "registry": registry(),
                "progress": shown,
                "report": report is not None,
            }
            if names is not None:
                chain = to_onnx(
                    loaded.model,
                    loaded.args,
                    output if triton is None else None,
                    pieces=names,
                    verify=verify,
                    external_data=external_data,
                    **options,
                )
                files = [output / f"{path}.onnx" for path in names]
                if triton is not None:
                    files = chain.save_triton(output, triton, external_data=external_data)
            else:
                program = to_onnx(loaded.model, loaded.args, **options)
                verified = None
                if verify:
                    shown("verification")
                    verified = program.verify()
                shown("saving")
                program.save(output, external_data=external_data, progress=shown.part, **saving)
        if names is not None:
            summary_of_pieces(chain, files, verified=verify)
            return
        summary(program, output)
        if verified is not None:
            verification(verified)


def _check_saving(saving: dict[str, Any], *, verify: bool, pieces: str | None) -> None:
    """Checks --weights and the options of saving against the other options.

    Raises:
        UsageError: One contradicts another.
    """
    flags = {"weights": "--weights", "strict": "--strict-weights", "shard": "--shard", "external": "--external"}
    passed = [flags[name] for name, value in saving.items() if value is not None and value != []]
    if pieces is not None and passed:
        raise UsageError(f"{passed[0]} can't be given together with --pieces")
    if saving["strict"] is not None and not saving["weights"]:
        raise UsageError("--strict-weights is about --weights, which is not given")
    if saving["weights"] and verify:
        raise UsageError(
            "--verify compares with the PyTorch model's own weights, which are not made where --weights gives others",
            hint="Have TARGET load the weights, and leave --weights away.",
        )


def main() -> None:
    """Entry point: exit status 0, 1 for a failed job, 2 for wrong usage; a traceback only with ``--debug``."""
    forgiving_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs a command line and returns its exit status."""
    status = _run(arguments)
    if status == _INTERRUPTED:
        sys.stderr.write("interrupted\n")
    return status


def _run(arguments: list[str]) -> int:
    choice.reset()
    try:
        with warnings_shown():
            logs.configure()
            result = app(args=arguments, prog_name="onnxplug", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as leave:
        return int(leave.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # raised by click and typer for wrong usage
            wrong_usage: Any = error
            if isinstance(getattr(error, "message", None), str):
                wrong_usage.message = shortened(printable(wrong_usage.message))
            wrong_usage.show()
            return int(wrong_usage.exit_code)
        if choice.debug:
            raise
        from onnxplug.cli.report import failure

        if isinstance(error, OnnxplugError):
            failure(error.message, error.hint)
            return 2 if isinstance(error, UsageError | OpsetError) else 1
        failure(
            f"{type(error).__name__}: {error}",
            "onnxplug did not expect this error; run with --debug for the traceback.",
        )
        return 1
