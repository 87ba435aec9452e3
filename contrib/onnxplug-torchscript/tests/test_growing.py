"""Lists that loops over dynamic sizes add to, and lists of a dynamic number of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError
from tests.support.scripts import check_script, scripted

X, Y, ONE = torch.randn(4, 3), torch.randn(7, 3) * 2 - 1, torch.randn(1, 3)
TIME = ({0: "time"},)


def appends(x: torch.Tensor):
    results: list[torch.Tensor] = []
    total = torch.zeros(3)
    for i in range(x.size(0)):
        total = total * 0.5 + x[i]
        results.append(total)
    return torch.stack(results), total


def extends_over_rows(x: torch.Tensor):
    results: list[torch.Tensor] = []
    state = torch.ones(3)
    for row in x:
        state = torch.tanh(row + state)
        results += [state * 2]
    return torch.stack(results, 1), torch.cat(results)


def over_unbound(x: torch.Tensor):
    rows = x.unbind(0)
    results: list[torch.Tensor] = []
    for i in range(len(rows)):
        results.append(rows[i] * i + rows[len(rows) - 1 - i])
    return torch.stack(results), rows[0], rows[-1], torch.cat(rows, 0)


def two_lists(x: torch.Tensor):
    first: list[torch.Tensor] = []
    second: list[torch.Tensor] = []
    for i in range(x.size(0)):
        first.append(x[i] + i)
        second.append(x[i].unsqueeze(0) * 2)
        second.append(-x[i].unsqueeze(0))
    return torch.stack(first), torch.cat(second), torch.cat(second, 1), torch.cat(second, -1)


def not_empty_before(x: torch.Tensor):
    results = [x[0] * 10, torch.zeros(3)]
    for i in range(x.size(0)):
        results.append(x[i])
    results.append(x[0] - 5)
    return torch.stack(results), len(results), results[-2], results[1]


def twice(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        results.append(x[i])
    for i in range(1, x.size(0) + 1):
        results.append(x[i - 1] * i)
    return torch.stack(results)


def from_the_end(x: torch.Tensor):
    results: list[torch.Tensor] = []
    state = torch.zeros(3)
    for i in range(x.size(0) - 1, -1, -1):
        state = state * 0.5 + x[i]
        results.append(state)
    results.reverse()
    return torch.stack(results), torch.stack(results[::-1]), torch.stack(results[1:] + results[:1])


def every_other(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(0, x.size(0), 2):
        results.append(x[i] * i)
    return torch.stack(results)


def backwards(items: list[torch.Tensor]) -> list[torch.Tensor]:
    return items[::-1]


def collected(x: torch.Tensor, factor: float) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        results.append(x[i] * factor)
    return results


def through_functions(x: torch.Tensor):
    items = collected(x, 3.0)
    return torch.stack(backwards(items)), torch.stack(backwards(x.unbind(0)))


def under_two_names(x: torch.Tensor):
    results: list[torch.Tensor] = []
    same = results
    for i in range(x.size(0)):
        results.append(x[i] + 1)
    return torch.stack(same), len(same)


def between_rows(x: torch.Tensor):
    results = [torch.ones(3)]
    for i in range(x.size(0) - 1):
        results.append(x[i] + x[i + 1])
    return torch.stack(results)


def within_a_branch(x: torch.Tensor):
    if x.sum() > 0:
        inner: list[torch.Tensor] = []
        for i in range(x.size(0)):
            inner.append(x[i] * 2)
        result = torch.stack(inner)
    else:
        result = x - 1
    return result


def with_a_branch(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        if x[i].sum() > 0:
            row = x[i] * 2
        else:
            row = x[i] - 1
        results.append(row)
    return torch.stack(results)


def writes_too(x: torch.Tensor):
    kept = torch.zeros(x.size(0), 3)
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        kept[i] = x[i] + 1
        results.append(kept[i] * 2)
    return kept, torch.stack(results)


FUNCTIONS = [
    appends,
    extends_over_rows,
    over_unbound,
    two_lists,
    not_empty_before,
    twice,
    from_the_end,
    every_other,
    between_rows,
    through_functions,
    under_two_names,
    within_a_branch,
    with_a_branch,
    writes_too,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_lists_of_dynamic_length(function: Any, seeded: None) -> None:
    program = check_script(scripted(function), (X,), (Y,), (ONE,), (X.abs(),), dynamic=TIME)
    kinds = {node.op_type for node in program.model.graph}
    assert kinds & {"Loop", "If"}


class Recurrent(nn.Module):
    """A layer in both directions, as scripts write recurrent networks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards = nn.LSTMCell(3, 4)
        self.backwards = nn.GRUCell(3, 4)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]):
        rows = x.unbind(1)
        there: list[torch.Tensor] = []
        for i in range(len(rows)):
            state = self.forwards(rows[i], state)
            there += [state[0]]
        back: list[torch.Tensor] = []
        hidden = torch.zeros(x.size(0), 4)
        for row in backwards(rows):
            hidden = self.backwards(row, hidden)
            back.append(hidden)
        return torch.cat([torch.stack(there, 1), torch.stack(backwards(back), 1)], 2), state


@pytest.mark.long
def test_recurrent_layers(seeded: None) -> None:
    def inputs(batch: int, time: int) -> Any:
        return torch.randn(batch, time, 3), (torch.randn(batch, 4), torch.randn(batch, 4))

    dynamic = ({0: "batch", 1: "time"}, ({0: "batch"}, {0: "batch"}))
    program = check_script(
        scripted(Recurrent().eval()), inputs(2, 5), inputs(3, 9), inputs(1, 1), inputs(4, 2), dynamic=dynamic
    )
    assert sum(node.op_type == "Loop" for node in program.model.graph) == 2


class AroundConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.tensor(1.5))

    def forward(self, x: torch.Tensor):
        results = [self.level, x.sum()]
        for i in range(x.size(0)):
            results.append(x[i].sum() * self.level)
        results.append(self.level)
        return torch.stack(results)


def test_constants_of_a_frozen_script_in_a_list() -> None:
    check_script(torch.jit.freeze(scripted(AroundConstants().eval())), (X,), (Y,), (ONE,), dynamic=TIME)


def test_known_length_is_unrolled() -> None:
    program = check_script(scripted(appends), (X,), (X * 2,))
    assert all(node.op_type != "Loop" for node in program.model.graph)


# -- programs that no graph can compute --------------------------------------------------------------------------------


def reads_the_list(x: torch.Tensor):
    results = [torch.zeros(3)]
    for i in range(x.size(0)):
        results.append(results[-1] + x[i])
    return torch.stack(results)


def reads_the_list_later(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        results.append(results[-1] + x[i] if i > 0 else x[i])
    return torch.stack(results)


def of_other_shapes(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        results.append(x[:i].sum(0, keepdim=True))
        results.append(x[i])
    return torch.cat([f.flatten() for f in results])


def of_numbers(x: torch.Tensor):
    results: list[int] = []
    for i in range(x.size(0)):
        results.append(i * 2)
    return torch.tensor(results)


def of_two_dtypes(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        results.append(x[i])
        results.append(torch.tensor([i, 1, 2]))
    return results[1]


def of_another_dtype_before(x: torch.Tensor):
    results = [torch.tensor([3, 1, 2]), x[0]]
    for i in range(x.size(0)):
        results.append(x[i])
    return results[0]


def within_a_dict(x: torch.Tensor):
    results: list[torch.Tensor] = []
    held = {"found": results}
    for i in range(x.size(0)):
        results.append(x[i])
    return torch.stack(held["found"])


def fills(tensors: list[torch.Tensor], x: torch.Tensor) -> int:
    for i in range(x.size(0)):
        tensors.append(x[i])
    return 0


def of_a_caller(x: torch.Tensor):
    results: list[torch.Tensor] = []
    fills(results, x)
    return torch.stack(results)


def returns_the_list(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        results.append(x[i])
    return results


def leaves_early(x: torch.Tensor):
    results: list[torch.Tensor] = []
    for i in range(x.size(0)):
        if x[i].sum() > 100:
            break
        results.append(x[i])
    return torch.stack(results)


def asks_for_the_maximum(x: torch.Tensor):
    return torch.broadcast_tensors(x.unbind(0))[0]


REFUSED = [
    (reads_the_list, "adds to a list"),
    (reads_the_list_later, "reads by aten::__getitem__ a list that it adds to"),
    (of_other_shapes, "adds to a list"),
    (of_numbers, "dynamic"),
    (of_two_dtypes, "tensors of several dtypes"),
    (of_another_dtype_before, "tensors of several dtypes"),
    (within_a_dict, "dynamic"),
    (of_a_caller, "dynamic"),
    (returns_the_list, "the script returns a list of tensors whose length is a dynamic size"),
    (leaves_early, "list"),
    (asks_for_the_maximum, "gives a list whose length is a dynamic size to aten::broadcast_tensors"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED, ids=lambda f: getattr(f, "__name__", ""))
def test_programs_that_no_graph_can_compute(function: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        onnxplug.to_onnx(scripted(function), (X,), dynamic_shapes=TIME)
    assert caught.value.hint
