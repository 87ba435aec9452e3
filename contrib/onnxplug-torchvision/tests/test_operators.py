"""Every operator against torchvision's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onnxplug

#: Tolerances that are looser than torch.testing's for float32, each with its reason.
LOOSER = {
    "regions": (
        {"rtol": 1e-5, "atol": 1e-5},
        "bilinear weights are rounded elsewhere, and samples are averaged in another order",
    ),
    "deformable": (
        {"rtol": 1e-4, "atol": 1e-4},
        "rounded offsets move the places that are read, and products are summed in another order",
    ),
}

AUTO = torch.export.Dim.AUTO


@pytest.mark.onnxplug("torchvision")
def test_promises_of_the_plugin(onnx_sample: Any) -> None:
    onnx_sample.check()


def ops() -> Any:
    return torch.ops.torchvision


def boxes(count: int, spread: float = 20.0) -> torch.Tensor:
    corners = torch.rand(count, 2) * spread
    return torch.cat([corners, corners + 4 + torch.rand(count, 2) * 10], 1)


def rois(count: int, batch: int, extent: float) -> torch.Tensor:
    """Regions of many kinds: inside, out of the image on each side, small, empty."""
    corners = torch.rand(count, 2) * extent - 3
    result = torch.cat([corners, corners + torch.rand(count, 2) * extent], 1)
    if count > 2:
        result[1, 2:] = result[1, :2] + 0.3
        result[2] = torch.tensor([2.0, 1.0, 2.0, 5.0])
        result[0] = torch.tensor([5.0, 4.0, 4.0, 3.0])
    return torch.cat([torch.randint(0, batch, (count, 1)).float(), result], 1)


@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.3, 0.5, 0.7, 1.0])
@pytest.mark.parametrize("opset", [13, 18, 21])
def test_nms(threshold: float, opset: int, agrees: Any) -> None:
    def model(b: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return b[ops().nms(b, s, threshold)]

    many, ties = boxes(60), boxes(9)
    agrees(
        model,
        (boxes(7), torch.rand(7)),
        inputs=[
            (many, torch.randn(60)),
            (boxes(1), torch.rand(1)),
            (torch.cat([ties, ties]), torch.ones(18)),
            (boxes(0), torch.rand(0)),
        ],
        dynamic_shapes=({0: AUTO}, {0: AUTO}),
        opsets=(opset,),
    )


@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.25, 0.3, 0.6, 0.7, 0.9])
def test_nms_at_the_threshold(threshold: float, agrees: Any) -> None:
    """Overlaps as near to the threshold as floats come: kept or dropped as torch compares, in double."""
    width = 1000.0
    shared = 2 * width * threshold / (1 + threshold)
    pairs = []
    for step in (-1e-4, 0.0, 1e-4):
        pairs.append(torch.tensor([[0, 0, width, 1], [width - shared + step, 0, 2 * width - shared + step, 1]]))
    first = pairs[0]
    agrees(
        lambda b, s: ops().nms(b, s, threshold),
        (first, torch.tensor([1.0, 0.5])),
        inputs=[(p, torch.tensor([0.5, 1.0])) for p in pairs],
    )
    # The second box is a part of the first: the overlap is the threshold, up to rounding.
    whole = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 10.0 * threshold]])
    agrees(lambda b, s: ops().nms(b, s, threshold), (whole, torch.tensor([1.0, 0.5])))


def test_nms_of_doubles_and_negative_threshold(agrees: Any) -> None:
    agrees(lambda b, s: ops().nms(b, s, 0.5), (boxes(9).double(), torch.rand(9).double()))
    with pytest.raises(onnxplug.Unsupported, match="below 0"):
        onnxplug.to_onnx(lambda b, s: ops().nms(b, s, -0.5), (boxes(3), torch.rand(3)))


def test_batched_nms(agrees: Any) -> None:
    from torchvision.ops import batched_nms

    def model(b: torch.Tensor, s: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return batched_nms(b, s, c, 0.4)

    def inputs(count: int) -> tuple[torch.Tensor, ...]:
        return boxes(count), torch.rand(count), torch.randint(0, 3, (count,))

    agrees(model, (*inputs(8),), inputs=[inputs(30), inputs(1), inputs(0)], dynamic_shapes=({0: AUTO},) * 3)


ALIGNED = [(False, opset) for opset in (13, 15, 16, 20, 21, 22)] + [(True, opset) for opset in (16, 20, 21, 22)]


@pytest.mark.parametrize("ratio", [-1, 0, 1, 3])
@pytest.mark.parametrize(("aligned", "opset"), ALIGNED)
def test_roi_align(aligned: bool, opset: int, ratio: int, agrees: Any) -> None:
    def model(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return ops().roi_align(x, r, 0.5, 3, 2, ratio, aligned)

    agrees(
        model,
        (torch.randn(2, 3, 8, 9), rois(5, 2, 20)),
        inputs=[(torch.randn(1, 3, 5, 4), rois(1, 1, 9)), (torch.randn(3, 3, 12, 6), rois(7, 3, 30))],
        dynamic_shapes=({0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}),
        opsets=(opset,),
        **LOOSER["regions"][0],
    )


def test_roi_align_aligned_needs_opset_16() -> None:
    args = (torch.randn(1, 3, 8, 9), rois(3, 1, 9))
    with pytest.raises(onnxplug.Unsupported, match="aligned"):
        onnxplug.to_onnx(lambda x, r: ops().roi_align(x, r, 1.0, 2, 2, -1, True), args, opset_version=15)


def test_roi_align_of_doubles(agrees: Any) -> None:
    agrees(
        lambda x, r: ops().roi_align(x, r, 1.0, 2, 2, 2, True),
        (torch.randn(1, 3, 8, 9).double(), rois(3, 1, 9).double()),
    )


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("opset", [13, 21])
def test_roi_pool(scale: float, opset: int, agrees: Any) -> None:
    halves = torch.tensor([[0, 0.5, 1.5, 6.5, 7.5], [0, -2.5, -0.5, 2.5, 4.5], [0, 3, 3, 1, 1], [0, 30, 30, 40, 40]])
    agrees(
        lambda x, r: ops().roi_pool(x, r, scale, 3, 2)[0],
        (torch.randn(2, 3, 8, 9), rois(5, 2, 20)),
        inputs=[(torch.randn(1, 3, 12, 6), halves), (torch.randn(1, 3, 5, 1), rois(1, 1, 5))],
        dynamic_shapes=({0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}),
        opsets=(opset,),
    )


def test_roi_pool_has_no_positions() -> None:
    args = (torch.randn(1, 3, 8, 9), rois(3, 1, 9))
    with pytest.raises(onnxplug.Unsupported, match="positions"):
        onnxplug.to_onnx(lambda x, r: ops().roi_pool(x, r, 1.0, 2, 2)[1], args)


@pytest.mark.parametrize("ratio", [-1, 2])
def test_ps_roi_align(ratio: int, agrees: Any) -> None:
    agrees(
        lambda x, r: ops().ps_roi_align(x, r, 0.5, 3, 2, ratio),
        (torch.randn(2, 12, 8, 9), rois(5, 2, 20)),
        inputs=[(torch.randn(1, 12, 5, 4), rois(1, 1, 9)), (torch.randn(3, 12, 12, 6), rois(7, 3, 30))],
        dynamic_shapes=({0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}),
        **LOOSER["regions"][0],
    )


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("opset", [13, 21])
def test_ps_roi_pool(scale: float, opset: int, agrees: Any) -> None:
    halves = torch.tensor([[0, 0.5, 1.5, 6.5, 7.5], [0, -2.5, -0.5, 2.5, 4.5], [0, 3, 3, 1, 1], [0, 30, 30, 40, 40]])
    agrees(
        lambda x, r: ops().ps_roi_pool(x, r, scale, 3, 2),
        (torch.randn(2, 12, 8, 9), rois(5, 2, 20)),
        inputs=[(torch.randn(1, 12, 12, 6), halves), (torch.randn(1, 12, 5, 1), rois(1, 1, 5))],
        dynamic_shapes=({0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}),
        opsets=(opset,),
    )


@pytest.mark.parametrize("opset", [13, 18, 19, 21, 22])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "offset_groups"),
    [
        ((1, 1), (0, 0), (1, 1), 1, 1),
        ((2, 1), (1, 2), (1, 2), 2, 1),
        ((1, 2), (2, 1), (2, 1), 1, 2),
        ((1, 1), (1, 1), (1, 1), 2, 2),
    ],
)
def test_deform_conv2d(
    stride: Any, padding: Any, dilation: Any, groups: int, offset_groups: int, masked: bool, opset: int, agrees: Any
) -> None:
    from torchvision.ops import deform_conv2d

    weight, bias = torch.randn(6, 4 // groups, 3, 2), torch.randn(6)

    def model(x: torch.Tensor, offset: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return deform_conv2d(
            x, offset, weight, bias, stride=stride, padding=padding, dilation=dilation, mask=mask if masked else None
        )

    def inputs(batch: int, high: int, wide: int) -> tuple[torch.Tensor, ...]:
        sizes = [
            (s + 2 * p - d * (k - 1) - 1) // t + 1
            for s, p, d, k, t in zip((high, wide), padding, dilation, (3, 2), stride, strict=True)
        ]
        offset = torch.randn(batch, offset_groups * 2 * 6, *sizes) * 3
        return torch.randn(batch, 4, high, wide), offset, torch.rand(batch, offset_groups * 6, *sizes)

    agrees(
        model,
        (*inputs(2, 8, 9),),
        inputs=[inputs(1, 8, 9), inputs(3, 8, 9)],
        dynamic_shapes=({0: AUTO}, {0: AUTO}, {0: AUTO}),
        opsets=(opset,),
        **LOOSER["deformable"][0],
    )
