"""torchvision's operators in ONNX: the plugin. Converters are imported when one of the operators occurs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import ModelSource, OpSample, PluginInfo, Rule, hookimpl

_RULES = (
    ("nms", "nms:nms", (None, None)),
    ("roi_align", "roi:roi_align", (16, None)),
    ("roi_align", "roi:roi_align_unaligned", (None, 15)),
    ("roi_pool", "roi:roi_pool", (None, None)),
    ("ps_roi_align", "roi:ps_roi_align", (16, None)),
    ("ps_roi_pool", "roi:ps_roi_pool", (None, None)),
    ("deform_conv2d", "deform:deform_conv2d", (19, None)),
    ("deform_conv2d", "deform:deform_conv2d_by_gathers", (None, 18)),
)


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translations."""
    return [Rule(f"torchvision::{op}", f"onnxplug_torchvision.{where}", opset=opset) for op, where, opset in _RULES]


@hookimpl
def onnxplug_patches() -> list[Callable[[], Any]]:
    """The patches of detection models and Swin while torch.export captures a model."""
    return [_detection, _windows]


def _detection() -> Any:
    """Nothing to patch, and nothing to import, where torchvision isn't in use."""
    import sys
    from contextlib import nullcontext

    if "torchvision.ops" not in sys.modules:
        return nullcontext()
    from onnxplug_torchvision.patches import detection

    return detection()


def _windows() -> Any:
    """Nothing to patch, and nothing to import, where Swin isn't in use."""
    import sys
    from contextlib import nullcontext

    if "torchvision.models.swin_transformer" not in sys.modules:
        return nullcontext()
    from onnxplug_torchvision.windows import windows_of_any_size

    return windows_of_any_size()


@hookimpl
def onnxplug_sources() -> list[ModelSource]:
    """``torchvision:NAME`` on the command line."""
    help_ = "NAME is one of torchvision.models.list_models()."
    return [ModelSource("torchvision", "onnxplug_torchvision.sources:load", help=help_)]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""

    def regions(op: str, channels: int, *rest: Any, **options: Any) -> OpSample:
        """A sample with regions of images in the batch: random regions would not be."""
        others = [lambda: (_image(channels).flip(3), _rois().flip(0) * 0.8, *rest)]
        return OpSample(f"torchvision::{op}", lambda: (_image(channels), _rois(), *rest), others=others, **options)

    return [
        OpSample("torchvision::nms", lambda: (_boxes(), _scores(), 0.5)),
        regions("roi_align", 4, 0.5, 2, 3, -1, False),
        regions("roi_align", 4, 0.5, 2, 3, 2, True, opsets=range(16, 100)),
        # The second result of the next three serves training alone. ONNX Runtime has MaxRoiPool up to opset 21.
        regions("roi_pool", 4, 0.5, 2, 3, results=(0,), opsets=range(13, 22)),
        regions("ps_roi_align", 12, 0.5, 2, 3, 2, results=(0,)),
        regions("ps_roi_pool", 12, 0.5, 2, 3, results=(0,)),
        OpSample("torchvision::deform_conv2d", _deformed),
    ]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespace, and the requirement."""
    return PluginInfo(api=1, requires=["torchvision"], namespaces=("torchvision",))


def _image(channels: int) -> Any:
    import torch

    return torch.arange(2.0 * channels * 8 * 9).reshape(2, channels, 8, 9).mul(0.37).sin()


def _boxes() -> Any:
    import torch

    corners = torch.arange(24.0).reshape(12, 2).mul(1.7).remainder(20)
    return torch.cat([corners, corners + 8 + torch.arange(24.0).reshape(12, 2).mul(0.9).remainder(5)], 1)


def _scores() -> Any:
    import torch

    return torch.arange(12.0).mul(2.3).sin()


def _rois() -> Any:
    import torch

    return torch.tensor([[0, 1, 2, 11, 12.5], [1, 0, 0, 4.3, 9], [0, 6, 3, 15, 8]])


def _deformed() -> tuple[Any, ...]:
    import torch

    def wave(*shape: int) -> Any:
        return torch.arange(float(torch.Size(shape).numel())).mul(0.71).sin().reshape(shape)

    offset, mask = wave(2, 2 * 2 * 9, 6, 7) * 2, wave(2, 2 * 9, 6, 7)
    return _image(4), wave(6, 2, 3, 3), offset, mask, wave(6), 1, 1, 0, 0, 1, 1, 2, 2, True
