"""SOLD2's detector and its parts, for maps with many junctions and lines, few and none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import onnxplug

pytest.importorskip("kornia")

from kornia.feature.sold2.sold2_detector import LineSegmentDetectionModule, SOLD2_detector, prob_to_junctions
from kornia.feature.sold2.structures import DetectorCfg, HeatMapRefineCfg, JunctionRefineCfg, LineDetectorCfg

#: Tolerances that are looser than torch.testing's, with their reasons.
LOOSER = {
    "lines": ({"rtol": 1e-5, "atol": 1e-6}, "means of the largest numbers are summed in another order"),
    "detector": ({"rtol": 1e-4, "atol": 1e-5}, "convolutions are summed in another order, layer after layer"),
}

SIZES = ((30, 40), (64, 41))
IMAGE = {0: "height", 1: "width"}


def config(mode: str | None = None, suppressed: bool = False, moved: bool = False, **options: Any) -> LineDetectorCfg:
    """A configuration with few blocks and few moves of junctions, which take eager kornia less time."""
    return LineDetectorCfg(
        use_heatmap_refinement=mode is not None,
        heatmap_refine_cfg=HeatMapRefineCfg(mode=mode or "local", num_blocks=5),
        use_candidate_suppression=suppressed,
        use_junction_refinement=moved,
        junction_refine_cfg=JunctionRefineCfg(num_perturbs=5),
        **options,
    )


def junctions(count: int, height: int, width: int) -> Tensor:
    """Places in raster order, [count, 2]."""
    places = torch.randperm(height * width)[:count].sort().values
    return torch.stack([places // width, places % width], 1).float()


def heatmap(count: int, height: int, width: int) -> Tensor:
    """Lines as wide as some pixels between random places."""
    image, places = torch.zeros(height, width), junctions(height * width, height, width)
    for start, end in junctions(2 * count, height, width)[torch.randperm(2 * count)].reshape(count, 2, 2):
        along = ((places - start) @ (end - start) / (end - start).square().sum()).clamp(0, 1)
        distance = (places - start - along[:, None] * (end - start)).square().sum(1)
        image = torch.maximum(image, torch.exp(-distance / 2).reshape(height, width))
    return image


def heatmaps(height: int, width: int) -> Iterator[Tensor]:
    """With many lines, few and none, noise, values below the thresholds, NaN and infinity."""
    yield from (heatmap(12, height, width), heatmap(2, height, width))
    yield from (torch.zeros(height, width), torch.ones(height, width))
    yield from (torch.rand(height, width), torch.rand(height, width) * 9e-4)
    for value in (float("nan"), float("inf")):
        unknown = heatmap(5, height, width)
        unknown[height // 2, width // 3] = value
        yield unknown


class Detect(nn.Module):
    def __init__(self, settings: LineDetectorCfg | None = None) -> None:
        super().__init__()
        self.detector = LineSegmentDetectionModule(settings)

    def forward(self, junctions: Tensor, heatmap: Tensor) -> Any:
        return self.detector.detect(junctions, heatmap)


@pytest.mark.parametrize(
    "settings",
    [
        config(),
        config(suppressed=True),
        config(moved=True),
        config("global", moved=True),
        config("local"),
        config("local", suppressed=True, moved=True),
        config("global", inlier_thresh=0.0, max_local_patch_radius=2.5, lambda_radius=1.0, num_samples=20),
    ],
)
def test_lines_between_junctions(compare: Callable[..., Any], settings: LineDetectorCfg) -> None:
    inputs = [(junctions(n, *size), image) for size in SIZES for image in heatmaps(*size) for n in (24, 0, 1, 2, 7)]
    compare(Detect(settings), inputs, ({0: "junctions"}, IMAGE), **LOOSER["lines"][0])


def test_lines_of_default_settings(compare: Callable[..., Any]) -> None:
    """Static sizes, 400 blocks and 6561 moves of each line."""
    inputs = [(junctions(8, 64, 72), image) for image in heatmaps(64, 72)]
    compare(Detect(), inputs, ({0: "junctions"}, None), **LOOSER["lines"][0])


def test_more_candidates_than_kornia_takes_at_once(compare: Callable[..., Any]) -> None:
    inputs = [(junctions(n, *SIZES[1]), heatmap(12, *SIZES[1])) for n in (150, 142)]
    program = compare(Detect(config()), inputs, ({0: "junctions"}, None))
    assert program(*inputs[0])[0].sum() > 0


@pytest.mark.parametrize("ratio", [0.0, 1.5, -0.4])
def test_other_ratios_of_a_heatmap(compare: Callable[..., Any], ratio: float) -> None:
    """All values, none, and all but the least, as Python slices."""
    detector = LineSegmentDetectionModule()
    inputs = [(image,) for size in SIZES for image in heatmaps(*size)]
    compare(lambda image: detector.refine_heatmap(image, ratio, 0.3), inputs, (IMAGE,))


@pytest.mark.parametrize(("count", "overlap"), [(1, 0.5), (4, 0.0), (3, 0.75), (4, -0.5), (4, 1.0)])
def test_other_blocks_of_a_heatmap(compare: Callable[..., Any], count: int, overlap: float) -> None:
    """Blocks that touch, overlap, coincide, or leave pixels out, which are NaN."""
    detector = LineSegmentDetectionModule()
    inputs = [(image,) for size in ((30, 40), (29, 43)) for image in heatmaps(*size)]
    compare(lambda image: detector.refine_heatmap_local(image, count, overlap), inputs, (IMAGE,))


@pytest.mark.parametrize("overlap", [0.5, 1.5])
def test_blocks_without_pixels(overlap: float) -> None:
    detector, image = LineSegmentDetectionModule(), torch.rand(48, 64)
    with pytest.raises(onnxplug.OnnxplugError, match="SOLD2's local refinement"):
        onnxplug.to_onnx(lambda image: detector.refine_heatmap_local(image, 20, overlap), (image,))


@pytest.mark.parametrize(("distance", "top_k"), [(8, 0), (4.7, 5), (0, 1000), (2, 1)])
def test_junctions(compare: Callable[..., Any], distance: float, top_k: int) -> None:
    """Of probabilities that are often equal: many junctions, few, one and none."""

    def maps(height: int, width: int) -> Iterator[tuple[Tensor]]:
        values = torch.rand(height, width)
        yield from ((values,), ((values * 8).round() / 8,), (values * 0.1,), (values * 0.502,))
        yield (torch.where(values > 0.6, float("nan"), values),)
        yield (torch.where(values == values.max(), 0.9, 0.0),)
        yield (torch.full_like(values, 0.5),)

    inputs = [args for size in SIZES for args in maps(*size)]
    compare(lambda prob: prob_to_junctions(prob, distance, 0.5, top_k), inputs, (IMAGE,))


class DetectInImages(nn.Module):
    """The detector with random weights; an image has a list of lines."""

    def __init__(self, moved: bool) -> None:
        super().__init__()
        lines = config("local", suppressed=True, moved=moved, detect_thresh=0.4)
        self.detector = SOLD2_detector(pretrained=False, config=DetectorCfg(line_detector_cfg=lines)).eval()

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        results = self.detector(image)
        return results["junction_heatmap"], results["line_heatmap"], *results["line_segments"]


def images(count: int) -> list[tuple[Tensor]]:
    scales = [1.0, 0.0, 0.3, 3.0, 10.0]
    return [(torch.rand(count, 1, *size) * scale,) for size in ((64, 72), (96, 80)) for scale in scales]


ROWS_AND_COLUMNS = ({2: 8 * Dim("rows"), 3: 8 * Dim("columns")},)


@pytest.mark.parametrize("count", [1, 2])
def test_the_detector(compare: Callable[..., Any], count: int, recwarn: pytest.WarningsRecorder) -> None:
    """Images of any height and width; a batch of static size."""
    inputs = images(count)
    program = compare(DetectInImages(moved=False), inputs, ROWS_AND_COLUMNS, **LOOSER["detector"][0])
    assert not list(recwarn)
    assert all(len(lines) > 100 for args in inputs for lines in program(*args)[2:])


def test_the_detector_with_moved_junctions() -> None:
    """The maps differ by rounding, which decides among moves of a line whose means are equal but for rounding."""
    model, inputs = DetectInImages(moved=True), images(1)
    program = onnxplug.to_onnx(model, inputs[0], dynamic_shapes=ROWS_AND_COLUMNS)
    with torch.no_grad():
        differences = torch.cat([(program(*args)[2] - model(*args)[2]).abs().flatten(1) for args in inputs])
    assert len(differences) > 100
    assert (differences.amax(1) < 1e-5).float().mean() > 0.95
    assert differences.max() <= 1.0
