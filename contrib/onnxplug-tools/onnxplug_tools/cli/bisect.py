"""``onnxplug bisect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onnxplug.cli.options import (
    DynamicOption,
    ExactOption,
    InputOption,
    ModeOption,
    OpsetOption,
    OptimizeOption,
    PretrainedOption,
    RuntimeOption,
    TargetArgument,
    parse_runtime,
    preferences,
    registry,
)
from onnxplug.registry.target import DEFAULT_RUNTIME


def bisect(
    target: TargetArgument,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for script, data and model; new or empty")
    ] = Path("bisected"),
    inputs: InputOption = None,
    dynamic: DynamicOption = None,
    pretrained: PretrainedOption = False,
    opset: OpsetOption = None,
    optimize: OptimizeOption = True,
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    exact: ExactOption = False,
    strict: ModeOption = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of one draw of sizes and values; default: three draws")
    ] = None,
) -> None:
    """Reduce a model that fails or is wrong to the smallest graph that still does; exit status 1 if there is a fault."""
    from onnxplug.cli.inputs import parse_dynamic, parse_input, parse_opset
    from onnxplug.cli.report import out, progress
    from onnxplug.cli.targets import load_for_export

    opsets = parse_opset(opset)
    shapes = parse_dynamic(dynamic or [])
    specs = [parse_input(text) for text in inputs or []]
    with progress() as shown:
        shown("loading")
        from onnxplug_tools.diagnosis.bisect import bisect as reduce_model

        loaded = load_for_export(target, specs, pretrained=pretrained)
        found = reduce_model(
            loaded.model,
            loaded.args,
            kwargs=loaded.kwargs,
            output=output,
            dynamic_shapes=shapes,
            seeds=(0, 1, 2) if seed is None else (seed,),
            imports=_module_of(target),
            prefer=preferences(),
            progress=shown,
            opset_version=opsets,
            target=parse_runtime(runtime),
            exact=exact,
            optimize=optimize,
            strict=strict,
            registry=registry(),
        )
    out.print(str(found), markup=False)
    for path in found.files:
        out.print(f"written: {path}", markup=False)
    if found.trouble is not None:
        raise typer.Exit(1)


def _module_of(target: str) -> list[str]:
    """The module of a target, which may define the model's custom operators."""
    if target.endswith(".pt2") or target.startswith("timm:"):
        return []
    place = target.rpartition(":")[0]
    return [Path(place).stem if place.endswith(".py") else place]
