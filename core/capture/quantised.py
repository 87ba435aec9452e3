"""A model's quantised tensors and operators, which have no fakes in torch: ``onnxplug-quantized`` captures such models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from onnxplug.plugin_api import Mentions

PACKAGE = "onnxplug-quantized"
#: Operators that make quantised tensors of ordinary tensors.
QUANTIZERS = frozenset(
    getattr(packet, overload)
    for packet in (torch.ops.aten.quantize_per_tensor, torch.ops.aten.quantize_per_channel)
    for overload in packet.overloads()
)
#: Names of the classes of packed weights.
_CLASSES = ("__torch__.torch.classes.quantized.", "__torch__.torch.classes.rnn.")


def stored(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Quantised tensors and packed weights of a model, each with its module and name."""
    for owner in module.modules():
        for attributes in (vars(owner), owner._buffers, owner._parameters):
            yield from ((owner, name, value) for name, value in attributes.items() if _is_quantised(value))


def _is_quantised(value: Any) -> bool:
    if isinstance(value, torch.ScriptObject):
        return bool(value._type().qualified_name().startswith(_CLASSES))
    return isinstance(value, torch.Tensor) and value.is_quantized


def is_quantised(module: nn.Module, mentions: Mentions) -> bool:
    """Whether a model has quantised weights or layers, or names ``torch.ops.quantized``."""
    return (
        next(stored(module), None) is not None
        or any(map(_is_quantised_layer, module.modules()))
        or all(mentions(name.__eq__) for name in ("ops", "quantized"))
    )


def _is_quantised_layer(module: nn.Module) -> bool:
    place = type(module).__module__
    return place.startswith("torch.ao.nn.") and "quantized" in place and "reference" not in place
