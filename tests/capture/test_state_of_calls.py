"""The first call of a model after an export is as it would be without one."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import pytest
import torch

import onnxplug
from tests.capture.test_state import _Base, _eager, _made


class _WrittenTensors(_Base):
    """Counts in tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [torch.zeros(4)]
        vars(self)["count"] = torch.full((), float("nan"))

    def table(self, x: torch.Tensor) -> torch.Tensor:
        self.count.nan_to_num_().add_(1)
        return self.counts[0].add_(1) * self.count


class _Generator(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.tables = self.made()
        next(self.tables)

    def made(self) -> Any:
        table, x = None, (yield)
        while True:
            table = _made(x) if table is None else table
            x = yield table

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return self.tables.send(x)  # type: ignore[no-any-return]


class _Cycle(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.scales = itertools.cycle(range(1, 100))

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return _made(x) * next(self.scales)


class _Array(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = array("i", [0])

    def table(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return _made(x) * self.calls[0]


@pytest.mark.parametrize(
    "kind",
    [
        _WrittenTensors,
        _Array,
        pytest.param(_Generator, marks=pytest.mark.xfail(strict=True, reason="Python can't set back a generator")),
        pytest.param(_Cycle, marks=pytest.mark.xfail(strict=True, reason="iterators are not put back")),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_first_call_after_an_export_is_as_without_one(kind: type[_Base]) -> None:
    torch.manual_seed(0)
    expected, x = _eager(kind(), torch.ones(3, 4)), torch.ones(3, 4)
    torch.manual_seed(0)
    model = kind()
    program = onnxplug.to_onnx(model, (x,))
    torch.testing.assert_close(program(x)[0], expected)
    torch.testing.assert_close(_eager(model, x), expected)
