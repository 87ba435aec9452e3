"""Modules of quantisation-aware training as in evaluation, without branches on their flags, which are tensors."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.errors import CaptureError

_LEARNABLE = "torch.ao.quantization._learnable_fake_quantize"
_SYMMETRIC = (torch.per_channel_symmetric, torch.per_tensor_symmetric)
_BY_CHANNEL = (torch.per_channel_symmetric, torch.per_channel_affine)


@contextlib.contextmanager
def fake_quantisers(model: Any) -> Iterator[None]:
    """Gives the fake quantisers of a model the ``forward`` that their flags select, while it is captured.

    Flags are buffers: ``forward`` reads their values at each call, which torch.export refuses, and the fused form writes its scale.
    """
    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules() if isinstance(model, torch.nn.Module) else ():
            forward = _forward(path, module)
            if forward is not None:
                stack.enter_context(patched(module, "forward", forward))
        yield


def _forward(path: str, module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that a fake quantiser computes; ``None`` for any other module."""
    known = sys.modules.get("torch.ao.quantization.fake_quantize")
    learnable = getattr(sys.modules.get(_LEARNABLE), "_LearnableFakeQuantize", ())
    is_learnable = isinstance(module, learnable) and type(module).forward is getattr(learnable, "forward", None)
    plain = (known.FakeQuantize.forward, known.FusedMovingAvgObsFakeQuantize.forward) if known is not None else ()
    if not is_learnable and getattr(type(module), "forward", None) not in plain:
        return None
    observes, enabled = module.static_enabled if is_learnable else module.observer_enabled, module.fake_quant_enabled
    if any(type(flag) is not torch.Tensor or flag.is_meta for flag in (observes, enabled)):
        return None  # without numbers
    is_fixed = known is not None and isinstance(
        module, known.FixedQParamsFakeQuantize
    )  # its observer does not change the result
    if bool(observes[0]) and not is_fixed:
        return partial(_refuse, path, is_learnable)
    if not bool(enabled[0]):
        return _unchanged
    return partial(_learnt, module, float(module.eps)) if is_learnable else partial(_quantised, module)


def _refuse(path: str, is_learnable: bool, x: torch.Tensor) -> torch.Tensor:
    remedy = (
        "module.toggle_observer_update(False) of each"
        if is_learnable
        else "model.apply(torch.ao.quantization.disable_observer)"
    )
    raise CaptureError(
        f"the fake quantiser {path!r} observes: each call changes its scale, in evaluation too, and PyTorch's results with it",
        hint=f"Keep the scales that it has: {remedy}.",
    )


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


def _quantised(module: Any, x: torch.Tensor) -> torch.Tensor:
    observer = module.activation_post_process
    low, high = observer.quant_min, observer.quant_max
    if module.is_per_channel:
        return torch.fake_quantize_per_channel_affine(x, module.scale, module.zero_point, module.ch_axis, low, high)
    return torch.fake_quantize_per_tensor_affine(x, module.scale, module.zero_point, low, high)


def _learnt(module: Any, least: float, x: torch.Tensor) -> torch.Tensor:
    """Like the operators that learn scales, which have no shape function."""
    scale = module.scale.clamp(min=least)
    shift = torch.zeros_like(module.zero_point) if module.qscheme in _SYMMETRIC else module.zero_point
    low, high = module.quant_min, module.quant_max
    zero_point = shift.round().clamp(low, high).to(torch.int32)
    if module.qscheme in _BY_CHANNEL:
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, module.ch_axis, low, high)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)
