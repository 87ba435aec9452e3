"""mmcv's functions and modules, against its own kernels for the CPU."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from onnxplug_mmcv import boxes, library
from torch import Tensor

import onnxplug

ops = pytest.importorskip("mmcv.ops")
#: Tolerances looser than torch.testing's own, with their reasons.
LOOSER = {
    "convolution": (
        {"rtol": 1e-4, "atol": 1e-4},
        "rounded offsets move the places that are read, and sums are in another order",
    ),
    "regions": (
        {"rtol": 1e-5, "atol": 1e-5},
        "bilinear weights are rounded elsewhere, and samples averaged in another order",
    ),
    "overlaps": ({"rtol": 1e-5, "atol": 1e-6}, "the library sorts the corners of an intersection by angles in float32"),
}
PLAIN = {"rtol": 1.3e-6, "atol": 1e-5}
AUTO = torch.export.Dim.AUTO
MAPS, ROWS, BOXES = {0: AUTO, 2: AUTO, 3: AUTO}, {0: AUTO}, {0: torch.export.Dim("boxes")}
SIZES = ((2, 3, 12, 10), (1, 3, 7, 8), (3, 3, 9, 5))
COUNTS = (20, 40, 1)


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
        with torch.no_grad():
            wanted = model(*args)
        for result, value in zip(program(*args), [wanted] if isinstance(wanted, Tensor) else wanted, strict=True):
            torch.testing.assert_close(result, value, **tolerance)
    return program


def rotated(count: int, extent: float = 20.0) -> Tensor:
    """Rows of (x, y, width, height, angle); some boxes are equal, or share an edge, and the seventh has no area."""
    made = torch.rand(count, 5) * torch.tensor([extent, extent, 8.0, 8.0, 6.0]) + torch.tensor([0.0, 0, 1, 1, -3])
    known = [
        [5.0, 5, 4, 2, 0],
        [5, 5, 4, 2, 0],
        [6, 5, 4, 2, 0],
        [6, 5, 4, 2, torch.pi / 2],
        [5, 5, 2, 2, 0],
        [9, 5, 4, 2, 0],
        [5, 5, 0, 2, 0],
    ]
    made[: len(known)] = torch.tensor(known)[:count]
    return made


def straight(count: int) -> Tensor:
    corners = torch.rand(count, 2) * 20
    return torch.cat([corners, corners + 3 + torch.rand(count, 2) * 10], 1)


def regions(count: int, batch: int, made: Tensor) -> Tensor:
    return torch.cat([torch.randint(0, batch, (count, 1)).float(), made], 1)


@pytest.mark.parametrize("opset", [16, 18, 19, 22])
@pytest.mark.parametrize("kind", ["DeformConv2dPack", "ModulatedDeformConv2dPack"])
@pytest.mark.parametrize(("stride", "dilation", "groups", "deform_groups"), [(1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 2)])
def test_convolutions(kind: str, stride: int, dilation: int, groups: int, deform_groups: int, opset: int) -> None:
    options = {"stride": stride, "padding": 2, "dilation": dilation, "groups": groups, "deform_groups": deform_groups}
    model = getattr(ops, kind)(4, 6, 3, **options).eval()
    torch.nn.init.normal_(model.conv_offset.weight)
    inputs = [(torch.randn(batch, 4, *size),) for batch, size in ((2, (8, 9)), (1, (5, 6)), (3, (7, 12)))]
    program = check(model, inputs, (MAPS,), LOOSER["convolution"][0], opset_version=opset)
    assert ("DeformConv" in program.statistics.operators) == (opset >= 19)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align(mode: str, ratio: int, aligned: bool) -> None:
    model = ops.RoIAlign((3, 2), 0.7, ratio, mode, aligned)

    def inputs(size: tuple[int, ...], count: int) -> tuple[Tensor, ...]:
        return torch.randn(size), regions(count, size[0], straight(count) - 2)

    made = [inputs(size, count) for size, count in zip(SIZES, (5, 1, 0), strict=True)]
    check(model, made, (MAPS, ROWS), LOOSER["regions"][0])
    flat = made[0][1].clone()
    flat[0, 3], flat[1, 4], flat[2, 3:] = flat[0, 1], flat[1, 2], flat[2, 1:3]  # no width, no height, neither
    check(model, [(made[0][0], flat), (made[0][0], flat[:1])], (MAPS, ROWS), LOOSER["regions"][0])
    below = (made[0][0] - 20000, made[0][1])  # the kernel's maximum begins at -10,000
    check(model, [below], None, LOOSER["regions"][0])


@pytest.mark.parametrize("opset", [13, {"": 18, "mmdeploy": 1}], ids=["plain", "mmdeploy"])
@pytest.mark.parametrize("clockwise", [True, False])
@pytest.mark.parametrize(("ratio", "aligned"), [(0, True), (2, True), (2, False)])
def test_roi_align_rotated(ratio: int, aligned: bool, clockwise: bool, opset: Any) -> None:
    model = ops.RoIAlignRotated((3, 2), 0.7, ratio, aligned, clockwise)
    inputs = [
        (torch.randn(size), regions(count, size[0], rotated(count, 12.0)))
        for size, count in zip(SIZES, (9, 1, 3), strict=True)
    ]
    program = check(model, inputs, (MAPS, ROWS), LOOSER["regions"][0], opset_version=opset)
    assert ("MMCVRoIAlignRotated" in program.statistics.operators) == isinstance(opset, dict)


@pytest.mark.parametrize("clockwise", [True, False])
@pytest.mark.parametrize("mode", ["iou", "iof"])
def test_box_iou_rotated(mode: str, clockwise: bool) -> None:
    """Random boxes, and boxes with edges that are equal, or nearly equal."""

    def every(one: Tensor, other: Tensor) -> Tensor:
        return ops.box_iou_rotated(one, other, mode, clockwise=clockwise)

    def pairs(one: Tensor, other: Tensor) -> Tensor:
        return ops.box_iou_rotated(one, other, mode, aligned=True, clockwise=clockwise)

    looser = LOOSER["overlaps"][0]
    check(every, [(rotated(n), rotated(m)) for n, m in ((30, 20), (1, 5), (7, 0))], (ROWS, ROWS), looser)
    check(pairs, [(rotated(n), rotated(n).flip(0)) for n in COUNTS], (BOXES, BOXES), looser)


@pytest.mark.parametrize(
    ("threshold", "more"),
    [(0.3, ()), (0.3, (1,)), (0.2, (0, 0.4)), (0.5, (1, 0.2, 3))],
    ids=["plain", "offset", "scores", "at most"],
)
def test_nms(threshold: float, more: tuple[Any, ...]) -> None:
    def model(b: Tensor, s: Tensor) -> Any:
        return ops.nms(b, s, threshold, *more)

    check(model, [(straight(n), torch.rand(n)) for n in COUNTS], (BOXES, BOXES))


def test_nms_at_the_threshold() -> None:
    """An overlap that equals the threshold as a float: mmcv compares floats, torchvision compares with a double."""
    one, other = torch.tensor([[0.0, 0, 10, 10]]), torch.tensor([[0.0, 0, 10, 3]])
    pair = torch.cat([one, other])
    for threshold in (0.3, 0.2999999):
        check(lambda b, s, t=threshold: ops.nms(b, s, t), [(pair, torch.tensor([1.0, 0.5]))], None)


@pytest.mark.parametrize("method", ["naive", "linear", "gaussian"])
@pytest.mark.parametrize(("options", "opset"), [({}, 13), ({"min_score": 0.3, "offset": 1, "iou_threshold": 0.1}, 21)])
def test_soft_nms(method: str, options: dict[str, Any], opset: int) -> None:
    def model(b: Tensor, s: Tensor) -> Any:
        return ops.soft_nms(b, s, method=method, **options)

    inputs = [(straight(n), torch.rand(n)) for n in COUNTS]
    program = check(model, inputs, (BOXES, BOXES), opset_version=opset)
    assert [tuple(x.shape) for x in program(torch.zeros(0, 4), torch.zeros(0))] == [(0, 5), (0,)]
    assert 1 < len(program(*inputs[1])[1]) <= 40


@pytest.mark.parametrize("opset", [16, 23, {"": 18, "mmdeploy": 1}], ids=["16", "23", "mmdeploy"])
@pytest.mark.parametrize("clockwise", [True, False])
def test_nms_rotated(clockwise: bool, opset: Any) -> None:
    def model(b: Tensor, s: Tensor) -> Any:
        return ops.nms_rotated(b, s, 0.1, clockwise=clockwise)

    inputs = [(rotated(n), torch.rand(n)) for n in COUNTS]
    for given, _ in inputs if isinstance(opset, dict) else ():
        given[:, 2].clamp_(min=1)  # mmdeploy drops a box that overlaps a box without area
    program = check(model, inputs, (BOXES, BOXES), opset_version=opset)
    assert ("NMSRotated" in program.statistics.operators) == isinstance(opset, dict)
    if not isinstance(opset, dict):
        assert [tuple(x.shape) for x in program(torch.zeros(0, 5), torch.zeros(0))] == [(0, 6), (0,)]


@pytest.mark.parametrize(("agnostic", "split"), [(True, 100), (False, 100), (False, 10)])
@pytest.mark.parametrize("kind", ["nms", "nms_rotated"])
def test_batched_nms(kind: str, agnostic: bool, split: int) -> None:
    """From ``split`` boxes on mmcv suppresses class by class."""

    def model(b: Tensor, s: Tensor, i: Tensor) -> Any:
        return ops.batched_nms(b, s, i, {"type": kind, "iou_threshold": 0.2, "split_thr": split}, agnostic)

    made = rotated if kind == "nms_rotated" else straight
    inputs = [(made(n), torch.rand(n), torch.randint(0, 3, (n,))) for n in COUNTS]
    check(model, inputs, (BOXES, BOXES, BOXES))
    check(lambda b, s, i: ops.batched_nms(b, s, i, None), inputs[:1], None)


def test_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmcv.__version__", "1.7.2")
    with pytest.raises(onnxplug.OnnxplugError, match=r"mmcv>=2.1,<2.3 are translated; 1.7.2 is installed"):
        onnxplug.to_onnx(lambda b, s: ops.nms_rotated(b, s, 0.3), (rotated(5), torch.rand(5)))


def test_labels_are_refused() -> None:
    with pytest.raises(onnxplug.OnnxplugError, match="labels"):
        onnxplug.to_onnx(lambda b, s: ops.nms_rotated(b, s, 0.1, s.long()), (rotated(4), torch.rand(4)))


class Deformable(torch.nn.Module):
    """Deformable attention to two levels of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = ops.MultiScaleDeformableAttention(16, 4, 2, 3, batch_first=True)
        torch.nn.init.normal_(self.attention.sampling_offsets.weight)
        torch.nn.init.normal_(self.attention.attention_weights.weight)

    def forward(self, query: Tensor, one: Tensor, other: Tensor, points: Tensor) -> Tensor:
        shapes = torch.tensor([one.shape[2:], other.shape[2:]])
        value = torch.cat([x.flatten(2) for x in (one, other)], 2).mT
        starts = torch.tensor([0, one[0, 0].numel()])
        return self.attention(
            query, value=value, reference_points=points, spatial_shapes=shapes, level_start_index=starts
        )


def test_deformable_attention() -> None:
    inputs = [
        (torch.randn(n, q, 16), torch.randn(n, 16, *one), torch.randn(n, 16, *other), torch.rand(n, q, 2, 2))
        for n, q, one, other in ((2, 5, (3, 4), (2, 5)), (1, 7, (6, 7), (3, 4)))
    ]
    rows = {0: AUTO, 1: AUTO}
    with pytest.warns(UserWarning, match="AssertionError"):  # mmcv's own check of the sizes
        program = check(Deformable().eval(), inputs, (rows, MAPS, MAPS, rows))
    assert program.statistics.operators["GridSample"] == 2


def test_deformable_attention_on_a_gpu() -> None:
    """The function that mmcv calls on a GPU gives the results of the function for the CPU."""
    module = sys.modules["mmcv.ops.multi_scale_deform_attn"]
    shapes, starts = torch.tensor([[3, 4], [2, 5]]), torch.tensor([0, 12])

    def model(value: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        return module.MultiScaleDeformableAttnFunction.apply(value, shapes, starts, places, weights, 64)

    inputs = [
        (torch.randn(n, 22, 4, 8), torch.rand(n, q, 4, 2, 3, 2), torch.rand(n, q, 4, 2, 3)) for n, q in ((2, 5), (1, 7))
    ]
    rows = {0: AUTO, 1: AUTO}
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=({0: AUTO}, rows, rows))
    for value, *rest in inputs:
        wanted = module.multi_scale_deformable_attn_pytorch(value, shapes, *rest)
        torch.testing.assert_close(program(value, *rest)[0], wanted, **PLAIN)


def test_overlaps_are_those_of_polygons() -> None:
    """Boxes with edges and corners that meet, against clipping in floats: the library is wrong for some boxes."""
    made = torch.cat(
        [torch.randint(0, 8, (40, 2)), torch.randint(1, 6, (40, 2)), torch.randint(-3, 4, (40, 1))], 1
    ).float()
    made[:, 4] *= torch.pi / 4
    wanted = torch.tensor([[_overlap(one, other) for other in made.tolist()] for one in made.tolist()])
    torch.testing.assert_close(boxes.overlaps(made.unsqueeze(1), made, False), wanted)


def _overlap(one: list[float], other: list[float]) -> float:
    shape, sides = _corners(*one), _corners(*other)
    for (x0, y0), (x1, y1) in zip(sides, [*sides[1:], sides[0]], strict=True):
        heights = [(x1 - x0) * (y - y0) - (y1 - y0) * (x - x0) for x, y in shape]
        points: list[tuple[float, float]] = []
        for n, (x, y) in enumerate(shape):
            before, (u, v) = heights[n - 1], shape[n - 1]
            if (before >= 0) != (heights[n] >= 0):
                part = before / (before - heights[n])
                points.append((u + part * (x - u), v + part * (y - v)))
            if heights[n] >= 0:
                points.append((x, y))
        shape = points
    area = sum(shape[n - 1][0] * y - shape[n - 1][1] * x for n, (x, y) in enumerate(shape)) / 2
    return area / (one[2] * one[3] + other[2] * other[3] - area)


def _corners(x: float, y: float, width: float, height: float, angle: float) -> list[tuple[float, float]]:
    turned = [(i * width / 2, j * height / 2) for i, j in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
    sine, cosine = math.sin(angle), math.cos(angle)
    return [(x + u * cosine - v * sine, y + u * sine + v * cosine) for u, v in turned]


def test_kernels_beside_those_of_the_library() -> None:
    """The functions of ``stand_in`` against the library's."""
    made, scores = rotated(30), torch.rand(30)
    theirs = sys.modules[library.EXTENSION].nms_rotated(made, scores, scores.argsort(), made, scores.int(), 0.1, 0)
    assert torch.equal(boxes.kept_rotated(made, scores, 0.1), theirs)
    x, rois = torch.randn(SIZES[0]), regions(5, 2, straight(5))
    for mode in (0, 1):
        results = [torch.zeros(5, 3, 3, 2) for _ in range(2)]
        for owner, result in zip((library.KERNELS, vars(sys.modules[library.EXTENSION])), results, strict=True):
            maxima = (torch.zeros_like(result), torch.zeros_like(result))
            owner["roi_align_forward"](x, rois, result, *maxima, 3, 2, 0.7, 2, mode, True)
        torch.testing.assert_close(*results, **LOOSER["regions"][0])


def test_readme(tmp_path: Path) -> None:
    """README's script in a process of its own, as ``stand_in`` can't be undone."""
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    begin = """
import os, sys, onnxplug_mmcv, onnxplug_torchvision
from onnxplug.testing import IsolatedRegistry
from tests.support.vision_kernels import define_vision_kernels
define_vision_kernels()
registry = IsolatedRegistry()
for plugin in (onnxplug_mmcv, onnxplug_torchvision):
    registry.add_plugin(plugin, name=plugin.__name__, distribution=plugin.__name__, version="0")
with registry.active():
    exec(sys.argv[1])
print("done")
"""
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
    command = [sys.executable, "-W", "ignore", "-c", begin, block]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert done.stdout.strip().endswith("done"), done.stderr
