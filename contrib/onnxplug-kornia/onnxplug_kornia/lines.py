"""SOLD2's junctions and line segments while a model is captured: no branch on values, and loops over segments as loops of torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onnxplug import UsageError
from onnxplug.torch_private import while_loop_op
from onnxplug_kornia.boxes import suppressed
from onnxplug_kornia.loops import goes_on

#: The number of candidates that are sampled together; the result is the same for any number.
GROUP = 256


def prob_to_junctions(prob: Tensor, dist: float, prob_thresh: float = 0.01, top_k: int = 0) -> Tensor:
    """kornia's function: the junctions of a map [height, width], (row, column) [N, 2], in raster order."""
    places = torch.nonzero(prob >= prob_thresh)
    junctions, half = places.float(), (math.floor(dist) + 0.5) / 2
    boxes = torch.cat([junctions - half, junctions + half], 1)
    order, is_kept = suppressed(boxes, prob[places[:, 0], places[:, 1]], 0.0)
    if top_k > 0:
        is_kept = is_kept & (is_kept.cumsum(0) <= top_k)
    return junctions[torch.zeros_like(is_kept).scatter(0, order, is_kept)]


def detect(self: Any, junctions: Tensor, heatmap: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``LineSegmentDetectionModule.detect``: the map of lines between junctions, the junctions and the heatmap.

    With refined junctions the map is float32; kornia's is int32 where there is no line.
    """
    refinement = self.heatmap_refine_cfg
    mode = getattr(refinement, "mode", None) if self.use_heatmap_refinement else None
    if mode == "global":
        heatmap = self.refine_heatmap(heatmap, refinement.ratio, refinement.valid_thresh)
    elif mode == "local":
        heatmap = self.refine_heatmap_local(
            heatmap, refinement.num_blocks, refinement.overlap_ratio, refinement.ratio, refinement.valid_thresh
        )
    count = junctions.shape[0]
    candidates = torch.ones((count, count), dtype=torch.int32, device=junctions.device).triu(1)
    if self.use_candidate_suppression:
        candidates = self.candidate_suppression(junctions, candidates)
    pairs = torch.nonzero(candidates)
    pairs = pairs[_are_lines(self, junctions, pairs, heatmap)]
    lines = _line_map(count, pairs[:, 0], pairs[:, 1], torch.int32)
    if self.use_junction_refinement:
        junctions, lines = self.refine_junction_perturb(junctions, lines, heatmap, *heatmap.shape, junctions.device)
    return lines, junctions, heatmap


def _line_map(count: Any, starts: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Ones where two junctions have a line, [count, count]."""
    lines = torch.zeros((count, count), dtype=dtype, device=starts.device)
    one = torch.ones((), dtype=dtype, device=starts.device)
    return lines.index_put((starts, ends), one).index_put((ends, starts), one)


def _are_lines(detector: Any, junctions: Tensor, pairs: Tensor, heatmap: Tensor) -> Tensor:
    """Which pairs of junctions [N, 2] are a line of the heatmap: bool [N]. Pairs are sampled in groups."""
    device = junctions.device
    last = torch.full((), pairs.shape[0] - 1, dtype=torch.int64, device=device)
    numbers = torch.arange(GROUP, device=device)
    limits, diagonal = _limits(heatmap)
    around = _circle(detector.local_patch_radius).to(device)

    def once(
        first: Tensor,
        going: Tensor,
        answers: Tensor,
        junctions: Tensor,
        pairs: Tensor,
        heatmap: Tensor,
        last: Tensor,
        numbers: Tensor,
        limits: Tensor,
        diagonal: Tensor,
        around: Tensor,
        sampler: Tensor,
    ) -> tuple[Tensor, ...]:
        places = torch.minimum(first + numbers, last)
        ends = junctions[pairs[places]]  # [group, 2, 2]
        lengths = (ends[:, 0].float() - ends[:, 1].float()).square().sum(-1).sqrt() / diagonal
        reach = 0.5 * 2**0.5 + detector.lambda_radius * lengths
        rows, columns = (x.unsqueeze(2) for x in _samples(ends, sampler, limits))  # [group, samples, 1]
        near_rows, near_columns = rows.round() + around[0], columns.round() + around[1]
        distances = ((rows - near_rows).square() + (columns - near_columns).square()).sqrt()
        near_rows = torch.minimum(near_rows.clamp(min=0), limits[0])
        near_columns = torch.minimum(near_columns.clamp(min=0), limits[1])
        values = _at(heatmap, near_rows, near_columns, limits)  # [group, samples, pixels]
        values = values * (distances < reach[:, None, None]).float()
        # A NaN, and infinity times 0, makes a line's mean NaN; ONNX Runtime's ReduceMax may pass it over.
        is_known = ~values.isnan().flatten(1).any(1)
        values = values.amax(-1)
        is_line = is_known & (values.mean(-1) > detector.detect_thresh)
        if detector.inlier_thresh > 0:
            inliers = (values > detector.detect_thresh).sum(-1).to(heatmap.dtype) / detector.num_samples
            is_line = is_line & (inliers >= detector.inlier_thresh)
        first = first + GROUP
        return first, first <= last, answers.scatter(0, places, is_line)

    answers = torch.zeros_like(pairs[:, 0], dtype=torch.bool)
    carried = (torch.zeros_like(last), last >= 0, answers)
    sampler = detector.torch_sampler.to(device)
    outside = (junctions, pairs, heatmap.flatten(), last, numbers, limits, diagonal, around, sampler)
    result: Tensor = while_loop_op(goes_on, once, carried, outside)[2]
    return result


def _limits(heatmap: Tensor) -> tuple[Tensor, Tensor]:
    """The last row and column of a heatmap, [2] in float32, and the length of its diagonal, a scalar."""
    height, width = (torch.full((), size, dtype=torch.float64, device=heatmap.device) for size in heatmap.shape)
    return (torch.stack([height, width]) - 1).float(), (height.square() + width.square()).sqrt()


def _samples(ends: Tensor, sampler: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of places on lines from one end to the other [N, 2, 2], within the heatmap: each [N, samples]."""
    starts, stops = ends.unsqueeze(3).unbind(1)
    rows, columns = (starts * sampler + stops * (1 - sampler)).clamp(min=0).unbind(1)
    return torch.minimum(rows, limits[0]), torch.minimum(columns, limits[1])


def _at(heatmap: Tensor, rows: Tensor, columns: Tensor, limits: Tensor) -> Tensor:
    """The values of a flat heatmap at whole rows and columns."""
    return heatmap[rows.long() * (limits[1].long() + 1) + columns.long()]


def _between(heatmap: Tensor, rows: Tensor, columns: Tensor, limits: Tensor) -> Tensor:
    """``detect_bilinear`` of a flat heatmap: 0 at whole rows and columns, where both of kornia's weights of a row are 0."""
    above, left, below, right = rows.floor(), columns.floor(), rows.ceil(), columns.ceil()
    return (
        _at(heatmap, above, left, limits) * (below - rows) * (right - columns)
        + _at(heatmap, above, right, limits) * (below - rows) * (columns - left)
        + _at(heatmap, below, left, limits) * (rows - above) * (right - columns)
        + _at(heatmap, below, right, limits) * (rows - above) * (columns - left)
    )


def _circle(radius: float) -> Tensor:
    """The offsets of pixels up to a distance in a square whose side is twice as long and one more, [2, N]."""
    side = np.arange(int(2 * radius + 1), dtype=np.float32) - np.float32(radius)
    offsets = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    distances = np.sqrt((offsets**2).sum(-1))
    # torch.tensor writes in place, of which functionalisation warns beside heatmaps that are views for some sizes.
    return torch.from_numpy(offsets[distances <= np.float32(radius)].T.copy())


def refine_heatmap(self: Any, heatmap: Tensor, ratio: float = 0.2, valid_thresh: float = 1e-2) -> Tensor:
    """``LineSegmentDetectionModule.refine_heatmap``: a heatmap by the mean of its largest values."""
    return torch.clamp(heatmap / _mean_of_largest(heatmap.flatten(), ratio, valid_thresh), min=0.0, max=1.0)


def _mean_of_largest(values: Tensor, ratio: float, threshold: float) -> Tensor:
    """The mean of a ratio of the values above a threshold, the largest, along the last axis, which remains; NaN of none."""
    is_above = values > threshold
    count = is_above.sum(-1, keepdim=True)
    number = torch.ceil(count.double() * ratio).long()
    number = torch.where(number < 0, number + count, number).clamp(min=0).minimum(count)  # as Python slices
    ordered = torch.where(is_above, values, -math.inf).sort(-1, descending=True).values
    is_chosen = torch.arange(values.shape[-1], device=values.device) < number
    return torch.where(is_chosen, ordered, 0.0).sum(-1, keepdim=True) / number


def refine_heatmap_local(
    self: Any,
    heatmap: Tensor,
    num_blocks: int = 5,
    overlap_ratio: float = 0.5,
    ratio: float = 0.2,
    valid_thresh: float = 2e-3,
) -> Tensor:
    """``LineSegmentDetectionModule.refine_heatmap_local``: means of overlapping blocks, each refined by itself, all at once."""
    (rows, in_rows), (columns, in_columns) = (
        _blocks(size, num_blocks, 1 - overlap_ratio, heatmap.device) for size in heatmap.shape
    )
    rows, columns = rows[:, None, :, None], columns[:, None]
    is_inside = (in_rows[:, None, :, None] & in_columns[:, None]).flatten(2)
    values = torch.where(is_inside, heatmap[rows, columns].flatten(2), -math.inf)
    means = _mean_of_largest(values, ratio, valid_thresh)
    is_refined = (values > valid_thresh).any(-1, keepdim=True) & ~values.isnan().any(-1, keepdim=True)
    values = torch.where(is_refined, torch.clamp(values / means, min=0.0, max=1.0), values)
    places = (rows * heatmap.shape[1] + columns).flatten()
    nothing = torch.zeros_like(heatmap.flatten(), dtype=torch.float32)
    sums = nothing.scatter_add(0, places, torch.where(is_inside, values, 0.0).float().flatten())
    counts = nothing.scatter_add(0, places, is_inside.float().flatten())
    return torch.clamp(sums / counts, min=0.0, max=1.0).reshape(heatmap.shape)


def _blocks(size: Any, count: int, step: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """The places of overlapping blocks of an axis [count, longest], and which of them are in their block.

    Args:
        size: The axis' size.
        count: The number of blocks; the last one ends where the axis ends.
        step: The distance of neighbouring blocks by their length, 0 or more.
    """
    if step < 0:
        raise UsageError(f"SOLD2's local refinement takes an overlap_ratio up to 1, not {1 - step}")
    length = round(size / (1 + (count - 1) * step))
    last = round((count - 1) * length * step)
    if isinstance(size, int) and not (length > 0 and last < size):
        raise UsageError(
            f"SOLD2's local refinement has an empty block among {count} of {size} rows or columns: kornia refuses it"
        )
    numbers = torch.arange(count, dtype=torch.float64, device=device)[:, None]
    starts = torch.round(numbers * length * step).long()
    ends = torch.where(numbers < count - 1, starts + length, size)
    places = starts + torch.arange(torch.sym_max(length, size - last), device=device)
    return places.clamp(max=size - 1), places < ends.clamp(max=size)


def refine_junction_perturb(
    self: Any, junctions: Tensor, line_map: Tensor, heatmap: Tensor, H: int, W: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``LineSegmentDetectionModule.refine_junction_perturb``, line after line: the moved junctions, and the map of their lines.

    Without a line the junctions remain.
    """
    config = self.junction_refine_cfg
    side = (config.num_perturbs - 1) // 2
    steps = torch.arange(
        -config.perturb_interval * side, config.perturb_interval * (side + 1), config.perturb_interval, device=device
    )
    moves = torch.cartesian_prod(steps, steps, steps, steps).reshape(-1, 2, 2)
    pairs = torch.nonzero(line_map.triu(1))
    lines = junctions[pairs]  # [N, 2, 2]
    numbers = torch.arange(pairs.shape[0], device=device)
    limits, _ = _limits(heatmap)

    def once(
        number: Tensor,
        going: Tensor,
        refined: Tensor,
        lines: Tensor,
        numbers: Tensor,
        count: Tensor,
        moves: Tensor,
        heatmap: Tensor,
        limits: Tensor,
        sampler: Tensor,
    ) -> tuple[Tensor, ...]:
        moved = torch.minimum((lines[number.unsqueeze(0)] + moves).clamp(min=0), limits)
        rows, columns = _samples(moved, sampler, limits)
        means = _between(heatmap, rows, columns, limits).mean(-1)
        best = moved[torch.where(means.isnan(), math.inf, means).argmax(0, keepdim=True)]  # torch's largest is NaN
        refined = torch.where((numbers == number)[:, None, None], best, refined)
        number = number + 1
        return number, number < count, refined

    count = torch.full((), pairs.shape[0], dtype=torch.int64, device=device)
    carried = (torch.zeros_like(count), count > 0, torch.zeros_like(lines))
    outside = (lines, numbers, count, moves, heatmap.flatten(), limits, self.torch_sampler.to(device))
    refined = while_loop_op(goes_on, once, carried, outside)[2]
    moved, places = torch.unique(refined.transpose(0, 1).flatten(0, 1), dim=0, return_inverse=True)
    starts, ends = places.unflatten(0, (2, pairs.shape[0]))
    junctions = torch.cat([junctions[(count == 0).expand(junctions.shape[0])], moved])
    return junctions, _line_map(junctions.shape[0], starts, ends, torch.float32)
