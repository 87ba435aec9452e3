"""The context in which a quantised model is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onnxplug.capture.locations import runs_models
from onnxplug.errors import CaptureError
from onnxplug.torch_private import pytree, quantized_operators
from onnxplug_quantized import QUANTISERS
from onnxplug_quantized.dispatch import call, name_of
from onnxplug_quantized.dynamic import range_of
from onnxplug_quantized.tensor import INTEGERS, QTensor
from onnxplug_quantized.weights import numbers_as_constants, weights_as_modules

QTensor.compute = staticmethod(call)


class _Quantisers(TorchFunctionMode):
    """Makes torch's functions that quantise return stand-ins."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        quantise = _QUANTISERS.get(name_of(func)) if callable(func) else None
        return func(*args, **kwargs or {}) if quantise is None else quantise(func, *args, **kwargs or {})


def _per_tensor(_: Any, input: Any, scale: Any, zero_point: Any, dtype: torch.dtype) -> Any:
    if isinstance(input, list | tuple):
        rows = zip(input, _listed(scale), _listed(zero_point), strict=True)
        return [_per_tensor(_, *row, dtype) for row in rows]
    _check("quantize_per_tensor", input, dtype)
    return QTensor.of(input, scale, zero_point, dtype)


def _listed(numbers: Any) -> Any:
    return numbers.unbind() if isinstance(numbers, torch.Tensor) else numbers


def _dynamically(_: Any, input: Any, dtype: torch.dtype, reduce_range: bool) -> QTensor:
    if dtype != torch.quint8:
        raise CaptureError(f"quantize_per_tensor_dynamic to {dtype} can't be exported; to quint8 it can")
    _check("quantize_per_tensor_dynamic", input, dtype)
    return QTensor.of(input, *range_of(input, reduce_range), dtype)


def _per_channel(_: Any, input: Any, scales: Any, zero_points: Any, axis: int, dtype: torch.dtype) -> QTensor:
    _check("quantize_per_channel", input, dtype)
    if zero_points.is_floating_point():
        raise CaptureError("quantize_per_channel with zero points that are no integers can't be exported")
    storage, low, high = INTEGERS[dtype]
    scales, axis = scales.float(), axis % input.dim()
    quantize = torch.ops.quantized_decomposed.quantize_per_channel.default
    integers = quantize(input, scales, zero_points, axis, low, high, storage)
    return QTensor(integers, scales, zero_points, dtype, axis)


def _check(function: str, input: Any, dtype: torch.dtype) -> None:
    if dtype not in INTEGERS or input.dtype != torch.float32:
        raise CaptureError(f"{function} of {input.dtype} to {dtype} can't be exported")


def _empty(_: Any, size: Any, *, scale: float, zero_point: int, dtype: torch.dtype, **_others: Any) -> QTensor:
    return QTensor(torch.zeros(size, dtype=INTEGERS[dtype][0]), scale, zero_point, dtype)


_QUANTISERS: Mapping[str, Callable[..., Any]] = dict(
    zip(QUANTISERS, (_per_tensor, _dynamically, _per_channel, _empty), strict=True)
)


def _refuse_quantised_results(_: nn.Module, args: Any, result: Any) -> None:
    if any(isinstance(leaf, QTensor) for leaf in pytree.tree_leaves(result)):
        raise CaptureError(
            "the model returns a quantised tensor; ONNX has no such element type",
            hint="Return x.dequantize(), or x.int_repr() with its scale and zero point.",
        )


@contextlib.contextmanager
def quantised_as_numbers(module: nn.Module) -> Iterator[None]:
    """A context in which stand-ins replace a model's quantised weights, and the quantised tensors that it makes."""
    _ = quantized_operators.__name__  # importing it registers the operators
    runs_models(__file__, interprets=False)
    hook = module.register_forward_hook(_refuse_quantised_results)
    try:
        with weights_as_modules(module), numbers_as_constants(module), _Quantisers():
            yield
    finally:
        hook.remove()
