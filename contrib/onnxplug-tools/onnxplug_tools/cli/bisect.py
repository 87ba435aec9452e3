"""``onnxplug bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onnxplug.cli.options import (
    DynamicOption,
    InputOption,
    PretrainedOption,
    TargetArgument,
    preferences,
    to_onnx_options,
)
from onnxplug_tools.cli.targets import export_of


@to_onnx_options("opset_version", "target", "exact", "optimize", "strict")
def bisect(
    target: TargetArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for script, data and model; new or empty")
    ] = Path("bisected"),
    inputs: InputOption = None,
    dynamic: DynamicOption = None,
    pretrained: PretrainedOption = False,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of one draw of sizes and values; default: three draws")
    ] = None,
    *,
    options: dict[str, Any],
) -> None:
    """Reduce a model that fails or is wrong to the smallest graph that still does; exit status 1 if there is a fault."""
    from onnxplug.cli.report import out, progress

    with progress() as shown:
        from onnxplug_tools.diagnosis.bisect import bisect as reduce_model

        model, args, arguments = export_of(target, inputs, dynamic, pretrained, options, shown)
        reduction = reduce_model(
            model,
            args,
            output=output,
            seeds=(0, 1, 2) if seed is None else (seed,),
            imports=_module_of(target),
            prefer=preferences(),
            **arguments,
        )
    out.print(str(reduction), markup=False)
    for path in reduction.files:
        out.print(f"written: {path}", markup=False)
    if reduction.trouble is not None:
        raise typer.Exit(1)


def _module_of(target: str) -> list[str]:
    """The module of a target, which may define the model's custom operators."""
    if target.endswith(".pt2") or target.startswith("timm:"):
        return []
    place = target.rpartition(":")[0]
    return [Path(place).stem if place.endswith(".py") else place]
