"""Weights that the model's code also finds elsewhere than in their module: identity, and memory that several tensors share."""

from __future__ import annotations

import weakref
from collections import deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check

X, OTHERS = torch.randn(3, 4), [(torch.randn(2, 4),), (torch.randn(1, 4),)]
KEPT: dict[str, Any] = {}
Pair = namedtuple("Pair", "weight name")


class Slots:
    """An object without a dict."""

    __slots__ = ("weight",)


class Keeper(nn.Module):
    """A layer whose weight is kept elsewhere, too."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], Any], has: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept, self.has = keep(self, self.linear.weight), has

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (2 if self.has(self.kept, self.linear.weight) else 3)


def _slots(weight: torch.Tensor) -> Slots:
    slots = Slots()
    slots.weight = weight
    return slots


IDENTITY: dict[str, tuple[Callable[[Any, torch.Tensor], Any], Callable[[Any, torch.Tensor], Any]]] = {
    "list": (lambda m, w: [w], lambda kept, w: kept[0] is w),
    "tuple": (lambda m, w: (1, (w,)), lambda kept, w: kept[1][0] is w),
    "named tuple": (lambda m, w: [Pair(w, "a")], lambda kept, w: kept[0].weight is w),
    "dict": (lambda m, w: {"a": w}, lambda kept, w: kept["a"] is w),
    "key": (lambda m, w: {0: "b", w: "a"}, lambda kept, w: kept.get(w) == "a" and next(iter(kept)) == 0),
    "set": (lambda m, w: {w}, lambda kept, w: w in kept),
    "deque": (lambda m, w: deque([w]), lambda kept, w: kept[0] is w),
    "slots": (lambda m, w: _slots(w), lambda kept, w: kept.weight is w),
    "closure": (lambda m, w: lambda: w, lambda kept, w: kept() is w),
    "global": (lambda m, w: KEPT.update(a=w), lambda kept, w: KEPT["a"] is w),
    "id": (lambda m, w: id(w), lambda kept, w: kept == id(w) and id(kept) == id(kept)),
    "id as a key": (lambda m, w: {id(w): 5}, lambda kept, w: kept.get(id(w)) == 5),
    "attribute": (lambda m, w: vars(m).update(found=w) or weakref.ref(m), lambda kept, w: kept().found is w),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_identity(name: str) -> None:
    model = Keeper(*IDENTITY[name])
    try:
        assert model.has(model.kept, model.linear.weight)
        check(model, X, others=OTHERS, dynamic=({0: "n"},))
        assert model.has(model.kept, model.linear.weight)
    finally:
        KEPT.clear()


class Memory(nn.Module):
    """Tensors in the memory of a buffer, one of which the model writes."""

    def __init__(self, kept: Callable[[Any], Any], write: Callable[[Any], Any], read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0))
        self.weight = nn.Parameter(torch.ones(4))
        self.kept, self.write, self.read = kept(self), write, read

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            self.write(self)
        return x * self.read(self), self.table * 1


def _add(of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda m: of(m).add_(2)


MEMORY: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "a slice, written whole": (lambda m: m.table[1:3], _add(lambda m: m.table), lambda m: m.kept.sum()),
    "a slice, written by the slice": (lambda m: m.table[1:3], _add(lambda m: m.kept), lambda m: m.table),
    "every second, by the slice": (lambda m: [m.table[::2]], _add(lambda m: m.kept[0]), lambda m: m.table),
    "of another rank": (lambda m: (m.table.view(2, 2).t(),), _add(lambda m: m.kept[0][0]), lambda m: m.table),
    "two buffers": (
        lambda m: m.register_buffer("part", m.table[2:]),
        _add(lambda m: m.table),
        lambda m: m.part.repeat(2),
    ),
    "detached": (lambda m: m.weight.detach(), _add(lambda m: m.table), lambda m: m.kept + m.weight),
    "constants": (
        lambda m: vars(m).update(whole=torch.zeros(6)) or m.whole[2:],
        _add(lambda m: m.whole[1:]),
        lambda m: m.kept,
    ),
    "two slices and the buffer": (
        lambda m: (m.table[:2], m.table[1:]),
        lambda m: (m.kept[0].add_(1), m.kept[1].mul_(3)),
        lambda m: m.table + m.kept[1].sum(),
    ),
}


#: A copy of the model, with which the verification compares, would reach the memory of the model itself.
OF_THE_MODEL_ITSELF: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "a weak reference": (lambda m: weakref.ref(m.table), _add(lambda m: m.table), lambda m: m.kept()),
    "a closure": (lambda m: (lambda table: lambda: table)(m.table), _add(lambda m: m.table), lambda m: m.kept()),
    "a weight that is written": (lambda m: m.weight.detach(), _add(lambda m: m.weight), lambda m: m.kept + m.weight),
}


@pytest.mark.parametrize("name", MEMORY)
def test_shared_memory(name: str) -> None:
    check(Memory(*MEMORY[name]), X, others=OTHERS, dynamic=({0: "n"},), mutations="ignore")


@pytest.mark.parametrize("name", OF_THE_MODEL_ITSELF)
def test_memory_that_a_copy_shares(name: str) -> None:
    model = Memory(*OF_THE_MODEL_ITSELF[name])
    program = onnxplug.to_onnx(model, (X,), dynamic_shapes=({0: "n"},), mutations="ignore")
    for x in (X, *(other for (other,) in OTHERS)):
        fresh = Memory(*OF_THE_MODEL_ITSELF[name])
        torch.testing.assert_close(program(x), fresh(x))


REFUSED: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "no tensor has the whole": (
        lambda m: (big := torch.zeros(6)) is not None and (big[:4], big[2:]),
        _add(lambda m: m.kept[0]),
        lambda m: m.kept[1],
    ),
    "of another dtype": (
        lambda m: m.table.view(torch.int32),
        _add(lambda m: m.table),
        lambda m: m.kept.float(),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_no_view_expresses(name: str) -> None:
    with pytest.raises(onnxplug.CaptureError, match="shares its memory with others"):
        onnxplug.to_onnx(Memory(*REFUSED[name]), (X,))


@pytest.mark.parametrize("write", [_add(lambda m: m.table), lambda m: None], ids=["a write", "no write"])
def test_a_sparse_buffer_is_named(write: Callable[[Any], Any]) -> None:
    model = Memory(
        lambda m: m.register_buffer("sparse", torch.eye(4).to_sparse()), write, lambda m: m.sparse.to_dense().sum(0)
    )
    with pytest.raises(onnxplug.UsageError, match=r"the weight 'sparse' is a tensor of the layout torch.sparse_coo"):
        onnxplug.to_onnx(model, (X,))


def test_memory_that_nobody_writes_stays_apart() -> None:
    model = Memory(lambda m: m.table[:2].repeat(1), lambda m: None, lambda m: m.kept.sum())
    program = onnxplug.to_onnx(model, (X,))
    assert "as_strided" not in {node.op_type for node in program.model.graph}
