"""The context in which a quantised model is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from onnxplug.capture.mentions import Mentions
from onnxplug.capture.quantized.dispatch import call
from onnxplug.capture.quantized.tensor import INTEGERS, QTensor
from onnxplug.capture.quantized.weights import numbers_as_constants, stored, weights_as_modules
from onnxplug.errors import CaptureError
from onnxplug.torch_private import pytree, quantized_operators

QTensor.compute = staticmethod(call)


def is_quantised(module: nn.Module, mentions: Mentions) -> bool:
    """Whether a model has quantised weights or layers, or names ``torch.ops.quantized``.

    One that only quantises, moves numbers about and dequantises needs no stand-ins: there are rules for it
    (``converters/quantized_tensors.py``).
    """
    return (
        next(stored(module), None) is not None
        or any(_is_quantised_layer(m) for m in module.modules())
        or all(mentions(wanted.__eq__) for wanted in ("ops", "quantized"))
    )


def _is_quantised_layer(module: nn.Module) -> bool:
    place = type(module).__module__
    return place.startswith("torch.ao.nn.") and "quantized" in place and "reference" not in place


class _Quantisers(TorchFunctionMode):
    """Makes stand-ins of what torch would make quantised tensors of."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        quantise = _QUANTISERS.get(getattr(func, "__name__", ""))
        return func(*args, **kwargs or {}) if quantise is None else quantise(func, *args, **kwargs or {})


def _per_tensor(_: Any, input: Any, scale: Any, zero_point: Any, dtype: torch.dtype) -> QTensor:
    if dtype not in INTEGERS or not isinstance(input, torch.Tensor) or input.dtype != torch.float32:
        what = input.dtype if isinstance(input, torch.Tensor) else "several tensors at once"
        raise CaptureError(f"quantize_per_tensor of {what} to {dtype} can't be exported")
    return QTensor.of(input, scale, zero_point, dtype)


def _per_channel(_: Any, input: Any, scales: Any, zero_points: Any, axis: int, dtype: torch.dtype) -> QTensor:
    if dtype not in INTEGERS:
        raise CaptureError(f"quantize_per_channel to {dtype} can't be exported")
    storage, low, high = INTEGERS[dtype]
    scales = scales.float()
    quantize = torch.ops.quantized_decomposed.quantize_per_channel.default
    integers = quantize(input, scales, zero_points, axis, low, high, storage)
    return QTensor(integers, scales, zero_points, dtype, axis)


def _empty(_: Any, size: Any, *, scale: float, zero_point: int, dtype: torch.dtype, **_others: Any) -> QTensor:
    return QTensor(torch.zeros(size, dtype=INTEGERS[dtype][0]), scale, zero_point, dtype)


_QUANTISERS: dict[str, Callable[..., QTensor]] = {
    "quantize_per_tensor": _per_tensor,
    "quantize_per_channel": _per_channel,
    "_empty_affine_quantized": _empty,
}


def _refuse_quantised_results(_: nn.Module, args: Any, result: Any) -> None:
    if any(isinstance(leaf, QTensor) for leaf in pytree.tree_leaves(result)):
        raise CaptureError(
            "the model returns a quantised tensor; ONNX has no such element type",
            hint="Return x.dequantize(), or x.int_repr() with its scale and zero point.",
        )


@contextlib.contextmanager
def quantised_as_numbers(module: nn.Module) -> Iterator[None]:
    """While it holds, stand-ins take the place of a model's quantised weights and of the quantised tensors that it makes."""
    _ = quantized_operators.__name__  # importing it registers the operators
    hook = module.register_forward_hook(_refuse_quantised_results)
    try:
        with weights_as_modules(module), numbers_as_constants(module), _Quantisers():
            yield
    finally:
        hook.remove()
