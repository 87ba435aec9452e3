"""Inputs for the package's operators; making the first inputs defines the operators in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxplug import OpSample


def samples() -> list[OpSample]:
    """The samples, with any number of boxes and regions."""
    rows = {0: "boxes"}
    maps, regions = {0: "batch", 2: "height", 3: "width"}, {0: "regions"}
    return [
        OpSample(
            "onnxplug_mmcv::nms_rotated",
            _boxes(12),
            dynamic_shapes=(rows, rows, None),
            others=[_boxes(1), _boxes(30)],
        ),
        *(
            OpSample(
                "onnxplug_mmcv::roi_align_rotated",
                _regions(5, (2, 3, 12, 10), *rest),
                dynamic_shapes=(maps, regions, *[None] * 6),
                others=[_regions(1, (1, 3, 5, 6), *rest), _regions(9, (3, 3, 8, 9), *rest)],
            )
            for rest in ((2, True, False), (0, False, True))
        ),
    ]


def _boxes(count: int) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        return _rotated(torch, count), torch.rand(count), 0.2

    return args


def _regions(count: int, size: tuple[int, ...], *rest: Any) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        rois = torch.cat([torch.randint(0, size[0], (count, 1)).float(), _rotated(torch, count)], 1)
        return torch.randn(size), rois, 3, 2, 0.6, *rest

    return args


def _rotated(torch: Any, count: int) -> Any:
    return torch.rand(count, 5) * torch.tensor([15.0, 15.0, 8.0, 8.0, 6.0])


def _torch() -> Any:
    """torch, with the operators defined."""
    import torch

    from onnxplug_mmcv.library import define

    define()
    return torch
