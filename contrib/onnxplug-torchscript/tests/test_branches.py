"""Branches of scripts: on values known while capturing, on sizes, and on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import CaptureError, VerificationError
from tests.support.scripts import check_script, scripted

X, Y = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, 6.0]]), torch.randn(5, 3) - 3
BATCH = ({0: "batch"},)


def on_a_sum(x: torch.Tensor):
    if x.sum() > 0:
        return torch.relu(x)
    return torch.nn.functional.leaky_relu(x) * 2


def nested(x: torch.Tensor):
    if x.sum() > 0:
        if x.max() > 2:
            y = x * 2
        else:
            y = x * 3
        z, name = 1, "same"
    else:
        y = -x
        z, name = 2, "same"
    if name == "same":
        y = y + 1
    return y, z


def keeps_the_sign_of_zero(x: torch.Tensor):
    number = float(x.dim() - 2)
    if x.sum() < 0:
        number = -number
    return 1 / (torch.ones(3) * number)


def returns_early(x: torch.Tensor):
    if x.sum() > 50:
        return x, x.max()
    x = x + 1
    if x.sum() > 0:
        x = x * 2
        if x.min() < 0:
            return x, x.sum()
    return x * 3, x.min()


def number_of_a_tensor(x: torch.Tensor):
    n = float(x.max())
    k = 3
    if n > 1.0 and int(x.argmax()) != 2:
        k = 2
    return x * n + k


def truth_values(x: torch.Tensor):
    high, low = bool(x.max() > 4), bool(x.min() < -1)
    y = x
    if high or not low:
        y = y + 1
    if high and low:
        y = y * 2
    if high != low:
        y = y - 7
    return y, int(high) + 2


def constants_inside(x: torch.Tensor):
    if x.sum() > 0:
        return x + torch.tensor([1.0, 2.0, 3.0])
    return x * 2


def results_that_are_inputs(x: torch.Tensor):
    if x.sum() > 0:
        y, z = x, x.t()
    else:
        y, z = x + 1, (x + 1).t()
    return y, z


def writes_in_a_branch(x: torch.Tensor):
    y = x.clone()
    if x.sum() > 0:
        z = y.clone()
        z[0] = 9.0
        z.mul_(2)
    else:
        z = y - 1
    return y, z


def writes_to_the_outside(x: torch.Tensor):
    y, z = x.clone(), x + 1
    row = z[0]
    if x.sum() > 0:
        y[0] = 2
        y.add_(1)
        w = y * 2
    else:
        row.mul_(3)
        w = y + 1
    if x.max() > 5:
        y.sub_(4)
    return y, z, w


def raises_on_a_value(x: torch.Tensor):
    if x.sum() < -1e6:
        raise ValueError("too small")
    assert bool(x.max() < 1e6), "too large"
    return x + 1


def gives_one_tensor_twice_and_leaves_it(x: torch.Tensor):
    if x.sum() > 0:
        y = torch.tanh(x)
        z = y
    else:
        y, z = x + 1, x + 2
    return y + 1, z


def in_containers(x: torch.Tensor):
    if x.sum() > 0:
        result = {"a": [x, x * 2]}
    else:
        result = {"a": [x + 1, x]}
    return result


def optional_that_is_none_in_both(x: torch.Tensor):
    y: torch.Tensor | None = None
    if x.sum() > 0:
        x = x + 1
    if y is not None:
        x = x + y
    return x


def writes_to_its_result(x: torch.Tensor):
    y = x + 1
    if x.sum() > 0:
        y = x * 2
    y.add_(1)
    return y


TENSORS = [
    keeps_the_sign_of_zero,
    writes_to_its_result,
    on_a_sum,
    nested,
    returns_early,
    number_of_a_tensor,
    truth_values,
    constants_inside,
    results_that_are_inputs,
    writes_in_a_branch,
    writes_to_the_outside,
    raises_on_a_value,
    gives_one_tensor_twice_and_leaves_it,
    in_containers,
    optional_that_is_none_in_both,
]


@pytest.mark.parametrize("function", TENSORS, ids=lambda f: f.__name__)
def test_branches_on_tensors(function: Any) -> None:
    check_script(scripted(function), (X,), (Y,), (X.abs() * 0.1,), (X + 20,), dynamic=BATCH)


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor):
        if x.sum() > 0:
            return self.one(x)
        return self.other(x)


def test_weights_used_in_a_branch_keep_their_names() -> None:
    module = WithWeights().eval()
    program = check_script(scripted(module), (X,), (Y,), dynamic=BATCH)
    assert {"one.weight", "other.0.weight"} <= set(program.exported_program.state_dict)
    assert [node.op_type for node in program.model.graph] == ["ReduceSum", "Greater", "If"]
    assert {"one.bias", "other.0.bias"} <= {
        name.removesuffix(".transposed") for name in program.model.graph.initializers
    }


class WritesItsState(nn.Module):
    """State that one branch sets, and that is then written in place: the other branch's value is the state before."""

    def __init__(self) -> None:
        super().__init__()
        self.level = torch.zeros(3)

    def forward(self, x: torch.Tensor):
        if x.sum() > 0:
            self.level = self.level + x.sum()
        for _ in range(x.size(0)):
            self.level = self.level * 0.5
        self.level[0] += x[0, 0]
        return x * self.level


def test_state_that_a_branch_sets_may_be_written_later() -> None:
    check_script(scripted(WritesItsState()), (X,), (Y,), (-X,), (X[:1] * 0.1,), dynamic=BATCH)


def on_sizes_and_values(x: torch.Tensor, mode: str = "add", times: int = 2):
    if x.dim() == 1:
        x = x.unsqueeze(0)
    if x.shape[1] != 3:
        raise ValueError(f"wrong number of columns: {x.shape[1]}")
    if mode == "add":
        return x + times
    return x * times


@pytest.mark.parametrize("more", [(), ("add", 3), ("multiply", 5)], ids=str)
def test_branches_on_known_values_are_decided(more: tuple[Any, ...]) -> None:
    shapes = ({0: "batch"}, *(None for _ in more))
    program = check_script(scripted(on_sizes_and_values), (X, *more), (Y, *more), dynamic=shapes)
    assert len(list(program.model.graph)) == 1


def test_a_branch_on_a_dynamic_size_says_where_it_is() -> None:
    def special(x: torch.Tensor):
        if x.shape[0] == 2:
            return x * 2
        return x

    with pytest.raises(CaptureError, match="dynamic"):
        onnxplug.to_onnx(scripted(special), (X,), dynamic_shapes=BATCH)
    assert onnxplug.to_onnx(scripted(special), (X,))(X)[0].equal(X * 2)


def gives_none_or_a_tensor(x: torch.Tensor):
    y: torch.Tensor | None = None
    if x.sum() > 0:
        y = x
    if y is None:
        return x
    return y + 1


def appends_in_a_branch(x: torch.Tensor):
    results = [x]
    if x.sum() > 0:
        results.append(x)
    return torch.cat(results)


def other_shapes(x: torch.Tensor):
    if x.sum() > 0:
        y = x
    else:
        y = torch.cat([x, x])
    return y


def raises_now(x: torch.Tensor):
    if x.dim() == 2:
        raise ValueError("two axes")
    return x


def writes_to_one_of_two(x: torch.Tensor):
    y = x + 1
    z = y
    if x.sum() > 0:
        z = x * 2
    z.add_(1)
    return y


def writes_to_what_a_result_may_be(x: torch.Tensor):
    y = x + 1
    z = x * 2
    if x.sum() > 0:
        z = y[0:1]
    y.add_(1)
    return z + 1


def gives_one_tensor_twice(x: torch.Tensor):
    if x.sum() > 0:
        y = torch.tanh(x)
        z = y
    else:
        y, z = x + 1, x + 2
    y.add_(1)
    return z


def writes_to_a_view_beside(x: torch.Tensor):
    y = x + 1
    row = y[0]
    if x.sum() > 0:
        row.add_(1)
        x = x + y
    return x


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (writes_to_one_of_two, "is one of the tensors that it uses in one case, or twice the same: the script writes"),
        (writes_to_what_a_result_may_be, "is one of the tensors that it uses in one case"),
        (gives_one_tensor_twice, "is one of the tensors that it uses in one case"),
        (writes_to_a_view_beside, "writes in place to a tensor that shares its memory with another"),
        (gives_none_or_a_tensor, "give results of different kinds: .*a tensor.* and None|a tensor and None"),
        (appends_in_a_branch, "changes a list or dict that is made outside"),
        (raises_now, "ValueError: two axes"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_programs_that_no_graph_can_compute(function: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words) as caught:
        onnxplug.to_onnx(scripted(function), (X,))
    line = function.__code__.co_firstlineno
    lines = [f"{__file__}:{line + offset}" for offset in range(1, 7)]
    assert any(place in str(caught.value) for place in lines), str(caught.value)
    assert caught.value.hint


@torch.jit.script
def raising(x: torch.Tensor) -> torch.Tensor:
    if bool((x.sum() <= 0).item()):
        raise ValueError("not positive")
    return x * 2


def test_an_error_that_a_script_raises() -> None:
    x = torch.ones(3, 2)
    program = onnxplug.to_onnx(raising, (x,), checks=True)
    torch.testing.assert_close(program(x)[0], x * 2)
    with pytest.raises(
        VerificationError, match=r"check: the script's condition at .*test_branches\.py.* does not hold"
    ):
        program(-x)
