"""``onnxplug compare``: two models run on the same inputs, and their values compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onnxplug.cli.options import plugin_options, registry
from onnxplug_tools.cli.models import (
    FeedOption,
    JsonOption,
    ModelArgument,
    SizesOption,
    loaded,
    parse_feed,
    parse_sizes,
    trouble_is_two,
)
from onnxplug_tools.cli.tables import show_table

if TYPE_CHECKING:
    from onnxplug_tools.inspection.compare_runs import Compared, Runtimes


@plugin_options
def compare(
    model: ModelArgument,
    other: Annotated[Path, typer.Argument(help="The ONNX file that is compared with it")],
    inputs: FeedOption = None,
    sizes: SizesOption = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the inputs that are not given")] = 0,
    rtol: Annotated[float | None, typer.Option("--rtol", min=0, help="Tolerance by the expected element")] = None,
    atol: Annotated[float | None, typer.Option("--atol", min=0, help="Absolute tolerance")] = None,
    intermediates: Annotated[
        bool, typer.Option("--intermediates/--no-intermediates", help="Also compare what corresponding nodes compute")
    ] = True,
    show_all: Annotated[bool, typer.Option("--all", help="List values that agree too")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run two models on the same inputs and compare what they compute, value by value; exit status 1 if outputs differ."""
    with trouble_is_two():
        feed, named_sizes = parse_feed(inputs or []), parse_sizes(sizes)
        models = loaded(model), loaded(other)
        from onnxplug_tools.inspection.load import check_to_run

        for path in (model, other):
            check_to_run(path)
        from onnxplug.cli.report import progress
        from onnxplug_tools.inspection.compare_runs import compare_runs

        with progress() as shown:
            comparison = compare_runs(
                *models,
                given=feed,
                sizes=named_sizes,
                seed=seed,
                rtol=rtol,
                atol=atol,
                intermediates=intermediates,
                host=registry()[1],
                progress=shown,
            )
        if as_json:
            from onnxplug_tools.inspection.summary import to_json

            sys.stdout.write(f"{to_json(comparison)}\n")
        else:
            _show(comparison, show_all=show_all)
    if not comparison.equal:
        raise typer.Exit(1)


def _show(runtimes: Runtimes, *, show_all: bool) -> None:
    from onnxplug.cli.report import note, out
    from onnxplug.text import counted
    from onnxplug_tools.inspection.words import visible

    inputs = ", ".join(f"{name} {text}" for name, text in runtimes.inputs.items())
    assumed = f"; taken as 1, for want of --sizes: {', '.join(runtimes.assumed)}" if runtimes.assumed else ""
    out.print(visible(f"inputs: {inputs or 'none'}{assumed}"), markup=False)
    show_table("Outputs", _HEADS, map(_row, runtimes.outputs))
    for name in runtimes.unmatched:
        out.print(visible(f"output of one model alone: {name}"), markup=False)
    if runtimes.problem is not None:
        note(visible(f"values within the models could not be compared: {runtimes.problem}"))
    if not runtimes.values:
        return
    differing = [value for value in runtimes.values if not value.equal]
    agree = (
        f"{len(runtimes.values) - len(differing)} of {counted(len(runtimes.values), 'value')} within the models agree"
    )
    out.print(f"{agree}; {runtimes.alone} of the first model correspond to none in the second")
    if runtimes.first is not None:
        out.print(visible(f"the first that differs: {_name(runtimes.first)} ({_place(runtimes.first)})"), markup=False)
    show_table("Values within", _HEADS, map(_row, runtimes.values if show_all else differing))


_HEADS = ("value", "node", "largest difference", "")


def _row(value: Compared) -> tuple[str, ...]:
    return _name(value), _place(value), f"{value.largest:.3g}", value.text


def _name(value: Compared) -> str:
    return value.before if value.before == value.after else f"{value.before} → {value.after}"


def _place(value: Compared) -> str:
    return f"{value.operator} in {value.module}" if value.module else value.operator
