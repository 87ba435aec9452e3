"""The first call of a model after an export is as it would be without the export."""

from __future__ import annotations

import io
import itertools
import os
import queue
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

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


class _Array(_Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = array("i", [0])

    def table(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return _made(x) * self.calls[0]


class _Environment(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        os.environ["ONNXPLUG_TEST"] = str(int(os.environ.get("ONNXPLUG_TEST", "0")) + 1)
        return _made(x) * int(os.environ["ONNXPLUG_TEST"])


@pytest.mark.parametrize("kind", [_WrittenTensors, _Array, _Environment])
@pytest.mark.filterwarnings("ignore")
def test_the_first_call_after_an_export_is_as_without_the_export(
    kind: type[_Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONNXPLUG_TEST", raising=False)
    torch.manual_seed(0)
    expected, x = _eager(kind(), torch.ones(3, 4)), torch.ones(3, 4)
    monkeypatch.delenv("ONNXPLUG_TEST", raising=False)
    torch.manual_seed(0)
    model = kind()
    program = onnxplug.to_onnx(model, (x,))
    torch.testing.assert_close(program(x)[0], expected)
    torch.testing.assert_close(_eager(model, x), expected)


class _Holder(_Base):
    """Holds something that its code moves on."""

    def __init__(self, held: Any, move: Callable[[Any], float]) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.inner.held = held
        self.move = move

    def table(self, x: torch.Tensor) -> torch.Tensor:
        return _made(x) * self.move(self.inner.held)


def _counting() -> Iterator[int]:
    n = 0
    while True:
        yield (n := n + 1)


def _collecting() -> Iterator[int]:
    results: list[int] = []
    while True:
        results.append(1)
        yield len(results)


def _queue() -> queue.SimpleQueue[int]:
    made: queue.SimpleQueue[int] = queue.SimpleQueue()
    for n in range(1, 100):
        made.put(n)
    return made


def _written(stream: io.StringIO) -> float:
    return stream.write("a")


def _counted(large: torch.Tensor) -> float:
    large[:1] += 1
    return 1.0


#: Objects that can't be put back, and the functions that move them on.
GOING_ON: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "generator": (_counting, next),
    "generator with state": (_collecting, next),
    "cycle": (lambda: itertools.cycle(range(1, 100)), next),
    "cycle, gone round": (lambda: _after(itertools.cycle((1, 2, 3)), 4), next),
    "list": (lambda: iter([1, 2, 3, 4, 5] * 9), next),
    "chain": (lambda: itertools.chain(range(1, 3), range(3, 99)), next),
    "map": (lambda: map(abs, iter(range(1, 99))), next),
    "zip": (lambda: zip(range(1, 99), range(1, 99), strict=True), lambda pairs: next(pairs)[0]),
    "enumerate": (lambda: enumerate(range(1, 99)), lambda pairs: next(pairs)[0]),
    "queue": (_queue, queue.SimpleQueue.get),
    "text": (io.StringIO, _written),
    "bytes": (io.BytesIO, lambda stream: stream.write(b"a")),
    "count in a tuple": (lambda: (itertools.count(1), 0), lambda counts: next(counts[0])),
    "large tensor": (lambda: torch.zeros((1 << 24) + 1), _counted),
}


def _after(items: Iterator[Any], number: int) -> Iterator[Any]:
    for _ in range(number):
        next(items)
    return items


@pytest.mark.parametrize("name", GOING_ON)
def test_lasting_effects_are_named(name: str) -> None:
    make, move = GOING_ON[name]
    model = _Holder(make(), move).eval()
    with pytest.warns(UserWarning, match=r"advanced self\.inner\.held.* can't be put back"):
        onnxplug.to_onnx(model, (torch.ones(3, 4),))


@pytest.mark.parametrize("name", GOING_ON)
def test_kept_state_is_not_named(name: str, recwarn: pytest.WarningsRecorder) -> None:
    onnxplug.to_onnx(_Holder(GOING_ON[name][0](), lambda held: 2.0).eval(), (torch.ones(3, 4),))
    assert not [w for w in recwarn if "advanced" in str(w.message)]


class _Meta(type):
    made: Any = None


class _OfMeta(metaclass=_Meta):
    @classmethod
    def table(cls, x: torch.Tensor) -> torch.Tensor:
        if _Meta.made is None:
            _Meta.made = _made(x)
        return _Meta.made


class _InMetaclass(_Base):
    def table(self, x: torch.Tensor) -> torch.Tensor:
        return _OfMeta.table(x)


def test_attributes_of_metaclasses_are_put_back() -> None:
    onnxplug.to_onnx(_InMetaclass(), (torch.ones(3, 4),))
    assert _Meta.made is None
