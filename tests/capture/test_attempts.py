"""The attempts of torch.export, and the messages about their failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import onnxplug
from onnxplug import CaptureError

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The mode of each call of torch.export.export."""
    calls: list[bool] = []
    original = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs["strict"])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    return calls


def branch_on_a_value(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        for _ in range(2):  # which no selection has on one side
            x = x + 1
    return x


def loop_over_a_value(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.sum())):
        x = x + 1
    return x


def elements_of_a_value(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x + i for i in range(int(x.sum()))])


def limited_branch(x: torch.Tensor) -> torch.Tensor:
    if max(float(x.sum()), 1.0) > 2:
        x = x + 1
    return x


def raises(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such thing")


@pytest.mark.parametrize(
    "model", [branch_on_a_value, loop_over_a_value, elements_of_a_value, limited_branch], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("shapes", [None, ({0: "batch"},), ({0: Dim.AUTO, 1: "n"},)])
def test_a_branch_on_data_is_tried_once(model: Any, shapes: Any, exports: list[bool]) -> None:
    with pytest.raises(
        CaptureError, match=r"test_attempts\.py:\d+.*values that are known only when the model"
    ) as caught:
        onnxplug.to_onnx(model, (X,), dynamic_shapes=shapes)
    assert exports == [False]
    assert "fixed by the model" not in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
def test_a_requested_mode_is_the_only_mode(strict: bool, exports: list[bool]) -> None:
    with pytest.raises(CaptureError):
        onnxplug.to_onnx(branch_on_a_value, (X,), strict=strict)
    assert exports == [strict]


class OwnNumbers(nn.Module):
    """Reads numbers from its parameters, as filters do whose width is learned."""

    def __init__(self, requires_grad: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=requires_grad)
        self.register_buffer("width", torch.tensor(1.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : int(max(float(self.width), 1.0))] * float(self.scale.to(x.device, torch.float32))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_numbers_read_from_the_models_own_tensors_are_captured_at_once(
    requires_grad: bool, exports: list[bool]
) -> None:
    model = OwnNumbers(requires_grad).eval()
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=({0: "batch"},))
    assert exports == [False]
    for rows in (1, 2, 5):
        x = torch.arange(3.0 * rows).reshape(rows, 3) - 2
        torch.testing.assert_close(program(x)[0], model(x).detach())


def scaled_by_its_sum(x: torch.Tensor) -> torch.Tensor:
    return x * max(float(x.sum()), 1.0)


def test_a_number_of_the_inputs_stays_a_number_of_the_graph(exports: list[bool]) -> None:
    program = onnxplug.to_onnx(scaled_by_its_sum, (X,), dynamic_shapes=({0: "batch"},))
    assert exports == [False, True]
    for x in (X, X - 10, torch.ones(5, 3)):
        torch.testing.assert_close(program(x)[0], scaled_by_its_sum(x))


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    both = torch.cat([x.nonzero().flatten(), y])
    return both if both.numel() == 0 else both + 1


def test_a_question_about_data_and_a_size_is_repeated_for_sizes_of_at_least_2(exports: list[bool]) -> None:
    """``u + s == 0`` is undecided where the size may be 0, and false where it is 2 or more."""
    args = (torch.tensor([1.0, 0.0, 2.0]), torch.tensor([5, 6, 7]))
    program = onnxplug.to_onnx(joined, args, dynamic_shapes=({0: "n"}, {0: "m"}))
    assert exports == [False, False]
    for x, y in (args, (torch.zeros(4), torch.tensor([3, 4])), (torch.ones(2), torch.tensor([1, 2, 3, 4, 5]))):
        assert torch.equal(program(x, y)[0], joined(x, y))


def broadcasts(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones(2, 3)


def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x.shape[0] == 2 else x + 1


NAMED = ({0: "batch"}, None)
SHARED = ({0: "batch"}, {0: "batch"})
MIXED = ({0: Dim("batch")}, {0: Dim.AUTO})


@pytest.mark.parametrize(
    ("model", "shapes", "strict"),
    [
        (raises, None, None),
        (raises, SHARED, None),
        (raises, SHARED, True),
        (broadcasts, NAMED, None),
        (broadcasts, SHARED, None),
        (branches, SHARED, None),
        (branches, SHARED, False),
        (branches, MIXED, None),
    ],
)
def test_a_model_is_tried_three_times_at_most(
    model: Any, shapes: Any, strict: bool | None, exports: list[bool]
) -> None:
    def two(x: torch.Tensor, y: torch.Tensor) -> Any:
        return model(x), model(y)

    with pytest.raises(CaptureError):
        onnxplug.to_onnx(two, (X, X + 1), dynamic_shapes=shapes, strict=strict)
    assert 1 <= len(exports) <= 3


def test_models_for_the_strict_mode_alone_are_captured(exports: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.export.export

    def strict_alone(*args: Any, **kwargs: Any) -> Any:
        if not kwargs["strict"]:
            raise RuntimeError("not in this mode")
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", strict_alone)
    for shapes in (None, ({0: "batch"}, {0: "batch"})):
        program = onnxplug.to_onnx(lambda x, y: x + y, (X, X), dynamic_shapes=shapes)
        assert program.captured is not None
        assert program.captured.strategy == "strict"


# -- torch.onnx.is_in_onnx_export --------------------------------------------------------------------------------------


class Asks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.onnx.is_in_onnx_export() else x - 1


@pytest.mark.parametrize("strict", [None, True])
def test_a_model_sees_that_it_is_being_exported(strict: bool | None) -> None:
    program = onnxplug.to_onnx(Asks(), (X,), strict=strict)
    torch.testing.assert_close(program(X)[0], X * 2)
    assert not torch.onnx.is_in_onnx_export()


def test_the_flag_is_put_back_after_a_failure() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        assert torch.onnx.is_in_onnx_export()
        raise RuntimeError("no")

    with pytest.raises(CaptureError):
        onnxplug.to_onnx(model, (X,))
    assert not torch.onnx.is_in_onnx_export()


def test_the_flag_in_threads_and_inside_another_export() -> None:
    inside, go = threading.Event(), threading.Event()
    seen: list[bool] = []

    def waits(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go.wait(60)
        seen.append(torch.onnx.is_in_onnx_export())
        return x + 1

    def run(function: Callable[..., Any], results: list[Any]) -> None:
        results.append(onnxplug.to_onnx(function, (X,), strict=False))

    results: list[Any] = []
    other = threading.Thread(target=run, args=(waits, results))
    other.start()
    assert inside.wait(60)
    from onnxplug.patches.onnx_flag import onnx_export_flag

    with onnx_export_flag():
        pass
    assert torch.onnx.is_in_onnx_export(), "the other capture goes on"
    go.set()
    other.join()
    assert seen == [True]
    assert len(results) == 1
    assert not torch.onnx.is_in_onnx_export()
