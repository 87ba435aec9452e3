"""``onnxplug diagnose``."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from onnxplug.cli.options import (
    DynamicOption,
    ExactOption,
    InputOption,
    ModeOption,
    OpsetOption,
    PretrainedOption,
    RuntimeOption,
    TargetArgument,
    parse_runtime,
    registry,
)
from onnxplug.registry.target import DEFAULT_RUNTIME


def diagnose(
    target: TargetArgument,
    inputs: InputOption = None,
    dynamic: DynamicOption = None,
    pretrained: PretrainedOption = False,
    opset: OpsetOption = None,
    runtime: RuntimeOption = DEFAULT_RUNTIME,
    exact: ExactOption = False,
    strict: ModeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON")] = False,
) -> None:
    """Find what keeps a model from being exported, submodule by submodule; exit status 1 if something does."""
    from onnxplug.cli.inputs import parse_dynamic, parse_input, parse_opset
    from onnxplug.cli.report import out, progress
    from onnxplug.cli.targets import load_for_export

    opsets = parse_opset(opset)
    shapes = parse_dynamic(dynamic or [])
    specs = [parse_input(text) for text in inputs or []]
    with progress() as shown:
        shown("loading")
        from onnxplug_tools.diagnosis.diagnose import diagnose as findings_of

        loaded = load_for_export(target, specs, pretrained=pretrained)
        found = findings_of(
            loaded.model,
            loaded.args,
            kwargs=loaded.kwargs,
            dynamic_shapes=shapes,
            progress=shown,
            opset_version=opsets,
            target=parse_runtime(runtime),
            exact=exact,
            strict=strict,
            registry=registry(),
        )
    out.print(json.dumps(found.to_dict(), indent=2) if as_json else str(found), markup=False)
    if not found.exports:
        raise typer.Exit(1)
