"""``onnxplug bench``: how long models take, in turns, and where their time goes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onnxplug.cli.options import PretrainedOption, plugin_options, registry
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug_tools.cli.models import FeedOption, HtmlOption, JsonOption, SizesOption, parse_feed, parse_sizes
from onnxplug_tools.cli.tables import show_table

if TYPE_CHECKING:
    from onnxplug_tools.inspection.bench import Bench

ThreadsOption = Annotated[int | None, typer.Option("--threads", min=1, help="Threads within an operator")]
ProviderOption = Annotated[
    list[str] | None, typer.Option("--provider", help="Execution provider of ONNX Runtime: cpu, cuda, …")
]
#: The most operators in a table on a terminal.
_MOST = 12
_SPENT = (">nodes", ">time", ">share")


@plugin_options
def bench(
    models: Annotated[
        list[Path], typer.Argument(metavar="MODEL [OTHER…]", help="ONNX files that take the same inputs")
    ],
    inputs: FeedOption = None,
    sizes: SizesOption = None,
    threads: ThreadsOption = None,
    provider: ProviderOption = None,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Rounds; each model runs once in a round")] = 100,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="No further round after so many seconds; three in any case")
    ] = 10,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", help="The PyTorch model, as for export: it runs eagerly in the same turns, on its own inputs"
        ),
    ] = None,
    pretrained: PretrainedOption = False,
    profile: Annotated[bool, typer.Option("--profile/--no-profile", help="Time by operator and by module")] = True,
    depth: Annotated[int, typer.Option("--depth", min=0, help="How deep modules are shown")] = 1,
    optimized: Annotated[
        Path | None, typer.Option("--optimized", metavar="FILE", help="Write the graph that ONNX Runtime runs")
    ] = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how long models take, in turns, against PyTorch too, and where ONNX Runtime's time goes."""
    from onnxplug.cli.report import progress
    from onnxplug_tools.inspection.load import check_is_onnx, check_to_run
    from onnxplug_tools.inspection.pages import check_writable

    for path in models:
        check_is_onnx(path)
        check_to_run(path)
    if html is not None:
        check_writable(html, "page", models)
    feed = parse_feed(inputs or [])
    named_sizes = parse_sizes(sizes)
    with progress() as shown:
        shown("loading")
        from onnxplug_tools.inspection.bench import Limits, bench as measure
        from onnxplug_tools.inspection.load import load_model

        eager = None
        if target is not None:
            if named_sizes:
                raise UsageError(
                    "--sizes: with --target the sizes are those of its inputs", hint="Give other ones by --input."
                )
            graph = load_model(models[0]).graph
            names = [str(value.name) for value in graph.inputs if value.name not in graph.initializers]
            eager, feed = _eager(target, feed, names, pretrained=pretrained)
        measured = measure(
            models,
            given=feed,
            sizes=named_sizes,
            threads=threads,
            providers=provider or (),
            limits=Limits(repeat, seconds),
            profile=profile,
            optimized=optimized,
            eager=eager,
            host=registry()[1],
            progress=shown,
        )
    if html is not None:
        from onnxplug_tools.inspection.benches import to_html
        from onnxplug_tools.inspection.pages import save_text

        save_text(html, to_html(measured, ", ".join(path.name for path in models)), "page")
    if as_json:
        from onnxplug_tools.inspection.summary import to_json

        sys.stdout.write(f"{to_json(measured)}\n")
        return
    _show(measured, depth)


def _eager(
    target: str, feed: Sequence[tuple[str | None, Any]], names: Sequence[str], *, pretrained: bool
) -> tuple[Callable[[], Any], list[tuple[str | None, Any]]]:
    """A function that runs the PyTorch model, and the model's inputs by the names of the ONNX model's inputs."""
    import torch

    from onnxplug.arguments import positional_and_named
    from onnxplug.cli.inputs import InputSpec
    from onnxplug.cli.report import note
    from onnxplug.cli.targets import load_target
    from onnxplug.torch_private import pytree
    from onnxplug_tools.verification import input_order

    loaded = load_target(target, [InputSpec(name, value) for name, value in feed], pretrained=pretrained)
    if loaded.note:
        note(loaded.note)
    model = loaded.model
    if isinstance(model, torch.export.ExportedProgram):
        if not loaded.args and not loaded.kwargs and model.example_inputs is not None:
            loaded.args, loaded.kwargs = model.example_inputs
        model = model.module()
    elif isinstance(model, torch.nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        model.eval()
    args, kwargs = positional_and_named(loaded.model, loaded.args, loaded.kwargs)
    leaves, _ = pytree.tree_flatten((tuple(args), dict(kwargs or {})))
    fed = [position for position, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(fed) != len(names):
        raise UsageError(
            f"the ONNX model takes {len(names)} inputs ({', '.join(names)}), the target gives {len(fed)} tensors",
            hint="Give its inputs with --input.",
        )
    order = input_order(names, fed, args, kwargs or {})

    def run() -> Any:
        with torch.inference_mode():
            return model(*args, **(kwargs or {}))

    try:
        run()
    except Exception as error:
        raise OnnxplugError(f"the PyTorch model does not run: {type(error).__name__}: {error}") from error
    return run, [(name, leaves[position]) for name, position in order.items()]


def _show(measured: Bench, depth: int) -> None:
    from onnxplug.cli.report import note, out
    from onnxplug_tools.inspection.benches import module_times, notes, operator_changes, setting, spent_row, timing_rows
    from onnxplug_tools.inspection.words import time_text, visible

    out.print(visible(setting(measured)), markup=False)
    heads = ("", ">median", ">10 %", ">90 %", ">ratio", ">runs", ">loading")
    show_table("Latency", heads, timing_rows(measured))
    for model in measured.models:
        if model.profile is None:
            continue
        name, total = model.timing.name, time_text(model.profile.seconds)
        operators = model.profile.operators
        show_table(
            f"{name}: time by operator, of {total} a run while it is profiled",
            ("operator", *_SPENT),
            map(spent_row, operators[:_MOST]),
        )
        modules = [spent for spent in module_times(model.profile, depth) if spent.name or depth == 0]
        if depth:
            show_table(f"{name}: time by module", ("module", *_SPENT), map(spent_row, modules))
        rows = [(operator, str(before), str(after)) for operator, before, after in operator_changes(model)]
        show_table(f"{name}: operators", ("operator", ">in the file", ">as ONNX Runtime runs it"), rows)
    for text in notes(measured):
        note(visible(text))
