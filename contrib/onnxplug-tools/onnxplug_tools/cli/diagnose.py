"""``onnxplug diagnose``."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from onnxplug.cli.options import DynamicOption, InputOption, PretrainedOption, TargetArgument, to_onnx_options
from onnxplug_tools.cli.targets import export_of


@to_onnx_options("opset_version", "target", "exact", "strict")
def diagnose(
    target: TargetArgument,
    inputs: InputOption = None,
    dynamic: DynamicOption = None,
    pretrained: PretrainedOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON")] = False,
    *,
    options: dict[str, Any],
) -> None:
    """Find what keeps a model from being exported, submodule by submodule; exit status 1 if something does."""
    from onnxplug.cli.report import out, progress

    with progress() as shown:
        from onnxplug_tools.diagnosis.diagnose import diagnose as findings_of

        model, args, arguments = export_of(target, inputs, dynamic, pretrained, options, shown)
        diagnosis = findings_of(model, args, **arguments)
    out.print(json.dumps(diagnosis.to_dict(), indent=2) if as_json else str(diagnosis), markup=False)
    if not diagnosis.exports:
        raise typer.Exit(1)
