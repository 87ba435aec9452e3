"""``onnxplug verify``: an ONNX file compared with the PyTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from onnxplug.cli.options import DynamicOption, InputOption, PretrainedOption, TargetArgument, registry
from onnxplug.errors import UsageError


def verify(
    model: Annotated[Path, typer.Argument(help="The ONNX file")],
    target: TargetArgument,
    inputs: InputOption = None,
    dynamic: DynamicOption = None,
    pretrained: PretrainedOption = False,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            help="Seed of one draw of sizes and values, as a failure reports it; default: three draws",
        ),
    ] = None,
) -> None:
    """Compare an ONNX file with the PyTorch model, at several sizes; plugins' libraries run custom operators."""
    from onnxplug.arguments import positional_and_named
    from onnxplug.cli.inputs import check_file, parse_dynamic, parse_input
    from onnxplug.cli.report import note, progress, verification
    from onnxplug.cli.targets import load_target
    from onnxplug_tools.verification import choices_of_file, verify_file

    check_file(model)
    shapes = parse_dynamic(dynamic or [])
    specs = [parse_input(text) for text in inputs or []]
    with progress() as shown:
        shown("loading")
        loaded = load_target(target, specs, pretrained=pretrained)
        if loaded.note:
            note(loaded.note)
        args, kwargs = positional_and_named(loaded.model, loaded.args, loaded.kwargs)
        shown("verification")
        report = verify_file(
            str(model),
            loaded.model,
            args,
            kwargs or {},
            _dynamic_axes(shapes, _ranks(model)),
            seeds=(0, 1, 2) if seed is None else (seed,),
            host=registry()[1],
            replay=choices_of_file(str(model), loaded.model, args, kwargs or {}, shapes, registry()[1]),
        )
    verification(report)


def _dynamic_axes(
    shapes: Mapping[str, Mapping[int, str | None]] | None, ranks: Mapping[str, int]
) -> dict[str, dict[int, str]]:
    """The dynamic axes of the inputs, without static axes; checked against the ranks of the model's inputs."""
    for name, axes in (shapes or {}).items():
        if name in ranks and len(axes) > ranks[name]:
            raise UsageError(f"--dynamic names {len(axes)} axes of {name}, which has {ranks[name]}")
    return {
        name: {axis: word for axis, word in axes.items() if word is not None} for name, axes in (shapes or {}).items()
    }


def _ranks(model: Path) -> dict[str, int]:
    """The ranks of a model's inputs, as far as the file has them."""
    from onnxplug_tools.onnx_file import read_model

    types = {value.name: value.type for value in read_model(model).graph.input}
    return {name: len(kind.tensor_type.shape.dim) for name, kind in types.items() if kind.tensor_type.HasField("shape")}
