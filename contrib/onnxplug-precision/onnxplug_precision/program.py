"""``to_onnx(dtype=…, quantize=…)``: an exported program in half precision or quantised."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onnxplug import OnnxProgram, UsageError
from onnxplug.build.scope import nodes_of
from onnxplug.options import ExportOptions
from onnxplug_precision.half.convert import half_dtype, to_half_precision
from onnxplug_precision.integers.quantize import quantize
from onnxplug_precision.integers.settings import FourBits, Settings, Static, settings_of
from onnxplug_precision.report import Precision, merged
from onnxplug_precision.samples import calls_of, data_of

_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: The kernels of a runtime, as ``TargetInfo`` has them.
Kernels = Mapping[str, str] | None


def conversion(options: ExportOptions) -> Callable[[OnnxProgram, Kernels], list[Precision]]:
    """Makes the function that converts a program by the options of an export.

    Args:
        options: The options, with ``dtype`` or ``quantize``.
    """
    settings = checked_settings(options.dtype, options.quantize, options.calibrate is not None)
    data = data_of(options.calibrate) if options.calibrate is not None else []

    def convert(program: OnnxProgram, kernels: Kernels) -> list[Precision]:
        samples, calls = samples_of(program), calls_of(program, data)
        done: list[Precision] = []
        if settings is not None:
            plain = program.model
            program.model, quantised = quantize(plain, settings, samples, calls, program.host)
            program.unquantised = plain
            done.append(quantised)
        if options.dtype is not None:
            half = to_half_precision(
                program.model,
                options.dtype,
                [*samples, *calls],
                keep_io=options.keep_io,
                kernels=kernels,
                target=options.target,
                host=program.host,
            )
            program.half = _TORCH[options.dtype]
            done.append(half)
        return _noted(program, done)

    return convert


def checked_settings(dtype: str | None, quantized: str | None, has_data: bool) -> Settings | None:
    """The settings of quantisation, ``None`` without any.

    Raises:
        UsageError: A value is invalid, the data are missing, or the kind doesn't combine with a dtype.
    """
    if dtype is not None:
        half_dtype(dtype)
    settings = settings_of(quantized) if quantized is not None else None
    if isinstance(settings, Static) and not has_data:
        raise UsageError(
            "quantize='qdq' needs data for the scales of activations", hint="Give them by calibrate= (--calibrate)."
        )
    if dtype is not None and settings is not None and not isinstance(settings, FourBits):
        raise UsageError(
            f"quantize={settings.kind!r} can't be given together with dtype=, only 'int4' can",
            hint="Its integers are scaled in float32.",
        )
    return settings


def _noted(program: OnnxProgram, done: list[Precision]) -> list[Precision]:
    """Sets the program's report and statistics; returns the reports."""
    program.release()
    operators = Counter(node.op_type for node in nodes_of(program.model.graph))
    program.precision = done[-1] if len(done) == 1 else merged(done)
    program.statistics = dataclasses.replace(
        program.statistics, onnx_nodes=operators.total(), operators=dict(operators.most_common())
    )
    return done


def samples_of(program: OnnxProgram) -> list[dict[str, torch.Tensor]]:
    """The example inputs of a program, by the names of the graph's inputs.

    Raises:
        UsageError: The program has no example inputs.
    """
    captured = program.captured
    if captured is None or not any((captured.args, captured.kwargs, not program.model.graph.inputs)):
        raise UsageError(
            "dtype= and quantize= run the model on example inputs, of which there are none", hint="Give args or kwargs."
        )
    calls: Sequence[Any] = [(captured.args, captured.kwargs), *captured.examples]
    return [tensors(program.feed(args, kwargs)) for args, kwargs in calls]


def tensors(feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Inputs with numbers converted to tensors."""
    return {name: _tensor(value) for name, value in feed.items()}


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.tensor(value)
