"""``convert_file``: an ONNX file of any exporter, in half precision or quantised."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from onnxplug_tools.inspection.feeds import make_feed
from onnxplug_tools.inspection.load import check_to_run, load_model

from onnxplug import UsageError
from onnxplug.run.save import save_model
from onnxplug_precision.half.convert import to_half_precision
from onnxplug_precision.integers.quantize import quantize as quantized
from onnxplug_precision.program import checked_settings
from onnxplug_precision.report import Precision
from onnxplug_precision.samples import checked, data_of


@dataclass(frozen=True)
class Converted:
    """The result of :func:`convert_file`.

    Attributes:
        reports: The report of each step.
        assumed: Dynamic dimensions of made-up inputs whose sizes were assumed.
    """

    reports: Sequence[Precision]
    assumed: Sequence[str] = ()


def convert_file(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    keep_io: bool = True,
    quantize: str | None = None,
    calibrate: Any = None,
    given: Sequence[tuple[str | None, Any]] = (),
    sizes: Mapping[str, int] | None = None,
    target: str | None = "onnxruntime",
    external_data: bool | None = None,
    host: Any = None,
) -> Converted:
    """Converts a file, and writes the result complete or not at all.

    Args:
        path: The ONNX file.
        output: The file to write; it may be the same.
        dtype: ``"float16"`` or ``"bfloat16"``.
        keep_io: Whether inputs and outputs stay in float32, with ``dtype``.
        quantize: ``"dynamic"``, ``"qdq"`` or ``"int4"``, with settings.
        calibrate: Calls by names of inputs, a ``.npz`` file or a folder of such files.
        given: Inputs that the model runs on, by name or in order; missing inputs are made up.
        sizes: Sizes of dynamic dimensions.
        target: The runtime that runs the model.
        external_data: Whether weights go into a file beside it; ``None`` decides by size.
        host: The plugins; all installed plugins when ``None``.

    Raises:
        UsageError: The file is no ONNX file, or an argument doesn't fit it.
        ConversionError: Nothing was converted.
        VerificationError: The converted model does not run, or gives NaN.
        SaveError: The result can't be written.
    """
    settings = checked_settings(dtype, quantize, calibrate is not None)
    data = data_of(calibrate) if calibrate is not None else []
    model = load_model(Path(path), infer=True)
    check_to_run(Path(path))
    assumed: Sequence[str] = ()
    calls = [checked(model, _named(call), f"call {number} of --calibrate") for number, call in enumerate(data)]
    samples: list[Mapping[str, torch.Tensor]] = []
    if given or not calls:
        feed = make_feed(model, given, sizes)
        samples, assumed = [feed.values], feed.assumed
    reports = []
    if settings is not None:
        model, done = quantized(model, settings, samples, calls, host)
        reports.append(done)
    if dtype is not None:
        kernels = host.kernels(target) if host is not None else None
        reports.append(
            to_half_precision(
                model, dtype, [*samples, *calls], keep_io=keep_io, kernels=kernels, target=target, host=host
            )
        )
    save_model(model, output, external_data=external_data)
    return Converted(reports, assumed)


def _named(call: Any) -> Mapping[str, torch.Tensor]:
    if not isinstance(call, Mapping):
        raise UsageError("calibrate= takes inputs by name, for a file", hint="Each call is a dict, or a .npz file.")
    return call
