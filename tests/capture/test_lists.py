"""Lists and ranges as long as a dynamic size: torch's functions take them, and code that reads them fixes the size."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug.torch_private import FakeTensor, NonStrictFunctions
from tests.support.check import check

#: Results of the tensor x (n, 4).
TAKEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "stack": lambda x: torch.stack([x[:, 0] * 2] * x.shape[0], dim=1),
    "stack of two": lambda x: torch.stack(x.shape[0] * [x[0], x[0] * 2]),
    "cat": lambda x: torch.cat([x, x * 2] * x.shape[0], -1),
    "cat by a larger number": lambda x: torch.cat([x] * (2 * x.shape[0] + 1)),
    "written to": lambda x: torch.stack([x] * x.shape[0]).add_(1) + x,
    "tensor": lambda x: torch.tensor([3, x.shape[0]] * x.shape[0]) + x[0, 0],
    "tensor of rows": lambda x: torch.tensor([[0.5, 2.0]] * x.shape[0]) * x[:, :2],
    "tensor of a dtype": lambda x: torch.tensor([True] * x.shape[0], dtype=torch.float64) * x[:, 0],
    "tensor of a range": lambda x: torch.tensor(range(1, x.shape[0])) * x[1:, 0],
    "tensor of a range from a size": lambda x: torch.tensor(list(range(x.shape[0], 9)), dtype=torch.float32) + x[0, 0],
    "range": lambda x: x[range(x.shape[0])],
    "range and places": lambda x: x[range(x.shape[0]), x.argmax(1)],
    "list of a range and a column": lambda x: x[list(range(x.shape[0])), 2],
    "backwards": lambda x: x[list(range(x.shape[0]))[::-1]] + torch.tensor(range(x.shape[0])[::-1])[:, None],
    "twice backwards": lambda x: torch.tensor(list(range(2, x.shape[0])[::-1])[::-1]) * x[2:, 0],
    "list of a quotient": lambda x: x[list(range((x.shape[0] + 1) // 2))],
    "list in an index": lambda x: x[:, None][:, [0] * x.shape[0]],
    "nothing": lambda x: x[range(x.shape[0], 1)].sum(0) + x,
    "kept": lambda x: (places := list(range(x.shape[0])), x[places, 0] + x[places, 1])[1],
    "by name": lambda x: torch.stack(dim=-1, tensors=[x] * x.shape[0]) * torch.tensor(data=[2.0] * x.shape[0]),
}
#: Results that need the elements, or their number.
READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "loop": lambda x: sum(x[i] * i for i in range(x.shape[0])),
    "length": lambda x: x * len([1] * x.shape[0]) + len(range(x.shape[0])),
    "sum": lambda x: x * sum([1, 2] * x.shape[0]),
    "list": lambda x: torch.stack(list([x] * x.shape[0])),
    "before another list": lambda x: torch.stack([x] * x.shape[0] + [x * 2]),
    "behind another list": lambda x: torch.stack([x * 2] + [x] * x.shape[0]),
    "with other elements": lambda x: torch.stack([x * 2, *[x] * x.shape[0]]),
    "two lists": lambda x: torch.stack([x] * x.shape[0] + [x * 2] * x.shape[0]),
    "appended to": lambda x: torch.stack(_changed([x] * x.shape[0], lambda items: items.append(x * 2))),
    "assigned to": lambda x: torch.stack(_changed([x] * x.shape[0], lambda items: operator.setitem(items, 1, x * 2))),
    "an index that is changed": lambda x: x[_changed(list(range(x.shape[0])), lambda items: items.reverse())],
    "another function": lambda x: torch.hstack([x] * x.shape[0]),
    "an argument within a list": lambda x: torch.block_diag(*[x] * x.shape[0]),
    "shape": lambda x: x.sum(1).reshape([1] * x.shape[0] + [-1]),
    "tuple": lambda x: torch.cat(tuple([x] * x.shape[0])),
    "constructor": lambda x: torch.LongTensor([1, 2] * x.shape[0]) + x.sum(),
    "comparison": lambda x: x * (1 if [1] * x.shape[0] == [1, 1, 1] and range(3) == range(x.shape[0]) else 2),
    "members": lambda x: x * (1 if 2 in range(x.shape[0]) and 1 in [1] * x.shape[0] else 2),
    "number of an element": lambda x: x * ([1, 2, 1] * x.shape[0]).count(1) + range(x.shape[0]).count(1),
    "elements": lambda x: x * range(x.shape[0])[-1] + ([5, 6] * x.shape[0])[1],
    "bounds": lambda x: x * range(1, x.shape[0])[::-1].stop + range(1, x.shape[0]).start + range(x.shape[0]).step,
    "from the end": lambda x: x * next(reversed(range(x.shape[0]))) + next(reversed([1] * x.shape[0])),
    "copied": lambda x: torch.stack(copy.copy([x] * x.shape[0])) * copy.copy(range(x.shape[0]))[1],
    "returned": lambda x: [x] * x.shape[0],
}


def _changed(items: Any, change: Callable[[Any], Any]) -> Any:
    change(items)
    return items


def _x(n: int) -> torch.Tensor:
    return torch.arange(4.0 * n).reshape(n, 4) % 7 - 3


@pytest.mark.parametrize("name", TAKEN)
def test_a_list_that_a_function_takes(name: str) -> None:
    program = check(TAKEN[name], _x(3), others=[(_x(5),), (_x(1),)], dynamic=({0: "n"},))
    assert program.captured is not None
    assert program.captured.strategy == "non-strict"


@pytest.mark.parametrize("name", READ)
def test_a_list_that_is_read(name: str) -> None:
    """Its length is a constant, which is an error for a declared dynamic dimension; statically it is as in PyTorch."""
    check(READ[name], _x(3), others=[(_x(3) * 2,)])
    with pytest.raises(onnxplug.FixedDimensionError, match="fixes it at 3"):
        onnxplug.to_onnx(READ[name], (_x(3),), dynamic_shapes=({0: "n"},))


@pytest.mark.parametrize("change", [list.reverse, list.clear, lambda items: list.append(items, 0)])
def test_changed_by_a_method_of_the_class(change: Callable[[Any], Any]) -> None:
    with pytest.raises(onnxplug.CaptureError, match="a method of list"):
        onnxplug.to_onnx(lambda x: x[_changed(list(range(x.shape[0])), change)], (_x(3),), dynamic_shapes=({0: "n"},))


def test_a_number_that_follows_from_data() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = int((x > 0).sum())
        torch._check(count <= x.shape[0])
        return torch.stack([x.sum()] * count), x[range(count)]

    check(model, torch.tensor([2.0, -1.0, 3.0]), others=[(torch.tensor([1.0, 2.0]),)], dynamic=({0: "n"},))


def test_classes() -> None:
    """Code sees the same classes as in eager PyTorch."""

    def model(x: torch.Tensor) -> torch.Tensor:
        items, numbers = [x] * x.shape[0], range(x.shape[0])
        known = type(items) is list and isinstance(items, list) and isinstance(numbers, range)
        return torch.stack(items)[list(numbers)] * (1 if known and type(numbers) is range else 2)

    check(model, _x(3), others=[(_x(5),), (_x(1),)], dynamic=({0: "n"},))


def test_nothing_stays() -> None:
    """After an export the model's code and torch's classes are as they were."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return x[range(x.shape[0])]

    def state() -> list[Any]:
        kept = [torch.SymInt.__mul__, torch.SymInt.__rmul__, FakeTensor.__getitem__, FakeTensor.__setitem__]
        return [*kept, NonStrictFunctions._override, model.__code__]

    before = state()
    check(model, _x(3), others=[(_x(5),)], dynamic=({0: "n"},))
    assert state() == before
