"""``onnxplug shardings``: the placements that a file states."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shardings(
    model: Annotated[Path, typer.Argument(help="The ONNX file")],
    name: Annotated[
        str | None, typer.Option("--name", help="The device configuration, where there are several")
    ] = None,
    nodes: Annotated[bool, typer.Option("--nodes", help="Print the inputs and outputs of each node too")] = False,
) -> None:
    """Check the sharding specifications of a file, and print where its weights lie."""
    from onnxplug.cli.report import out
    from onnxplug_sharding.reading import read_shardings

    found = read_shardings(model, name)
    out.print(str(found), markup=False)
    for node, values in found.nodes.items() if nodes else ():
        out.print(f"  {node}: {', '.join(f'{value} {list(map(str, p))}' for value, p in values.items())}", markup=False)
    if found.undefined:
        out.print(f"  left to the runtime: {', '.join(found.undefined)}", markup=False)
