"""Random programs of views and in-place writes: our own pass gives what eager torch computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from onnxplug.functionalize.effects import writes
from onnxplug.functionalize.inplace import make_functional

Tensors = list[torch.Tensor]
Step = Callable[[torch.Tensor, random.Random], "torch.Tensor | Tensors"]

ANY: list[Step] = [
    lambda t, r: t.unsqueeze(-1),
    lambda t, r: t.squeeze(),
    lambda t, r: t.expand(2, *t.shape),
    lambda t, r: t.detach(),
    lambda t, r: t.clone(),
    lambda t, r: t * 2,
    lambda t, r: t.add_(1),
    lambda t, r: t.add_(1),
    lambda t, r: t.mul_(2),
    lambda t, r: t.relu_(),
    lambda t, r: t.fill_(r.randrange(5)),
    lambda t, r: t.copy_(t * 3 + 1),
]
WITH_AXES: list[Step] = [
    lambda t, r: t.select(r.randrange(t.dim()), 0),
    lambda t, r: t.select(r.randrange(t.dim()), -1),
    lambda t, r: t.narrow(0, 0, t.shape[0] - 1),
    lambda t, r: t[r.randrange(2) :],
    lambda t, r: t[::2],
    lambda t, r: list(t.unbind(r.randrange(t.dim()))[:2]),
    lambda t, r: list(t.split(2, r.randrange(t.dim()))[:2]),
    lambda t, r: list(t.split([1, t.shape[-1] - 1], -1)),
    lambda t, r: t.transpose(0, -1),
    lambda t, r: t.movedim(0, -1),
    lambda t, r: t.permute(*r.sample(range(t.dim()), t.dim())),
    lambda t, r: t.view(-1) if t.is_contiguous() else t,
    lambda t, r: t.diagonal(0, 0, 1) if t.dim() > 1 else t,
]
#: These change the tensor itself, which torch allows of no input.
TURNS: list[Step] = [
    lambda t, r: t.unsqueeze_(0),
    lambda t, r: t.transpose_(0, 1) if t.dim() > 1 else t,
]


def program(seed: int) -> Callable[..., Tensors]:
    def run(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        chance = random.Random(seed)
        tensors: Tensors = [x, y, x + 0, y * 1]
        for _ in range(14):
            tensor = chance.choice(tensors)
            steps = [*ANY, *(WITH_AXES if tensor.dim() else ()), *(() if tensor is x or tensor is y else TURNS)]
            made = chance.choice(steps)(tensor, chance)
            tensors.extend(made if isinstance(made, list) else [made])
        return tensors

    return run


class Checked(torch.fx.Interpreter):
    """Runs a graph and holds every value against what the graph says of it."""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            assert (value.shape, value.dtype) == (n.meta["val"].shape, n.meta["val"].dtype), n.format_node()
        return value


def compare(seed: int) -> str:
    """``"linear"`` where our pass did it, ``"torch"`` where it gave up, ``"refused"`` where eager torch raises.

    Both happen for writes to what is expanded.
    """
    function, inputs = program(seed), (torch.randn(3, 4), torch.randn(2, 3, 2))
    eager = [t.clone() for t in inputs]
    try:
        expected = function(*eager)
    except (RuntimeError, IndexError):
        return "refused"
    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in inputs))
    done = make_functional(traced.graph)
    if done is None:
        return "torch"
    graph, copies, mutated = done
    assert not writes(graph)
    result: Any = graph.output_node().args[0]
    graph.output_node().args = ([*result, *mutated.values()],)
    given = [t.clone() for t in inputs]
    got = Checked(torch.fx.GraphModule(traced, graph)).run(*given)
    for tensor, before in zip(given, inputs, strict=True):
        torch.testing.assert_close(tensor, before, rtol=0, atol=0)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    written = dict(zip(mutated, got[len(expected) :], strict=True))
    states = [written.get(node, before) for node, before in zip(placeholders, inputs, strict=True)]
    for mine, theirs in zip([*got[: len(expected)], *states], [*expected, *eager], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert all(copies[node].op == "placeholder" for node in placeholders)
    return "linear"


@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_programs(first: int, seeded: None) -> None:
    done = [compare(seed) for seed in range(first, first + 40)]
    assert done.count("linear") > 25
    assert done.count("torch") < 6
