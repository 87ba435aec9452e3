"""Random programs of views and in-place writes: our own pass gives what eager torch computes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from onnxplug.functionalize.effects import writes
from onnxplug.functionalize.inplace import Functionalized, make_functional

Tensors = list[torch.Tensor]
Step = Callable[[torch.Tensor, random.Random], "torch.Tensor | Tensors"]
Pair = Callable[[torch.Tensor, torch.Tensor], "torch.Tensor | Tensors"]

ANY: list[Step] = [
    lambda t, r: t.unsqueeze(-1),
    lambda t, r: t.expand(2, *t.shape),
    lambda t, r: t.expand(1, *t.shape),
    lambda t, r: t.detach(),
    lambda t, r: t.clone(),
    lambda t, r: t * 2,
    lambda t, r: t.reshape(-1),
    lambda t, r: t.flatten(),
    lambda t, r: t.contiguous(),
    lambda t, r: t.to(torch.float32),
    lambda t, r: t.to(torch.float64).to(torch.float32),
    lambda t, r: t.positive(),
    lambda t, r: t.add_(1),
    lambda t, r: t.add_(1),
    lambda t, r: t.mul_(2),
    lambda t, r: t.relu_(),
    lambda t, r: t.fill_(r.randrange(5)),
    lambda t, r: t.copy_(t * 3 + 1),
    lambda t, r: torch.add(t, 1, out=torch.empty_like(t)),
    lambda t, r: torch.mul(t, 2, out=t),
    lambda t, r: torch.ops.aten.dropout_(t, 0.5, False),
]
WITH_AXES: list[Step] = [
    lambda t, r: t.select(r.randrange(t.dim()), 0),
    lambda t, r: t.select(r.randrange(t.dim()), -1),
    lambda t, r: t[r.randrange(2) :],
    lambda t, r: t[::2],
    lambda t, r: list(t.unbind(r.randrange(t.dim()))[:2]),
    lambda t, r: list(t.split(2, r.randrange(t.dim()))[:2]),
    lambda t, r: list(t.chunk(2, r.randrange(t.dim()))),
    lambda t, r: list(t.tensor_split(2, r.randrange(t.dim()))),
    lambda t, r: list(t.tensor_split([1], -1)),
    lambda t, r: list(t.hsplit([1])),
    lambda t, r: t.transpose(0, -1),
    lambda t, r: t.movedim(0, -1),
    lambda t, r: t.permute(*r.sample(range(t.dim()), t.dim())),
    lambda t, r: t.flatten(0, min(1, t.dim() - 1)),
    lambda t, r: t.reshape(t.shape[-1], -1),
    lambda t, r: torch.einsum("...i->i...", t),
    lambda t, r: list(t.max(0)[:1]),
    lambda t, r: list(torch.sort(t, 0, out=(torch.empty_like(t), torch.empty_like(t, dtype=torch.int64))))[:1],
    lambda t, r: t.index_put_((torch.tensor([0]),), torch.tensor(3.0)),
    lambda t, r: t.cumsum_(0),
]
#: Steps that need static sizes.
WITH_SIZES: list[Step] = [
    lambda t, r: t.squeeze() if t.dim() else t,
    lambda t, r: t.narrow(0, 0, t.shape[0] - 1) if t.dim() else t,
    lambda t, r: list(t.split([1, t.shape[-1] - 1], -1)) if t.dim() else t,
    lambda t, r: t.view(-1) if t.is_contiguous() else t,
    lambda t, r: t.as_strided((t.numel(),), (1,), 0) if t.is_contiguous() and not t.storage_offset() else t,
    lambda t, r: t.fill_diagonal_(4) if t.dim() == 2 else t,
    lambda t, r: t.diagonal(0, 0, 1) if t.dim() > 1 else t,
]
#: Steps of two tensors of the same shape.
PAIRS: list[Pair] = [
    lambda t, u: t.copy_(u),
    lambda t, u: torch.add(t, u, out=u),
    lambda t, u: [swap(t, u), t][1:],
    lambda t, u: [both(t, [u]), t][1:],
    lambda t, u: [torch._foreach_add_([t, u], 1), t][1:],
    lambda t, u: torch.where(t > u, t, u),
]
#: Steps that change the tensor object itself, which torch allows of no input.
TURNS: list[Step] = [
    lambda t, r: t.unsqueeze_(0),
    lambda t, r: t.transpose_(0, 1) if t.dim() > 1 else t,
]


@torch.library.custom_op("random_writes::swap", mutates_args={"a", "b"})
def swap(a: torch.Tensor, b: torch.Tensor) -> None:
    copy = a.clone()
    a.copy_(b)
    b.copy_(copy)


@torch.library.custom_op("random_writes::both", mutates_args={"others"})
def both(a: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    for other in others:
        other.add_(2)
    return a + 1


@both.register_fake
def _(a, others):
    return torch.empty_like(a)


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors share memory."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def program(seed: int, dynamic: bool = False) -> Callable[..., Tensors]:
    """A function that takes the same steps on the same tensors at each call, whatever the sizes."""
    chance = random.Random(seed)
    steps = [*ANY, *WITH_AXES, *PAIRS, *TURNS, *(() if dynamic else WITH_SIZES)]
    plan: list[tuple[Any, int, int | None, int]] = []

    def chosen(tensors: Tensors, x: torch.Tensor, y: torch.Tensor) -> tuple[Any, int, int | None, int]:
        step, number, other = chance.choice(steps), chance.randrange(len(tensors)), None
        tensor = tensors[number]
        if step in PAIRS:
            alike = [i for i, t in enumerate(tensors) if t.shape == tensor.shape and not overlap(t, tensor)]
            other = chance.choice(alike) if alike else None
            step = step if alike else torch.clone
        elif (step in WITH_AXES and not tensor.dim()) or (step in TURNS and (tensor is x or tensor is y)):
            step = ANY[0]
        return step, number, other, chance.randrange(10**6)

    def run(x: torch.Tensor, y: torch.Tensor) -> Tensors:
        tensors: Tensors = [x, y, x + 0, y * 1]
        for i in range(14):
            if i == len(plan):
                plan.append(chosen(tensors, x, y))
            step, number, other, inner = plan[i]
            tensor = tensors[number]
            if step in PAIRS:
                made = step(tensor, tensors[other])
            else:
                made = step(tensor) if step is torch.clone else step(tensor, random.Random(inner))
            tensors.extend(made if isinstance(made, list) else [made])
        return tensors

    return run


class Checked(torch.fx.Interpreter):
    """Runs a graph, and compares every value's dtype, and its shape where it is static, with the graph's metadata."""

    def run_node(self, n: torch.fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            val = n.meta["val"]
            assert value.dtype == val.dtype, n.format_node()
            if all(isinstance(size, int) for size in val.shape):
                assert value.shape == val.shape, n.format_node()
        return value


def compare(seed: int) -> str:
    """``"linear"`` where our pass succeeded, ``"torch"`` where it gave up, ``"refused"`` where eager torch raises.

    Giving up and raising both happen at writes to expanded tensors.
    """
    function, inputs = program(seed), (torch.randn(3, 4), torch.randn(2, 3, 2))
    try:
        function(*(t.clone() for t in inputs))
    except (RuntimeError, IndexError):
        return "refused"
    traced = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*(t.clone() for t in inputs))
    done = make_functional(traced.graph)
    if done is None:
        return "torch"
    assert not done.conditions
    hold(function, traced, done, [inputs, tuple(torch.randn_like(t) for t in inputs)])
    return "linear"


def hold(function: Callable[..., Tensors], traced: torch.fx.GraphModule, done: Functionalized, sets: Any) -> None:
    """Compares a functional graph with the program on sets of inputs: results, and final values of the inputs."""
    assert not writes(done.graph)
    result: Any = done.graph.output_node().args[0]
    done.graph.output_node().args = ([*result, *done.mutated.values()],)
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    assert all(done.nodes[node].op == "placeholder" for node in placeholders)
    module = torch.fx.GraphModule(traced, done.graph)
    for inputs in sets:
        eager, sample = ([t.clone() for t in inputs] for _ in range(2))
        expected = function(*eager)
        got = Checked(module).run(*sample)
        for tensor, before in zip(sample, inputs, strict=True):
            torch.testing.assert_close(tensor, before, rtol=0, atol=0)
        written = dict(zip(done.mutated, got[len(expected) :], strict=True))
        states = [written.get(node, before) for node, before in zip(placeholders, inputs, strict=True)]
        for mine, theirs in zip([*got[: len(expected)], *states], [*expected, *eager], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


PORTIONS = [*range(0, 80, 40), *(pytest.param(first, marks=pytest.mark.long) for first in range(80, 3000, 40))]


@pytest.mark.parametrize("first", PORTIONS)
def test_random_programs(first: int, seeded: None) -> None:
    done = [compare(seed) for seed in range(first, first + 40)]
    assert done.count("linear") > 20
    assert done.count("torch") < 6


#: Sizes of the three symbols: the sizes of the trace, and others.
TRACED, OTHERS = (3, 4, 2), [(5, 7, 6), (2, 8, 3), (7, 3, 9), (1, 4, 2), (3, 1, 2), (3, 4, 1)]


def compare_dynamic(seed: int) -> tuple[str, int]:
    """As :func:`compare`, with symbolic sizes; and the number of compared sizes beside the trace's."""
    function = program(seed, dynamic=True)

    def draw(a: int, b: int, c: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(a, b), torch.randn(c, a, c)

    try:
        function(*draw(*TRACED))
        traced = make_fx(function, tracing_mode="symbolic", pre_dispatch=True)(*draw(*TRACED))
    except (RuntimeError, IndexError):
        return "refused", 0
    done = make_functional(traced.graph)
    if done is None:
        return "torch", 0
    x, y = (node.meta["val"] for node in traced.graph.nodes if node.op == "placeholder")
    symbols = [size.node.expr for size in (*x.shape, y.shape[0])]
    sets = []
    for sizes in OTHERS:
        known = dict(zip(symbols, map(sympy.Integer, sizes), strict=True))
        conditions = [*(guard.expr for guard in x.fake_mode.shape_env.guards), *(expr for expr, _ in done.conditions)]
        try:
            if all(expr.xreplace(known) is sympy.true or expr is sympy.true for expr in conditions):
                inputs = draw(*sizes)
                function(*(t.clone() for t in inputs))
                sets.append(inputs)
        except (RuntimeError, IndexError, ZeroDivisionError):
            continue  # PyTorch itself refuses these sizes
    hold(function, traced, done, [draw(*TRACED), *sets])
    return "linear", len(sets)


BLOCKS = [(0, 16), *(pytest.param(first, 64, marks=pytest.mark.long) for first in range(16, 464, 64))]


@pytest.mark.parametrize(("first", "number"), BLOCKS)
@pytest.mark.long
def test_random_programs_of_dynamic_sizes(first: int, number: int, seeded: None) -> None:
    done = [compare_dynamic(seed) for seed in range(first, first + number)]
    ways = [way for way, _ in done]
    assert ways.count("linear") > number / 2
    assert ways.count("torch") < number / 4
    assert sum(count for _, count in done) > 10 / 16 * number
