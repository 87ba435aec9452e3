"""``to_onnx(dtype=…, quantize=…)``: a program that was exported, in half precision or quantised."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onnxplug import OnnxProgram, UsageError
from onnxplug.build.scope import nodes_of
from onnxplug.options import ExportOptions
from onnxplug_quantize.half.convert import half_dtype, to_half_precision
from onnxplug_quantize.report import Precision
from onnxplug_quantize.samples import calls_of, data_of

_TORCH = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Kernels of a runtime, as ``TargetInfo`` has them.
Kernels = Mapping[str, str] | None


def conversion(options: ExportOptions) -> Callable[[OnnxProgram, Kernels], Precision]:
    """What converts a program as the options of a call ask for.

    Args:
        options: With ``dtype`` or ``quantize``.

    Raises:
        UsageError: A value is none of those that there are, or data are lacking.
    """
    if options.dtype is not None:
        half_dtype(options.dtype)
    data = data_of(options.calibrate) if options.calibrate is not None else None

    def convert(program: OnnxProgram, kernels: Kernels) -> Precision:
        samples = samples_of(program)
        if data is not None:
            samples += calls_of(program, data)
        assert options.dtype is not None
        done = to_half_precision(
            program.model,
            options.dtype,
            samples,
            keep_io=options.keep_io,
            kernels=kernels,
            target=options.target,
            host=program.host,
        )
        program.half = _TORCH[options.dtype]
        return _told(program, done)

    return convert


def _told(program: OnnxProgram, done: Precision) -> Precision:
    """Gives a program what was done, and counts its nodes anew."""
    program.release()
    operators = Counter(node.op_type for node in nodes_of(program.model.graph))
    program.precision = done
    program.statistics = dataclasses.replace(
        program.statistics, onnx_nodes=operators.total(), operators=dict(operators.most_common())
    )
    return done


def samples_of(program: OnnxProgram) -> list[dict[str, torch.Tensor]]:
    """The example inputs of a program, by the names of the graph's inputs.

    Raises:
        UsageError: It has none.
    """
    captured = program.captured
    if captured is None or not any((captured.args, captured.kwargs, not program.model.graph.inputs)):
        raise UsageError(
            "dtype= and quantize= run the model on example inputs, of which there are none", hint="Give args or kwargs."
        )
    calls: Sequence[Any] = [(captured.args, captured.kwargs), *captured.examples]
    return [tensors(program.feed(args, kwargs)) for args, kwargs in calls]


def tensors(feed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Inputs, with numbers as tensors."""
    return {name: _tensor(value) for name, value in feed.items()}


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.tensor(value)
