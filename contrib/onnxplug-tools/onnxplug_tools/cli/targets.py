"""The model, inputs and options of the commands `diagnose` and `bisect`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxplug.progress import Display


def export_of(
    target: str,
    inputs: Sequence[str] | None,
    dynamic: Sequence[str] | None,
    pretrained: bool,
    options: Mapping[str, Any],
    shown: Display,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and the inputs of a command line, and the options with which ``to_onnx`` would export it.

    Args:
        options: Options of ``to_onnx`` with flags of their own.
    """
    from onnxplug.cli.inputs import parse_dynamic, parse_input
    from onnxplug.cli.options import registry
    from onnxplug.cli.targets import load_for_export

    shapes = parse_dynamic(dynamic or [])
    specs = [parse_input(text) for text in inputs or []]
    shown("loading")
    loaded = load_for_export(target, specs, pretrained=pretrained)
    arguments = {
        "kwargs": loaded.kwargs,
        "dynamic_shapes": shapes,
        "progress": shown,
        "registry": registry(),
        **options,
    }
    return loaded.model, loaded.args, arguments
