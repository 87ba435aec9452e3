"""detectron2's operators and masks, against mmcv's kernels, which were made of its kernels, and its Python where given.

detectron2 is not on PyPI. A copy of its Python is, ``pip download --no-deps --no-build-isolation pb1-detectron2==0.6``; the tests
use it where ``ONNXPLUG_SOURCES`` names its folder.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

ops = pytest.importorskip("mmcv.ops")
SOURCES = next(Path(os.environ.get("ONNXPLUG_SOURCES") or "/nowhere").glob("*detectron2-0.6.tar.gz"), None)
#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "regions": (
        {"rtol": 1e-5, "atol": 1e-5},
        "bilinear weights are rounded elsewhere, and samples averaged in another order",
    ),
    "overlaps": ({"rtol": 1e-5, "atol": 1e-6}, "the library sorts the corners of an intersection by angles in float32"),
}
PLAIN = {"rtol": 0.0, "atol": 0.0}
AUTO = torch.export.Dim.AUTO
MAPS, ROWS = {0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}


def radians(rows: Tensor) -> Tensor:
    """Boxes for mmcv, whose angles turn with the clock."""
    return torch.cat([rows[:, :-1], torch.deg2rad(-rows[:, -1:])], 1)


def kept(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    return ops.nms_rotated(radians(dets), scores, iou_threshold)[1]  # type: ignore[no-any-return]


def overlaps(one: Tensor, other: Tensor) -> Tensor:
    return ops.box_iou_rotated(radians(one), radians(other))  # type: ignore[no-any-return]


def pooled(x: Tensor, rois: Tensor, scale: float, height: int, width: int, ratio: int) -> Tensor:
    return ops.roi_align_rotated(x, radians(rois), (height, width), scale, ratio, True, True)  # type: ignore[no-any-return]


#: The operators as detectron2 registers them: a function for every device and for gradients, which reads values.
OPERATORS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "nms_rotated": ("(Tensor _0, Tensor _1, float _2) -> Tensor", kept),
    "box_iou_rotated": ("(Tensor _0, Tensor _1) -> Tensor", overlaps),
    "roi_align_rotated_forward": ("(Tensor _0, Tensor _1, float _2, int _3, int _4, int _5) -> Tensor", pooled),
}


def pasted(masks: Tensor, boxes: Tensor, image_shape: tuple[int, int], threshold: float = 0.5) -> Tensor:
    """Each mask in its box, by the function's documentation: pixels have their middle at 0.5; 0 is around a mask."""
    found = torch.zeros(len(masks), *image_shape, dtype=torch.bool)
    for result, mask, box in zip(found, masks, boxes.tolist(), strict=True):
        pixels = [
            [(at + 0.5 - box[axis]) / (box[axis + 2] - box[axis]) * mask.shape[1] - 0.5 for at in range(size)]
            for axis, size in ((0, image_shape[1]), (1, image_shape[0]))
        ]
        near = [torch.tensor([[max(0.0, 1 - abs(at - n)) for n in range(mask.shape[1])] for at in x]) for x in pixels]
        result.copy_(near[1] @ mask @ near[0].T >= threshold)
    return found


@pytest.fixture
def detectron2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The used parts of the library: its own Python where it is given; the operators have mmcv's kernels."""
    fragment = torch.library.Library("detectron2", "FRAGMENT")
    for name, (schema, kernel) in OPERATORS.items():
        fragment.define(name + schema)
        fragment.impl(name, kernel, "CompositeImplicitAutograd")
    modules = {name: ModuleType(f"detectron2{name}") for name in ("", ".layers", ".structures", "._C")}
    for name, module in modules.items():
        module.__path__ = [str(tmp_path / "detectron2" / name[1:])]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if name:
            setattr(modules[""], name[1:], module)
    vars(modules[""])["__version__"] = "0.6"
    vars(modules["._C"]).update({name: kernel for name, (_, kernel) in OPERATORS.items()})
    before = set(sys.modules)
    if SOURCES is not None:
        with tarfile.open(SOURCES) as files:
            files.extractall(tmp_path, filter="data")
        (tmp_path / "detectron2").symlink_to(next(tmp_path.glob("*detectron2-0.6")) / "detectron2")
        for name, found in (("structures.boxes", "Boxes"), ("layers.nms", ""), ("layers.roi_align_rotated", "")):
            module = importlib.import_module(f"detectron2.{name}")
            if found:
                vars(modules[".structures"])[found] = getattr(module, found)
        importlib.import_module("detectron2.layers.mask_ops")
        importlib.import_module("detectron2.layers.rotated_boxes")
    else:
        module = ModuleType("detectron2.layers.mask_ops")
        vars(module)["paste_masks_in_image"] = pasted
        sys.modules[module.__name__] = module
    yield SimpleNamespace(**{name.rpartition(".")[2]: sys.modules[name] for name in set(sys.modules) - before})
    for name in set(sys.modules) - before:
        if name.startswith("detectron2."):
            del sys.modules[name]
    fragment._destroy()
    for name in OPERATORS:
        if name in vars(torch.ops.detectron2):
            delattr(torch.ops.detectron2, name)


def check(
    model: Callable[..., Any],
    inputs: Sequence[tuple[Tensor, ...]],
    shapes: Any,
    tolerance: dict[str, float] = PLAIN,
    **options: Any,
) -> onnxplug.OnnxProgram:
    """Exports with the first inputs; the file gives the library's results for all inputs."""
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=shapes, **options)
    for args in inputs:
        (result,) = program(*args)
        torch.testing.assert_close(result, model(*args), **tolerance)
    return program


def rotated(count: int, extent: float = 20.0) -> Tensor:
    """Rows of (x, y, width, height, degrees)."""
    return torch.rand(count, 5) * torch.tensor([extent, extent, 8, 8, 720]) + torch.tensor([0.0, 0, 1, 1, -360])


def test_angles_turn_against_the_clock(detectron2: Any) -> None:
    """A bar with an angle of 45 degrees runs to the right and up, where y is smaller."""
    bars = torch.tensor([[0.0, 0, 10, 1, 45], [0.0, 0, 10, 1, -45]])
    squares = torch.tensor([[3.0, -3, 1, 1, 0], [3.0, 3, 1, 1, 0]])
    program = onnxplug.to_onnx(lambda one, other: torch.ops.detectron2.box_iou_rotated(one, other), (bars, squares))
    assert (program(bars, squares)[0] > 0.01).tolist() == [[True, False], [False, True]]


def test_overlaps(detectron2: Any) -> None:
    def model(one: Tensor, other: Tensor) -> Tensor:
        return torch.ops.detectron2.box_iou_rotated(one, other)  # type: ignore[no-any-return]

    inputs = [(rotated(n), rotated(m)) for n, m in ((30, 20), (1, 5), (7, 1))]
    check(model, inputs, (ROWS, ROWS), LOOSER["overlaps"][0])


@pytest.mark.parametrize("opset", [18, {"": 18, "mmdeploy": 1}], ids=["plain", "mmdeploy"])
def test_nms(opset: Any, detectron2: Any) -> None:
    def model(boxes: Tensor, scores: Tensor) -> Tensor:
        return torch.ops.detectron2.nms_rotated(boxes, scores, 0.3)  # type: ignore[no-any-return]

    inputs = [(rotated(count), torch.rand(count)) for count in (30, 60, 1)]
    program = check(model, inputs, (ROWS, ROWS), opset_version=opset)
    assert ("NMSRotated" in program.statistics.operators) == isinstance(opset, dict)


@pytest.mark.parametrize("opset", [18, {"": 18, "mmdeploy": 1}], ids=["plain", "mmdeploy"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_regions(ratio: int, opset: Any, detectron2: Any) -> None:
    def model(x: Tensor, rois: Tensor) -> Tensor:
        return torch.ops.detectron2.roi_align_rotated_forward(x, rois, 0.7, 3, 2, ratio)  # type: ignore[no-any-return]

    def inputs(size: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size), torch.cat([torch.randint(0, size[0], (count, 1)), rotated(count, 12)], 1)

    made = [inputs((2, 3, 12, 10), 9), inputs((1, 3, 7, 8), 1), inputs((3, 3, 9, 5), 4)]
    check(model, made, (MAPS, ROWS), LOOSER["regions"][0], opset_version=opset)


def test_a_program_captured_elsewhere(detectron2: Any) -> None:
    """A program that contains the library's operators, as where the library gives their shapes."""

    class Detector(nn.Module):
        def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
            return torch.ops.detectron2.box_iou_rotated(boxes, boxes).amax(1) * scores

    graph = torch.fx.symbolic_trace(Detector())
    boxes, scores = rotated(8), torch.rand(8)
    calls = [node for node in graph.graph.nodes if "box_iou_rotated" in str(node.target)]
    assert len(calls) == 1
    calls[0].target = torch.ops.detectron2.box_iou_rotated.default
    (result,) = onnxplug.to_onnx(graph, (boxes, scores))(boxes, scores)
    torch.testing.assert_close(result, overlaps(boxes, boxes).amax(1) * scores, **LOOSER["overlaps"][0])


def test_masks(detectron2: Any) -> None:
    """Any number of masks in an image of any size, over its edges too; boxes of a fraction of a pixel, and of many."""

    class Masks(nn.Module):
        def forward(self, masks: Tensor, boxes: Tensor, image: Tensor) -> Tensor:
            paste = sys.modules["detectron2.layers.mask_ops"].paste_masks_in_image
            return paste(masks.sigmoid(), boxes, (image.shape[0], image.shape[1]), 0.5)

    def inputs(count: int, height: int, width: int) -> tuple[Tensor, ...]:
        corners = torch.rand(count, 2) * torch.tensor([width, height]) * 0.9 - 2
        sides = torch.rand(count, 2) * torch.tensor([width, height]) + 0.1 + 2
        return torch.randn(count, 14, 14), torch.cat([corners, corners + sides], 1), torch.zeros(height, width)

    made = [inputs(5, 40, 60), inputs(12, 90, 50), inputs(1, 7, 9)]
    program = check(Masks(), made, (ROWS, ROWS, {0: AUTO, 1: AUTO}))
    assert program(torch.randn(0, 14, 14), torch.randn(0, 4), torch.zeros(6, 5))[0].shape == (0, 6, 5)


@pytest.mark.skipif(SOURCES is None, reason="no copy of detectron2 in the folder that ONNXPLUG_SOURCES names")
@pytest.mark.parametrize("threshold", [0.5, 0.1, -1.0])
def test_masks_of_the_library(threshold: float, detectron2: Any) -> None:
    """Thresholds for which pixels beside a box count; below 0, the uint8 results may differ by 1."""

    class Masks(nn.Module):
        def forward(self, masks: Tensor, boxes: Tensor) -> Tensor:
            made = detectron2.boxes.Boxes(boxes)
            return detectron2.mask_ops.paste_masks_in_image(masks, made, (60, 150), threshold)

    boxes = torch.tensor([[3.2, 4.1, 147.3, 50.2], [-5.0, 2.0, 20.5, 80.0], [10.25, 10.5, 12.0, 11.75]])
    inputs = [(torch.rand(3, 7, 7), boxes), (torch.ones(2, 7, 7), boxes[:2] + 0.3), (torch.rand(1, 7, 7), boxes[2:])]
    program = onnxplug.to_onnx(Masks(), inputs[0], dynamic_shapes=(ROWS, ROWS))
    for args in inputs:
        (result,), wanted = program(*args), Masks()(*args)
        assert result.dtype == wanted.dtype
        assert (result.int() - wanted.int()).abs().max() <= (threshold < 0)


@pytest.mark.skipif(SOURCES is None, reason="no copy of detectron2 in the folder that ONNXPLUG_SOURCES names")
def test_modules_of_the_library(detectron2: Any) -> None:
    """Suppression by class and pooling, whose functions call the operators or the extension."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = detectron2.roi_align_rotated.ROIAlignRotated((3, 2), 0.5, 2)

        def forward(self, x: Tensor, boxes: Tensor, scores: Tensor, classes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            keep = detectron2.nms.batched_nms_rotated(boxes, scores, classes, 0.3)
            near = detectron2.rotated_boxes.pairwise_iou_rotated(boxes[keep], boxes)
            return self.pool(x, nn.functional.pad(boxes[keep], (1, 0))), keep, near

    model = Detector()
    inputs = [
        (torch.randn(1, 3, size, 20), rotated(count), torch.rand(count), torch.randint(0, 3, (count,)))
        for size, count in ((16, 20), (11, 50))
    ]
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=({2: AUTO}, ROWS, ROWS, ROWS))
    for args in inputs:
        for result, wanted in zip(program(*args), model(*args), strict=True):
            torch.testing.assert_close(result, wanted, **LOOSER["regions"][0])


def test_another_version(detectron2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["detectron2"], "__version__", "0.9")
    paste = sys.modules["detectron2.layers.mask_ops"].paste_masks_in_image

    class Masks(nn.Module):
        def forward(self, masks: Tensor, boxes: Tensor) -> Tensor:
            paste = sys.modules["detectron2.layers.mask_ops"].paste_masks_in_image
            return paste(masks, boxes, (20, 20))

    with pytest.raises(onnxplug.OnnxplugError, match=r"detectron2>=0.5,<0.7 are translated; 0.9 is installed"):
        onnxplug.to_onnx(Masks(), (torch.rand(2, 7, 7), torch.rand(2, 4) + math.pi))
    assert sys.modules["detectron2.layers.mask_ops"].paste_masks_in_image is paste
