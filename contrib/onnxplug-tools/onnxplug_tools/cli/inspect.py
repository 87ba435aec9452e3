"""``onnxplug inspect``: the content of a model, and the differences between two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from onnxplug.cli.options import debug_option
from onnxplug.errors import OnnxplugError, UsageError
from onnxplug_tools.cli.difference import show_difference
from onnxplug_tools.cli.models import (
    HtmlOption,
    JsonOption,
    ModelArgument,
    SizesOption,
    loaded,
    parse_sizes,
    trouble_is_two,
)
from onnxplug_tools.cli.tables import show_table


@debug_option
def inspect(
    model: ModelArgument,
    depth: Annotated[int, typer.Option("--depth", min=0, help="How deep the tree of modules is shown")] = 2,
    top: Annotated[int, typer.Option("--top", min=0, help="How many of the largest weights are shown")] = 5,
    sizes: SizesOption = None,
    diff: Annotated[
        Path | None,
        typer.Option(
            "--diff",
            metavar="OTHER",
            help="What differs in another model; exit status 0 the same, 1 different, 2 trouble",
        ),
    ] = None,
    html: HtmlOption = None,
    as_json: JsonOption = False,
    open_: Annotated[bool, typer.Option("--open", help="Show the model in the browser, by netron")] = False,
) -> None:
    """Show what is in a model: modules, operators, weights, operations; or what differs between two."""
    if diff is not None:
        for option, is_given in (("--open", open_), ("--sizes", sizes is not None)):
            if is_given:
                raise UsageError(f"{option} shows one model; leave --diff away")
        with trouble_is_two():
            same = show_difference(model, diff, html=html, as_json=as_json)
        if not same:
            raise typer.Exit(1)
        return
    _show(model, depth, top, parse_sizes(sizes), html, as_json=as_json)
    if open_:
        _open(model)


def _show(path: Path, depth: int, top: int, sizes: dict[str, int], html: Path | None, *, as_json: bool) -> None:
    from onnxplug.cli.report import size_text
    from onnxplug_tools.inspection.pages import check_writable, save_text
    from onnxplug_tools.inspection.summary import (
        check_sizes,
        largest,
        module_cells,
        modules,
        rows,
        to_html,
        to_json,
    )
    from onnxplug_tools.inspection.view import view
    from onnxplug_tools.inspection.words import bytes_text

    if html is not None:
        check_writable(html, "page", [path])
    seen = view(loaded(path), sizes)
    check_sizes(seen, sizes)
    facts = rows(seen, f"{path} ({size_text(path)})", sizes)
    if html is not None:
        save_text(html, to_html(seen, path.name, facts), "page")
    if as_json:
        sys.stdout.write(f"{to_json(seen)}\n")
        return
    show_table("", ("", ""), facts)
    if depth and seen.root.children:
        heads = ("module", "class", ">nodes", ">parameters", ">bytes", ">operations")
        tree = modules(seen, depth)
        show_table("Modules", heads, (["  " * n + (m.name or "(the model)"), *module_cells(m)] for n, m in tree))
    weights = [(w.name, w.type, bytes_text(w.bytes), w.location or "") for w in largest(seen, top)]
    show_table("Largest weights", ("weight", "type", ">bytes", "file"), weights)


def _open(path: Path) -> None:
    try:
        import netron
    except ImportError as error:
        raise OnnxplugError("--open needs netron, which is not installed", hint="pip install netron") from error
    netron.start(str(path))
    netron.wait()  # until it is interrupted: it serves the page itself
