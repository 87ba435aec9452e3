"""Loops of scripts, which end after a known number, after a size, or by a tensor's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError
from tests.support.scripts import check_script, scripted

X, Y = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, 0.125]]), torch.randn(5, 3) - 1
BATCH = ({0: "batch"},)


def until_a_sum(x: torch.Tensor):
    i = 0
    while x.sum() < 10.0 and i < 20:
        x = x + 1
        i += 1
    return x, i


def leaves_early(x: torch.Tensor):
    for i in range(4):
        if x.sum() > 5:
            return x, i
        x = x + 1
    return x, 10


def breaks_and_continues(x: torch.Tensor):
    total = torch.zeros(3)
    for i in range(6):
        if x[0, 0] + i == 2:
            continue
        if total.sum() > 30:
            break
        total = total + x.sum(0) * i
    return total


def over_a_size(x: torch.Tensor):
    total = torch.zeros(3)
    for i in range(x.size(0)):
        total = total * 0.5 + x[i]
    return total


def over_a_size_with_continue(x: torch.Tensor):
    total = torch.zeros(3)
    for i in range(1, x.size(0)):
        if i % 3 == 2:
            continue
        for j in range(x.size(0)):
            if x[j, 0] > i:
                continue
            total = total + x[j] * j
        total = total * 0.5 + x[i]
    return total


def over_a_size_with_break(x: torch.Tensor):
    total = torch.zeros(3)
    for i in range(x.size(0)):
        for j in range(1, x.size(0)):
            if x[j, 0] > x[i, 1]:
                break
            total = total + x[j] * j
        if i == 2:
            break
        if x[i, 0] > 10:
            return total, i
        total = total * 0.5
    return total, -1


def while_a_size_says(x: torch.Tensor):
    total = torch.zeros(3)
    i, k, n = 0, 0, x.size(0)
    while i < x.size(0):
        total = total * 0.5 + x[i]
        i += 2
    while n > 1:
        n = n // 2
        k += 1
    last = 3
    while last < x.size(0):
        total = total + 2
        last += 1
        if bool(total.sum() > 10):
            break
    return total, x[:k], i, k, n, last


def over_a_size_backwards(x: torch.Tensor):
    total = torch.ones(3)
    n = 0
    for i in range(x.size(0) - 1, -1, -1):
        total = total * 0.5 + x[i]
        n += i
    return total, n


def over_a_number_of_a_tensor(x: torch.Tensor):
    y = x
    for _ in range(int(x.abs().max())):
        y = y * 1.5
    return y


def nested(x: torch.Tensor):
    n = torch.zeros(())
    while bool(n < 3):
        y = x
        k = 0.5
        while bool(y.sum() < 4) and k < 8:
            y = y + k
            k = k * 2
        x = x + y.mean()
        n = n + 1
    return x


def unrolled(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(1, 7, 2):
        results.append(x * i)
    i = 0
    while i < 3:
        i += 1
        results[0] = results[0] + i
    for name in ["a", "b"]:
        if name == "b":
            results.insert(0, x)
    return torch.cat(results, 1), i


def writes_a_tensor(x: torch.Tensor):
    result = torch.zeros(x.size(0), 3)
    for i in range(x.size(0)):
        result[i] = x[i] * i
    return result


def adds_in_place(x: torch.Tensor):
    total = torch.zeros(3)
    same = total
    for i in range(x.size(0)):
        total += x[i]
    other = torch.ones(3)
    while other.sum() < 5:
        other += 1
    return total, same + 1, other


def goes_by_its_number(x: torch.Tensor):
    result, total, factor, done = x.clone(), x.clone(), 1, False
    for i in range(x.size(0)):
        if i > 0:
            result[i] = result[i - 1] + x[i]
        if i == 2:
            total = total * factor + x[i]
        if factor > 2:
            total = total - 1
        if done:
            total = total * 2
        factor += i
        done = factor > 1
    return result, total, factor


def carries_a_view(x: torch.Tensor):
    result = torch.zeros_like(x)
    last = x[0]
    for i in range(1, x.size(0)):
        if i % 2 == 0:
            last = last * 0.5
        elif bool(x[i].sum() > 0):
            result[i] = x[0]
        last = last + x[i]
        result[i] += last
    return result, last


def writes_to_its_result(x: torch.Tensor):
    last = torch.ones_like(x)
    for i in range(x.size(0)):
        last = last * x[i]
    last.add_(1)
    return last


def writes_to_a_view_of_what_it_wrote(x: torch.Tensor):
    result = torch.zeros(x.size(0), 3)
    row = result[0]
    for i in range(x.size(0)):
        result[i].fill_(float(x[i, 0]))
    row.add_(100)
    return result


LOOPS = [
    writes_to_a_view_of_what_it_wrote,
    goes_by_its_number,
    carries_a_view,
    writes_to_its_result,
    until_a_sum,
    leaves_early,
    breaks_and_continues,
    over_a_size,
    over_a_size_with_continue,
    over_a_size_with_break,
    while_a_size_says,
    over_a_size_backwards,
    over_a_number_of_a_tensor,
    nested,
    writes_a_tensor,
    adds_in_place,
    unrolled,
]


@pytest.mark.parametrize("function", LOOPS, ids=lambda f: f.__name__)
def test_loops(function: Any) -> None:
    program = check_script(scripted(function), (X,), (Y,), (X * 3,), (X[:1] * 0.1,), dynamic=BATCH)
    kinds = {node.op_type for node in program.model.graph}
    assert ("Loop" in kinds) == (function is not unrolled)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor, limit: float = 1.0):
        h = torch.zeros(x.size(1), 4)
        steps = 0
        while bool(h.abs().max() < limit) and steps < x.size(0):
            h = self.cell(x[steps], h)
            steps += 1
        return h, steps


def test_weights_in_a_loop() -> None:
    small, large = torch.randn(4, 2, 3) * 0.1, torch.randn(6, 1, 3) * 9
    check_script(scripted(Recurrent().eval()), (small,), (large,), dynamic=({0: "time", 1: "batch"},))


def grows(x: torch.Tensor):
    while x.sum() < 10:
        x = torch.cat([x, x])
    return x


def collects(x: torch.Tensor):
    results = [x]
    while results[-1].sum() < 10:
        results.append(results[-1] + 1)
    return results


def sets_an_optional(x: torch.Tensor):
    last: torch.Tensor | None = None
    while x.sum() < 10:
        last = x
        x = x + 1
    return x if last is None else x + last


def writes_and_replaces(x: torch.Tensor):
    y = x + 1
    z = y
    while z.sum() < 10:
        z += 1
        z = z * 2
    return y, z


def writes_to_what_it_began_with(x: torch.Tensor):
    y = x + 1
    z = y
    while z.sum() < 10:
        z = z + 5
    y.add_(5)
    return y, z


def test_a_loop_that_may_end_at_once_gives_what_it_began_with() -> None:
    with pytest.raises(CaptureError, match=r"test_loops\.py.* is one of the tensors that it uses in one case"):
        onnxplug.to_onnx(scripted(writes_to_what_it_began_with), (X,))


@pytest.mark.parametrize("function", [writes_and_replaces, grows, collects, sets_an_optional], ids=lambda f: f.__name__)
def test_loops_that_no_graph_can_compute(function: Any) -> None:
    with pytest.raises(CaptureError, match=r"the loop at .* ends by a tensor's values") as caught:
        onnxplug.to_onnx(scripted(function), (X,))
    line = function.__code__.co_firstlineno
    assert any(f"{__file__}:{line + offset}" in str(caught.value) for offset in (1, 2, 3, 4)), str(caught.value)
    assert caught.value.hint


class Held(nn.Module):
    """A model whose loops write its buffers by ``+=``, which a script records as a write and an assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.arange(3.0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Adding(Held):
    def forward(self, x: torch.Tensor):
        view = self.total[:1]
        for i in range(x.size(0)):
            for j in range(i):
                self.total += x[j]
            if x[i, 0] > 0:
                self.count += 2
        return x * self.total, view, self.count


class Filling(Held):
    def forward(self, x: torch.Tensor):
        y = self.total
        while bool(y.sum() < 50.0):
            y += 1
            self.total *= 1.5
            self.count += 1
        self.total.sub_(x[0])
        return y, self.count, x + self.total


@pytest.mark.parametrize("kind", [Adding, Filling])
def test_buffers_that_a_loop_writes(kind: type[Held]) -> None:
    cases = [(x,) for x in (X, Y, -Y[:1])]
    check_script(scripted(kind().eval()), *cases, dynamic=BATCH)
