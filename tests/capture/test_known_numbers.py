"""Numbers that a model's code reads from buffers and constants: the branch is that of every call, or the export is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onnxplug
from onnxplug import CaptureError
from tests.support.check import check

X = torch.randn(2, 3)


class _Model(nn.Module):
    """A model with tensors of each kind; a function of it and of an input is its ``forward``."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any], flag: float = 1.0) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("flag", torch.tensor([flag, 2.0]))
        self.register_buffer("count", torch.tensor(3), persistent=False)
        self.register_buffer("sizes", torch.tensor([2, 1]))
        self.register_buffer("other", torch.tensor([0.0, 1.0]))
        self.register_buffer("view", self.flag[:1])
        self.plain = torch.tensor([flag, 4.0])
        self.weight = nn.Parameter(torch.tensor([flag, 2.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _scaled(number: Any, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if number > 0.5 else x.flip(0)


def _swapped(model: Any, x: torch.Tensor, back: bool = False) -> torch.Tensor:
    first, second = model.flag, model.other
    model.flag, model.other = second, first
    result = _scaled(model.flag[0], x)
    if back:
        model.flag, model.other = first, second
    return result


def _constant_and_write(x: torch.Tensor) -> torch.Tensor:
    constant = torch.tensor([1.0, 2.0])
    result = _scaled(constant[0], x)
    constant.add_(1)
    return result * constant[1]


def _view_of_written(tensor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    view = tensor[:1]
    tensor.zero_()
    return _scaled(view[0], x)


def _under_autocast(tensor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        number = (tensor[None] * 1.001) @ tensor[:, None] + torch.tensor([1.001, 2.0])[None] @ torch.tensor(
            [[1.0], [2.0]]
        )
        return _scaled(number - 5.5, x)


def _normalized(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Its schema doesn't say that it writes the statistics."""
    return F.batch_norm(x[:, :2], model.flag, model.other, training=True)


RIGHT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "buffer": lambda m, x: _scaled(m.flag[0], x),
    "any": lambda m, x: _scaled((m.flag > 1.5).any(), x),
    "constant": lambda m, x: _scaled(m.plain[1] - 3.9, x),
    "tensor of the code": lambda m, x: _scaled(torch.tensor([0.25, 2.0])[1:].sum(), x),
    "list": lambda m, x: sum((x * n for n in m.sizes.tolist()), x),
    "list of the code": lambda m, x: x * sum(torch.tensor([3, 4]).tolist()),
    "sizes": lambda m, x: x.expand(m.sizes[0].item(), *x.shape).repeat(1, int(m.sizes[0]), 1),
    "loop": lambda m, x: sum((x * i for i in range(m.count)), x),
    "equal": lambda m, x: x * 2 if torch.equal(m.sizes, torch.tensor([2, 1])) else x,
    "two": lambda m, x: _scaled(m.flag[0] - m.other[0] - m.plain[0], x),
    "another is written": lambda m, x: (m.other.add_(1), _scaled(m.flag[0], x) + m.other[0])[1],
    "a constant that is written afterwards": lambda m, x: _constant_and_write(x),
    "an operand of a write": lambda m, x: _scaled(m.flag[0], x.clone().mul_(m.flag[0])),
    "buffers that change places and back": lambda m, x: _swapped(m, x, back=True),
}
#: Models that read a number which may be another number at another call.
REFUSED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "parameter": lambda m, x: _scaled(m.weight[0], x),
    "input": lambda m, x: _scaled(m.flag[0] * x.sum(), x),
    "random number": lambda m, x: _scaled(m.flag[0] * torch.rand(()), x),
    "written before": lambda m, x: (m.flag.mul_(0.5), _scaled(m.flag[0], x))[1],
    "written afterwards": lambda m, x: (_scaled(m.flag[0], x), m.flag.fill_(0.0))[0],
    "a view written afterwards": lambda m, x: (_scaled(m.flag[0], x), m.flag[1:].fill_(0.0), m.flag[0:1].zero_())[0],
    "a buffer that is a view, written before": lambda m, x: (m.view.zero_(), _scaled(m.flag[0], x))[1],
    "a buffer that is a view, written afterwards": lambda m, x: (_scaled(m.flag[0], x), m.view.zero_())[0],
    "buffers that change places": _swapped,
    "written before, through a dropout": lambda m, x: (F.dropout(m.flag, 0.5, False).zero_(), _scaled(m.flag[0], x))[1],
    "written afterwards, through a dropout": lambda m, x: (
        _scaled(m.flag[0], x),
        F.dropout(m.flag, 0.5, False).zero_(),
    )[0],
    "written before, by statistics": lambda m, x: (_normalized(m, x), _scaled(m.flag[0], x))[1],
    "written afterwards, by statistics": lambda m, x: (_scaled(m.flag[0], x), _normalized(m, x))[0],
    "a copy that is written through a view": lambda m, x: _view_of_written(m.flag.clone(), x),
    "under autocast": lambda m, x: _under_autocast(m.flag, x),
    "written with an input": lambda m, x: (m.flag.copy_(x[0, :2]), _scaled(m.flag[0], x))[1],
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("flag", [1.0, 0.0])
def test_a_branch(name: str, flag: float) -> None:
    program = check(_Model(RIGHT[name], flag), X, others=[(-X,)])
    assert program.captured is not None
    assert program.captured.strategy == "non-strict"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("flag", [1.0, 0.0])
def test_a_number_that_may_change_is_refused(name: str, flag: float) -> None:
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(_Model(REFUSED[name], flag), (X,))


def test_a_list_of_many_numbers() -> None:
    """Each read looks only at new nodes of the graph."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("numbers", torch.arange(300.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * sum(self.numbers.tolist()) + sum(float(self.numbers[place]) for place in range(5))

    check(Weighted(), X, others=[(-X,)])


def test_the_error_names_the_read() -> None:
    with pytest.raises(CaptureError, match=r"test_known_numbers\.py:\d+ reads a number from a tensor that it writes"):
        onnxplug.to_onnx(_Model(REFUSED["written afterwards"]), (X,), strict=False)


class _Plain(nn.Module):
    """A model with tensors that are no buffers."""

    def __init__(self, function: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.function, self.one, self.two = function, torch.tensor(2.0), torch.tensor([2.0, 1.0])

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def _replaced_after_float(m: Any, x: torch.Tensor) -> torch.Tensor:
    number, m.one = float(m.one), m.one * 0.5
    return x * number


def _replaced_after_a_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2 if m.two[0] > 1 else x
    m.two = m.two * 0.5
    return y


def _written_after_a_branch(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x * 2 if m.two[0] > 1 else x
    m.two.mul_(0.5)
    return y


def _view_written_after_float(m: Any, x: torch.Tensor) -> torch.Tensor:
    number = float(m.one)
    m.one.view(1)[0] = 0.5
    return x * number


def _own_tensor_written(m: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.tensor([1.0])
    y = x * 2 if made > 0 else x
    return y + made.add_(float(m.one))


@pytest.mark.parametrize("function", [_replaced_after_float, _replaced_after_a_branch], ids=lambda f: f.__name__)
def test_a_number_of_a_replaced_tensor_is_said(function: Any) -> None:
    with pytest.warns(UserWarning, match=r"test_known_numbers\.py:\d+ reads a number from the tensor '(one|two)'"):
        program = onnxplug.to_onnx(_Plain(function), (X,), strict=False)
    for x in (X, -X):
        torch.testing.assert_close(program(x)[0], _Plain(function)(x))


@pytest.mark.parametrize("function", [_written_after_a_branch, _view_written_after_float], ids=lambda f: f.__name__)
def test_a_number_of_a_tensor_that_is_written_is_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match="reads a number from a tensor that it writes"):
        onnxplug.to_onnx(_Plain(function), (X,), strict=False)


def test_a_number_of_a_tensor_of_each_call() -> None:
    check(_Plain(_own_tensor_written), X, others=[(-X,)])


def test_a_layer_that_begins_with_its_first_input() -> None:
    """As in normalizing flows: in evaluation the flag is set, and the branch is not taken."""

    class ActNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("initialized", torch.tensor(1, dtype=torch.uint8))
            self.scale = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.initialized:
                with torch.no_grad():
                    self.scale.data.copy_(1 / x.std(0))
                    self.initialized.fill_(1)
            return x * self.scale

    check(ActNorm(), X, others=[(-X,)])
    begun = ActNorm()
    begun.initialized.fill_(0)  # type: ignore[operator]
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(begun, (X,))


class _Steps(nn.Module):
    """Cuts its result as a buffer says."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("steps", torch.tensor(steps))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[:, : int(self.steps)]


def test_a_number_that_was_read_is_not_replaced() -> None:
    program = onnxplug.to_onnx(nn.Sequential(_Steps()), (torch.randn(2, 4),))
    for other in (_Steps(2).steps, torch.tensor([3]), torch.tensor(3, device="meta")):
        with pytest.raises(onnxplug.UsageError, match=r"the buffer '0\.steps' can't be replaced by another number"):
            program.apply_weights({**nn.Sequential(_Steps()).state_dict(), "0.steps": other})
    new, x = nn.Sequential(_Steps()), torch.randn(2, 4)
    program.apply_weights(new.state_dict())
    torch.testing.assert_close(program(x)[0], new(x))


def test_a_number_that_is_no_number_stays() -> None:
    """NaN marks a value that isn't set yet; the same weights are not refused because NaN is unequal to itself."""

    class Scaled(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.tensor(scale))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) if self.scale.isnan() else self.linear(x) * self.scale

    program = onnxplug.to_onnx(Scaled(math.nan), (torch.randn(2, 4),))
    other, x = Scaled(math.nan), torch.randn(2, 4)
    program.apply_weights(other.state_dict())
    torch.testing.assert_close(program(x)[0], other(x))
    with pytest.raises(onnxplug.UsageError, match="the buffer 'scale' can't be replaced by another number"):
        program.apply_weights(Scaled(2.0).state_dict())


@pytest.mark.xfail(
    torch.__version__.startswith("2.9."), strict=True, reason="torch 2.9 slices by no number that the model computes"
)
def test_a_number_that_a_checkpoint_brings_is_unknown() -> None:
    with onnxplug.fake_weights():
        model = _Steps()
    program = onnxplug.to_onnx(model, (torch.randn(2, 4),))
    for steps in (1, 3, 4):
        other, x = _Steps(steps), torch.randn(2, 4)
        program.apply_weights(other.state_dict())
        torch.testing.assert_close(program(x)[0], other(x))
