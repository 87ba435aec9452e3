"""Early returns of empty results: the rest of the model where it has them too, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError
from tests.capture.returns import inputs, outcome

Tensor = torch.Tensor
Function = Callable[[Tensor], Any]


class _Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def _found(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0.8]


def _export(function: Function) -> onnxplug.OnnxProgram:
    return onnxplug.to_onnx(_Model(function), (inputs()[0],), dynamic_shapes=({0: "rows"},))


def scores_and_places(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _found(x)
    if len(y) == 0:
        return x.new_zeros(0, 1), torch.empty(0, 2, dtype=torch.long)
    places = torch.arange(x.shape[0])[x[:, 0] > 0.8]
    return y[:, :1] * 2, torch.stack([places, places], 1)


def by_number_of_elements(x: Tensor) -> dict[str, Tensor]:
    y = _found(x)
    if y.numel():
        return {"boxes": y.flip(1), "mean": x.mean(0)}
    return {"boxes": y, "mean": x.mean(0)}


def twice(x: Tensor) -> Tensor:
    y = _found(x)
    if not len(y):
        return y[:, :2]
    z = y[y[:, 1] > 0.5]
    if z.shape[0] < 1:
        return torch.zeros(0, 2)
    return z[:, :2] + 1


def of_two_sizes(x: Tensor) -> Tensor:
    """Neither size tells of the other."""
    y, z = _found(x), x[x[:, 1] > 0.8]
    if len(y) > 0 and len(z) > 0:
        return (y[:, None] - z).abs().reshape(-1, 4)
    return x.new_zeros(0, 4)


def goes_on(x: Tensor) -> Tensor:
    y = _found(x)
    scores = torch.zeros(0) if len(y) == 0 else y.sum(1)
    return torch.stack([scores, scores], 1)


def of_each_image(x: Tensor) -> list[Tensor]:
    """As the last step of detectors, with writes of their own results."""
    results = []
    for image in (x, x.flip(1)):
        y = image[image[:, 0] > 0.8]
        if len(y) == 0:
            results.append(image.new_zeros(0, 4))
            continue
        boxes = y.clone()
        boxes[:, :2] = y[:, :2] - y[:, 2:] / 2
        boxes[:, 2:] += 1
        results.append(boxes[boxes[:, 3] > 1.2])
    return results


def of_nonzero(x: Tensor) -> Tensor:
    rows = torch.nonzero(x[:, 0] > 0.8)[:, 0]
    return x[rows].sort(0)[0] if rows.numel() > 0 else x[:0]


@pytest.mark.parametrize(
    "function", [scores_and_places, by_number_of_elements, twice, of_two_sizes, goes_on, of_each_image, of_nonzero]
)
def test_the_rest_has_the_results(function: Function) -> None:
    program = _export(function)
    for x in inputs():
        program.verify(args=(x,), seeds=())


def another_shape(x: Tensor) -> Tensor:
    y = _found(x)
    return x.new_zeros(0, 3) if len(y) == 0 else y


def another_dtype(x: Tensor) -> Tensor:
    y = _found(x)
    return torch.zeros(0, 4, dtype=torch.float64) if len(y) == 0 else y


def another_shape_for_other_sizes(x: Tensor) -> Tensor:
    y = _found(x)
    return x.new_zeros(0, 4 if x.shape[0] > 3 else 5) if len(y) == 0 else y


def another_shape_for_a_size(x: Tensor) -> Tensor:
    y = _found(x)
    return x.new_zeros(0, 4 if x.shape[0] == 12 else 5) if len(y) == 0 else y


def a_row(x: Tensor) -> Tensor:
    y = _found(x)
    return x.new_zeros(1, 4) if len(y) == 0 else y


def of_one_row(x: Tensor) -> Tensor:
    y = _found(x)
    return y * 2 if len(y) == 1 else y


def other_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _found(x)
    return (y, x.sum()) if len(y) == 0 else (y, x.sum() + 1)


def a_sum(x: Tensor) -> Tensor:
    y = _found(x)
    return x.new_zeros(4) if len(y) == 0 else y.sum(0) + 1


def another_structure(x: Tensor) -> Any:
    y = _found(x)
    return y if len(y) == 0 else [y]


def random_results(x: Tensor) -> tuple[Tensor, Tensor]:
    y = _found(x)
    if len(y) == 0:
        return y, torch.rand(2)
    return y * 2, torch.rand(2)


def writes_its_input(x: Tensor) -> Tensor:
    y = _found(x)
    if len(y) == 0:
        return y
    x.view(-1)[:1].add_(1)
    return y


def writes_a_row_of_its_input(x: Tensor) -> Tensor:
    y = _found(x)
    if len(y) == 0:
        return y
    x.unbind(1)[2].add_(1)
    return y


def writes_through_dropout(x: Tensor) -> tuple[Tensor, Tensor]:
    """In evaluation it returns its operand."""
    copy, y = x * 2, _found(x)
    kept = torch.nn.functional.dropout(copy, training=False)
    if len(y) == 0:
        return y, kept
    copy[:1].add_(1)
    return y, kept


def writes_a_part(x: Tensor) -> tuple[Tensor, Tensor]:
    parts, y = (x * 2).chunk(2, 1), _found(x)
    if len(y) == 0:
        return y, parts[0]
    parts[0].add_(1)
    return y, parts[0]


def writes_within_no_grad(x: Tensor) -> Tensor:
    y = _found(x)
    if len(y) == 0:
        return y
    with torch.enable_grad():
        x.add_(1)
    return y


def writes_a_result(x: Tensor) -> tuple[Tensor, Tensor]:
    copy, y = x * 2, _found(x)
    if len(y) == 0:
        return y, copy
    copy[:1].add_(1)
    return y, copy


def writes_a_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = x[:, 0] > 0.8
    y = x[mask]
    if len(y) == 0:
        return y, y
    mask.logical_not_()
    return y, x[mask]


def counts_other_elements(x: Tensor) -> Tensor:
    """That there is no row of one kind says nothing about the other kind."""
    y = _found(x)
    return x[:0] if len(y) == 0 else torch.masked_select(x, x < 0.5).reshape(-1, 1).expand(-1, 4)


def takes_no_empty_tensor(x: Tensor) -> Tensor:
    y = _found(x)
    return y if len(y) == 0 else y - y.amax(0)


def takes_no_empty_tensor_by_its_kernel(x: Tensor) -> Tensor:
    """torch's rule for the shapes takes the size 0."""
    y = _found(x)
    return y if len(y) == 0 else y - y.median(0)[0] + y.mode(0)[0]


@pytest.mark.parametrize(
    "function",
    [
        another_shape,
        another_dtype,
        another_shape_for_other_sizes,
        another_shape_for_a_size,
        a_row,
        of_one_row,
        other_results,
        a_sum,
        another_structure,
        random_results,
        writes_its_input,
        writes_a_row_of_its_input,
        writes_through_dropout,
        writes_a_part,
        writes_within_no_grad,
        writes_a_result,
        writes_a_mask,
        counts_other_elements,
        takes_no_empty_tensor,
        takes_no_empty_tensor_by_its_kernel,
    ],
)
def test_other_results_are_an_error_that_names_the_line(function: Function) -> None:
    with pytest.raises(CaptureError, match=r"can't capture the model at .*test_early_returns.py:\d+"):
        _export(function)


def refuses_first(x: Tensor) -> Tensor:
    """A check that only refuses, and an early return of what else was looked for."""
    y, z = _found(x), x[x[:, 1] > 0.5]
    if len(y) == 0:
        raise ValueError("nothing was found")
    if len(z) == 0:
        return z
    return z * 2


def refuses_none(x: Tensor) -> Tensor:
    y = _found(x)
    if len(y) > 0:
        return y * 2
    raise ValueError("nothing was found")


def refuses_some(x: Tensor) -> Tensor:
    y = _found(x - 1)
    if y.numel() != 0:
        raise ValueError("something was found")
    return x * 2


@pytest.mark.parametrize("function", [refuses_first, refuses_none, refuses_some])
def test_a_refusal_of_either_side_stays_one(function: Function) -> None:
    with pytest.warns(match="was found"):
        program = _export(function)
    program.verify()


@pytest.mark.parametrize("seed", range(8))
def test_random_models(seed: int) -> None:
    assert not outcome(seed).startswith("wrong")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 400))
def test_many_random_models(seed: int) -> None:
    test_random_models(seed)
