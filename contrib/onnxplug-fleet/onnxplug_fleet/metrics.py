"""Metrics: how alike the results of the ONNX model and of PyTorch are on a sample."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxplug.errors import UsageError
from onnxplug.text import did_you_mean

if TYPE_CHECKING:
    import torch

    #: The results of PyTorch and of the ONNX model on a sample, each flattened.
    Results = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        score: A function of PyTorch's results and the ONNX model's, of one sample each, that returns a number.
        higher_is_better: Whether a threshold is the least accepted value, or the greatest.
        largest: Whether the value over all samples is the largest, not the mean.
    """

    name: str
    score: Callable[[Results, Results], float]
    higher_is_better: bool = True
    largest: bool = False

    def accepts(self, value: float, threshold: float) -> bool:
        """Whether a value meets a threshold; NaN meets none."""
        return value >= threshold if self.higher_is_better else value <= threshold

    def is_worse(self, value: float, other: float) -> bool:
        """Whether a value is worse than another; NaN is the worst."""
        if value != value or other != other:
            return value != value and other == other
        return value < other if self.higher_is_better else value > other


# -- the functions -----------------------------------------------------------------------------------------------------


def _first(expected: Results, actual: Results) -> tuple[torch.Tensor, torch.Tensor]:
    """The first results, from which classes, masks and tokens are read."""
    return expected[0], actual[0]


def _classes(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Classes or tokens: the largest score along an axis, or the values themselves if they are integers or absent."""
    has_scores = values.is_floating_point() and values.dim() > 0 and values.shape[axis] > 0
    return values.argmax(axis) if has_scores else values


def _rows(values: torch.Tensor) -> torch.Tensor:
    """A matrix of the rows; a scalar is a row of one element."""
    import torch

    return torch.atleast_2d(values).flatten(0, -2)


def _top1(expected: Results, actual: Results) -> float:
    """The share of rows whose largest score is of the same class."""
    one, other = (_classes(values, -1) for values in _first(expected, actual))
    return _share(one == other) if one.shape == other.shape else 0.0


def _token_match(expected: Results, actual: Results) -> float:
    """The share of positions with the same token; a missing or further token is a difference."""
    matches = total = 0
    for one, other in _sequences(expected, actual):
        matches += sum(a == b for a, b in zip(one, other, strict=False))
        total += max(len(one), len(other))
    return matches / total if total else 1.0


def _wer(expected: Results, actual: Results) -> float:
    """The word error rate: insertions, deletions and substitutions, divided by the number of PyTorch's tokens."""
    errors = total = 0
    for one, other in _sequences(expected, actual):
        errors += _distance(one, other)
        total += len(one)
    return errors / total if total else float(errors > 0)


def _sequences(expected: Results, actual: Results) -> list[tuple[list[int], list[int]]]:
    """The rows of tokens of both models; a row that only one model has is compared with an empty row."""
    rows = [_rows(_classes(values, -1)).tolist() for values in _first(expected, actual)]
    most = max(map(len, rows))
    one, other = (r + [[]] * (most - len(r)) for r in rows)
    return list(zip(one, other, strict=True))


def _distance(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein's distance."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def _iou(expected: Results, actual: Results) -> float:
    """Intersection over union of masks, the mean over the classes that occur; scores have classes on axis 1, bools are masks."""
    import torch

    first, second = _first(expected, actual)
    one, other = (_classes(values, 1 if values.dim() > 2 else -1) for values in (first, second))
    if one.shape != other.shape:
        return 0.0
    is_mask = one.dtype == torch.bool
    classes = [True] if is_mask else torch.cat([one.unique(), other.unique()]).unique().tolist()
    scores = []
    for value in classes:
        union = ((one == value) | (other == value)).sum().item()
        scores.append(((one == value) & (other == value)).sum().item() / union if union else 1.0)
    return sum(scores) / len(scores) if scores else 1.0


def _box_iou(expected: Results, actual: Results) -> float:
    """Intersection over union of boxes ``[…, 4]`` of two corners: the mean of each box's best value."""
    import torch

    one, other = (values.reshape(-1, 4).double() for values in _first(expected, actual))
    if len(one) == 0 or len(other) == 0:
        return float(len(one) == len(other))
    low = torch.maximum(one[:, None, :2], other[None, :, :2])
    high = torch.minimum(one[:, None, 2:], other[None, :, 2:])
    inside = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(-1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None, :] - inside
    overlap = torch.where(union > 0, inside / union, (low == high).all(-1).double())
    return torch.cat([overlap.amax(0), overlap.amax(1)]).mean().item()


def _cosine(expected: Results, actual: Results) -> float:
    """The cosine of embeddings, the least over all rows."""
    import torch

    one, other = (_rows(values).double() for values in _first(expected, actual))
    if one.shape != other.shape or len(one) == 0:
        return 1.0 if one.shape == other.shape else -1.0
    cosines = torch.nn.functional.cosine_similarity(one, other, dim=-1)
    zeros = (one == 0).all(-1) & (other == 0).all(-1)
    return torch.where(zeros, 1.0, cosines).min().item()


def _largest(expected: Results, actual: Results) -> float:
    """The largest difference of two elements, over all results."""
    return max((_differences(a, b).max().item() for a, b in _pairs(expected, actual)), default=0.0)


def _mean(expected: Results, actual: Results) -> float:
    """The mean difference of two elements, over all results."""
    import torch

    pairs = _pairs(expected, actual)
    return torch.cat([_differences(a, b).reshape(-1) for a, b in pairs]).mean().item() if pairs else 0.0


def _pairs(expected: Results, actual: Results) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(a, b) for a, b in zip(expected, actual, strict=True) if a.numel() or b.numel()]


def _differences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Differences of elements; infinite where shapes differ, or only one of the two elements is NaN."""
    import torch

    if one.shape != other.shape:
        return torch.tensor(float("inf"), dtype=torch.float64)
    kind = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(kind), other.to(kind)
    same = (one == other) | (one.isnan() & other.isnan())
    return torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=float("inf"))


def _share(same: torch.Tensor) -> float:
    return same.double().mean().item() if same.numel() else 1.0


#: The metrics that have names.
METRICS = {
    metric.name: metric
    for metric in (
        Metric("top1", _top1),
        Metric("iou", _iou),
        Metric("box_iou", _box_iou),
        Metric("wer", _wer, higher_is_better=False),
        Metric("token_match", _token_match),
        Metric("cosine", _cosine),
        Metric("largest", _largest, higher_is_better=False, largest=True),
        Metric("mean", _mean, higher_is_better=False),
    )
}
_FUNCTION = re.compile(r".+:[A-Za-z_][\w.]*")


def metric_names() -> list[str]:
    """The names of metrics."""
    return list(METRICS)


def is_metric(name: str) -> bool:
    """Whether a text is the name of a metric, or ``file.py:function``."""
    return name in METRICS or _FUNCTION.fullmatch(name) is not None


def metric_of(metric: str | Metric | Callable[[Results, Results], float]) -> Metric:
    """A metric by its name, by ``file.py:function``, or of a function itself.

    A function gets PyTorch's results and the ONNX model's on a sample, two lists of tensors, and returns a number. More is better,
    unless it has the attribute ``higher_is_better = False``.

    Raises:
        UsageError: ``metric`` is none of these.
    """
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, str) and metric in METRICS:
        return METRICS[metric]
    name = metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
    if isinstance(metric, str):
        if not is_metric(metric):
            raise UsageError(f"{metric!r} is no metric", hint=did_you_mean(metric, METRICS, otherwise=_listed()))
        from onnxplug_fleet.data import load_function

        metric = load_function(metric)
    if not callable(metric):
        raise UsageError(f"{metric!r} is no metric", hint=_listed())
    score = functools.partial(_number, name, metric)
    return Metric(name, score, getattr(metric, "higher_is_better", True))


def _listed() -> str:
    return f"The metrics are {', '.join(METRICS)}; or a function (expected, actual) -> number."


def _number(name: str, function: Callable[[Results, Results], float], expected: Results, actual: Results) -> float:
    """The number that a user's function returns."""
    value = function(expected, actual)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UsageError(f"the metric {name} returned {value!r}, which is no number") from None
