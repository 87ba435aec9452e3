"""Eager-mode and FX graph-mode quantised models (``torch.ao.quantization.convert``, ``convert_fx``) during capture: the plugin.

torch cannot trace quantised tensors: they have no fakes, and packed weights are objects of C++. While a model is
captured, a stand-in in Python replaces each, which holds ordinary tensors: integers with their scale and zero point.
The model's own code runs on the stand-ins unchanged. torch dispatches every function that is called with a stand-in to
the package's tables (``__torch_function__``), which compute on numbers and quantise the result, as ONNX's
QuantizeLinear and DequantizeLinear do. A function that is not in the tables is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from onnxplug import CaptureMode, CaptureRequest, PluginInfo, UsageError, hookimpl

#: Functions of torch that give quantised tensors.
QUANTISERS = ("quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel", "_empty_affine_quantized")


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's description: the defaults."""
    return PluginInfo()


@hookimpl
def onnxplug_patches() -> list[Callable[[Any, CaptureRequest], list[CaptureMode]]]:
    """The capture modes with stand-ins for quantised tensors and weights."""
    return [_modes]


def _modes(module: Any, request: CaptureRequest) -> list[CaptureMode]:
    """The capture modes of a model.

    A quantised model has the mode with stand-ins. A model that only quantises numbers has a second mode, which captures
    quantised tensors themselves; that mode comes first where an export is exact, or has rules for quantised tensors.

    Raises:
        UsageError: A quantised model is to be captured in strict mode.
    """
    from onnxplug.capture.quantised import is_quantised

    options, mentions = request.options, request.mentions
    strict = options is not None and options.strict
    if is_quantised(module, mentions):
        if strict:
            raise UsageError(
                "a quantised model is captured in torch.export's non-strict mode, but strict=True is given"
            )
        return [_stand_ins(module)]
    if strict or not mentions(QUANTISERS.__contains__) or mentions("quantized_decomposed".__eq__):
        return []
    modes = [_stand_ins(module), CaptureMode()]
    as_they_are = options is not None and (options.exact or request.registry.has_own_rules("quantized:"))
    return modes[::-1] if as_they_are else modes


def _stand_ins(module: Any) -> CaptureMode:
    from onnxplug_quantized.capture import quantised_as_numbers

    return CaptureMode(partial(quantised_as_numbers, module), strict=False)
