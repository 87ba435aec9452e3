"""Tensors indexed by numbers that are unknown while a model is captured: values of 0-dim tensors, and dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from tests.support.check import check

#: An item of an index, computed from an input [a, b, c].
Item = Any
_Item = Callable[[Tensor], Any]


def _row(x: Tensor) -> Tensor:
    return x.sum((1, 2)).argmax()


def _column(x: Tensor) -> Tensor:
    return x.sum((0, 2)).argmax()


def _last(x: Tensor) -> Tensor:
    return x.sum((0, 1)).argmax()


def _positive(x: Tensor) -> Tensor:
    return x.sum() > 0


INDICES: dict[str, tuple[Item, ...]] = {
    "integer": (_row,),
    "second axis": (slice(None), _column),
    "last axis": (..., _last),
    "several axes": (_row, slice(1, None), _last),
    "negative": (lambda x: _row(x) - 2,),
    "int32": (lambda x: _row(x).int(),),
    "beside None": (None, _row, None),
    "beside indices": (_row, slice(None), tensor([0, 1])),
    "after indices": (tensor([0, 1]), slice(None), _last),
    "beside a list": ([0, 1], _column),
    "beside a mask": (_row, lambda x: x[0, :, 0] > 0),
    "after a mask": (lambda x: x[:, :, 0] > 0, _last),
    "of a slice": (lambda x: slice(_row(x), None), tensor([0, 1])),
    "in a list": (slice(None), lambda x: [_column(x), tensor(0), 1]),
    "in nested lists": (slice(None), lambda x: [[_column(x), 0], [1, x.shape[1] - 1]]),
    "mask": (_positive,),
    "mask on the second axis": (slice(None), _positive),
    "mask of uint8": (lambda x: _positive(x).to(torch.uint8),),
    "mask and integer": (_positive, _row),
    "constant of uint8": (tensor(1, dtype=torch.uint8),),
    "constant 0 of uint8": (slice(None), tensor(0, dtype=torch.uint8)),
    "True and integer": (True, _row),
    "False and integer": (False, _row),
    "True and size": (True, lambda x: x.shape[0] - 1),
    "size": (slice(None), lambda x: x.shape[1] - 1),
    "size beside indices": (lambda x: x.shape[0] - 1, tensor([0, 1])),
    "size after indices": (tensor([0, 1]), lambda x: x.shape[1] - 1),
    "size after a mask": (lambda x: x[:, :, 0] > 0, lambda x: x.shape[2] - 1),
    "size in a list": (slice(None), lambda x: [x.shape[1] - 1, 0]),
    "size beside None": (None, lambda x: x.shape[0] - 1),
}
_NAMED = pytest.mark.parametrize("index", [pytest.param(index, id=name) for name, index in INDICES.items()])


def _made(index: tuple[Item, ...], x: Tensor) -> Any:
    items = tuple(item(x) if callable(item) else item for item in index)
    return items if len(items) > 1 else items[0]


def _check(model: Callable[[Tensor], Tensor]) -> None:
    """Checks a model on static sizes, and on dynamic sizes, with sums above and below 0."""
    inputs = [
        torch.randn(*shape) + shift
        for shape, shift in (((3, 4, 5), 1), ((3, 4, 5), -1), ((2, 6, 3), 1), ((5, 2, 7), -1))
    ]
    check(model, inputs[0], others=[(inputs[1],)])
    check(model, inputs[0], others=[(x,) for x in inputs[1:]], dynamic=({0: "a", 1: "b", 2: "c"},))


@_NAMED
def test_read(index: tuple[Item, ...], seeded: None) -> None:
    _check(lambda x: x[_made(index, x)])


@_NAMED
def test_written(index: tuple[Item, ...], seeded: None) -> None:
    def model(x: Tensor) -> Tensor:
        y = x.clone()
        y[_made(index, x)] = 7.0
        return y

    _check(model)


def test_written_at_an_index_that_follows_from_data(seeded: None) -> None:
    def model(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, _column(x)] = x[:, 0] * 2  # a tensor
        y[_row(x)] += 1  # read and written
        y.transpose(0, 1)[_column(x)] -= 3  # through a view
        y[_positive(x)] = x / 2
        for number, place in enumerate(x.sum((0, 2)).topk(2)[1]):
            y[:, place, number] = float(number)
        return y

    _check(model)


def test_sizes_of_what_is_written_are_not_asked_for(recwarn: pytest.WarningsRecorder, seeded: None) -> None:
    def model(x: Tensor) -> Tensor:
        y = x.clone()
        y[_positive(x)] = x / 2
        y[_row(x), tensor([0, 1])] = x[0, :2]
        return y

    _check(model)
    assert not [w for w in recwarn if "right only where" in str(w.message)]


def test_of_no_axes(seeded: None) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        total, other = x.sum(), x.sum() + 1
        other[x[0, 0, 0] > 0] = 5.0
        return total[_positive(x)], other

    _check(model)


def test_made_of_plain_numbers(seeded: None) -> None:
    """Tensors that are made of plain numbers have known values."""

    def model(x: Tensor) -> tuple[Tensor, ...]:
        y = x.clone()
        y[tensor(1), :, torch.arange(3)[-1]] = 2.0
        y[:, [tensor(1), tensor(0)]] += 1
        rows = torch.stack([y[i] for i in tensor([1, 0, -1])])
        return rows, y[tensor([2, 0, 1])[1]], y[..., tensor(-1)], y[tensor(True), tensor(1)], y[None, tensor(0), 1:]

    _check(model)
