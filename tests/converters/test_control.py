"""Branches, loops and scans, against eager PyTorch at several sizes and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops import scan, while_loop
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.while_loop import while_loop_stack_output_op as stacked_loop
from torch.utils.checkpoint import checkpoint

import onnxplug
from tests.support.check import Call, check
from tests.support.tolerances import looser

D = torch.export.Dim.DYNAMIC
W = torch.arange(4.0) - 1.5


def powers(x: torch.Tensor, count: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < count, lambda i, x: (i + 1, x * 2 + W), (torch.tensor(0), x))


def rows(x: torch.Tensor) -> Any:
    """A loop with as many iterations as rows, counted by an int."""
    return while_loop(lambda i, x: i < x.shape[0], lambda i, x: (i + 1, x * 2 + i), (0, x))


def sizes_in_both(x: torch.Tensor) -> Any:
    """A condition and a body that compute the same size of the carried tensor, which differs in each iteration."""

    def condition(i: Any, x: torch.Tensor) -> Any:
        return i * 2 < 9

    def body(i: Any, x: torch.Tensor) -> Any:
        return i * 2 + 1, x + i * 2

    return while_loop(condition, body, (0, x))


def none_at_all(x: torch.Tensor) -> Any:
    return while_loop(lambda x: x.sum() > 1e9, lambda x: (x * 2,), (x,))


def newton(x: torch.Tensor) -> Any:
    """The square root of each number by Newton's method, whose number of iterations depends on the data."""
    root = while_loop(
        lambda y, x: (y * y - x).abs().max() > 1e-5, lambda y, x: ((y + x / y) / 2, x.clone()), (x.clone(), x)
    )
    return root[0]


def halves(x: torch.Tensor) -> Any:
    """The results of all iterations; without an iteration, the carried tensors."""
    return stacked_loop(
        lambda i, x, by: (x.abs().max() > 1) & (i < 9),
        lambda i, x, by: (i + 1, x * by),
        (torch.tensor(0), x),
        (torch.tensor(0.5),),
    )


def last_turns(x: torch.Tensor) -> Any:
    """The complex numbers of all iterations, of which there is at least one."""
    _, z = stacked_loop(
        lambda going, z: going.clone(),
        lambda going, z: (z.real.abs().max() < 9, z * 2j + 1),
        (torch.tensor(True), torch.complex(x, x * 2)),
        (),
    )
    return torch.view_as_real(z)


def turning(x: torch.Tensor) -> Any:
    """A loop that carries complex numbers."""
    results = while_loop(
        lambda i, z: i < 3, lambda i, z: (i + 1, z * 1j + 1), (torch.tensor(0), torch.complex(x, x * 2))
    )
    return torch.view_as_real(results[1])


LOOPS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], list[tuple[torch.Tensor, ...]]]] = {
    "powers": (
        powers,
        (torch.randn(3, 4), torch.tensor(5)),
        [
            (torch.randn(1, 4), torch.tensor(0)),
            (torch.randn(7, 4), torch.tensor(9)),
            (torch.randn(2, 4), torch.tensor(-1)),
        ],
    ),
    "rows": (rows, (torch.randn(3, 4),), [(torch.randn(1, 4),), (torch.randn(5, 4),)]),
    "sizes_in_both": (sizes_in_both, (torch.randn(3, 4),), [(torch.randn(2, 4),)]),
    "none_at_all": (none_at_all, (torch.randn(3, 4),), [(torch.full((2, 4), 1e8),)]),
    "newton": (newton, (torch.rand(3, 4) + 0.5,), [(torch.rand(1, 4) * 9 + 1,)]),
    "halves": (halves, (torch.randn(3, 4) * 9,), [(torch.randn(1, 4) / 99,), (torch.randn(5, 4) * 99,)]),
    "last_turns": (last_turns, (torch.randn(3, 4) / 9,), [(torch.randn(2, 4) * 99,)]),
    "turning": (turning, (torch.randn(3, 4),), [(torch.randn(2, 4),)]),
}


@pytest.mark.parametrize("opset", [13, 18, 21])
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, opset: int) -> None:
    function, args, others = LOOPS[name]
    dynamic = ({0: D}, *(None,) * (len(args) - 1))
    program = check(function, *args, others=others, dynamic=dynamic, opset=opset, **looser("branches and loops"))
    assert "Loop" in program.statistics.operators


SCANS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sums_and_products": lambda x: scan(lambda c, v: (c + v, (c * v, v.sum())), torch.zeros(4), x),
    "reversed": lambda x: scan(lambda c, v: (c * 0.5 + v, c - v), torch.ones(4), x, reverse=True),
    "two_states": lambda x: scan(lambda c, v: ((c[0] + v, c[1] * 2), c[0] * c[1]), (W.clone(), torch.ones(())), x),
    "integers": lambda x: scan(lambda c, v: (c + v, c * v), torch.zeros(4, dtype=torch.int64), (x * 9).long()),
    "map": lambda x: map_over(lambda v, w: (v * w, v.sum()), x, W),
    "map_of_two": lambda x: map_over(lambda v: v[0].max() - v[1], (x, x * 2)),
    "complex": lambda x: torch.view_as_real(
        scan(lambda c, v: (c * v, c + v), torch.ones(4, dtype=torch.complex64), torch.complex(x, 1 - x))[1]
    ),
}


@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", SCANS)
def test_scans(name: str, opset: int) -> None:
    others = [(torch.randn(1, 4),), (torch.randn(6, 4),)]
    program = check(
        SCANS[name], torch.randn(3, 4), others=others, dynamic=({0: D},), opset=opset, **looser("branches and loops")
    )
    assert "Scan" in program.statistics.operators


@pytest.mark.parametrize("dynamic", [{}, {0: D, 1: D}], ids=["static", "dynamic"])
@pytest.mark.long
def test_scans_of_steps_that_broadcast(dynamic: dict[int, Any]) -> None:
    """Sizes of 1 where an export before had other sizes: static sizes stay static in the step."""

    def model(x: torch.Tensor, rates: torch.Tensor) -> Any:
        decay = -rates.exp()

        def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = torch.exp(x * decay) * state + x
            return state, (state * decay).sum(-1)

        return scan(step, torch.zeros(x.shape[1], *decay.shape), x)

    for groups, width in ((2, 3), (1, 6), (1, 1)):
        rates, sizes = torch.randn(groups, width, 4), ((1, 1), (4, 3)) if dynamic else ((5, 2),)
        others = [(torch.randn(*size, groups, width, 1), rates) for size in sizes]
        x = torch.randn(5, 2, groups, width, 1)
        check(model, x, rates, others=others, dynamic=(dynamic, None), **looser("branches and loops"))


BRANCHES: dict[str, Callable[[torch.Tensor], Any]] = {
    "several_results": lambda x: torch.cond(x.sum() > 0, lambda x: (x + 1, x.sum()), lambda x: (x * 2, x.max()), (x,)),
    "complex": lambda x: torch.view_as_real(
        torch.cond(x.sum() > 0, lambda z: z * 1j, lambda z: z.conj() + 2, (torch.complex(x, x - 1),))
    ),
    "size_within_and_after": lambda x: (
        torch.cond(
            x.sum() > 0,
            lambda y: torch.ones(x.shape[0] * 2 + 1, 3) * y.sum(),
            lambda y: torch.zeros(x.shape[0] * 2 + 1, 3) - y.sum(),
            (x,),
        ),
        torch.ones(x.shape[0] * 2 + 1, 4) + x.sum(),
    ),
    "loop_within": lambda x: torch.cond(
        x.sum() > 0,
        lambda x: while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1],
        lambda x: x.clone(),
        (x,),
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches(name: str) -> None:
    x = torch.randn(3, 4).abs()
    check(BRANCHES[name], x, others=[(-x,), (x[:1],)], dynamic=({0: D},))


def test_complex_tensors_go_through_a_region() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x + 1)
        with torch.no_grad():
            z = z * torch.polar(torch.ones_like(x), x)
        return torch.view_as_real(z)

    x = torch.randn(2, 3, requires_grad=True)
    check(model, x, others=[(torch.randn(4, 3),)], dynamic=({0: D},))


# -- regions that run unchanged ----------------------------------------------------------------------------------------


@torch.compiler.nested_compile_region
def compiled_once(x: torch.Tensor, y: torch.Tensor) -> Any:
    return (x * y).sin(), x + y


def calls_twice(x: torch.Tensor) -> Any:
    first, second = compiled_once(x, x + 1)
    return sum(compiled_once(first, second))


@pytest.mark.parametrize("strict", [False, True])
def test_a_region_that_is_compiled_once(strict: bool) -> None:
    others = [(torch.randn(7, 4),), (torch.randn(1, 4),)]
    check(calls_twice, torch.randn(3, 4), others=others, dynamic=({0: "batch"},), strict=strict)


def with_the_region_as(name: str, **options: Any) -> torch.export.ExportedProgram:
    """A program whose region is called by another higher-order operator; torch's exports rarely leave these in a graph."""
    program = torch.export.export(Call(calls_twice), (torch.randn(3, 4),), strict=True)
    regions = 0
    for node in program.graph.nodes:
        if getattr(node.target, "__name__", "") == "invoke_subgraph":
            regions += 1
            graph, _, *inputs = node.args
            node.target = getattr(torch.ops.higher_order, name)
            node.args = (graph, tuple(inputs), {}, {}) if name == "hints_wrapper" else (graph, *inputs)
            node.kwargs = options
    assert regions == 2
    return program


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("wrap", {}),
        ("tag_activation_checkpoint", {"use_reentrant": False}),
        ("wrap_activation_checkpoint", {}),
        ("local_map_hop", {}),
        ("hints_wrapper", {}),
    ],
)
def test_other_regions(name: str, options: dict[str, Any]) -> None:
    program = onnxplug.to_onnx(with_the_region_as(name, **options))
    x = torch.randn(3, 4)
    torch.testing.assert_close(program(x)[0], calls_twice(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(use_reentrant: bool) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).eval()

    def run(x: torch.Tensor) -> Any:
        return checkpoint(network, x, use_reentrant=use_reentrant) + x

    check(run, torch.randn(3, 4), others=[(torch.randn(6, 4),)], dynamic=({0: "batch"},))


# -- tokens that order effects -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.linalg.inv, lambda x: torch.linalg.solve(x, x * 2 + 1)])
def test_a_program_whose_factorisation_is_checked(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """torch's decompositions leave the check of a factorisation as ``with_effects``, and give the program a token."""
    matrices = [torch.randn(n, 3, 3).double() + 4 * torch.eye(3) for n in (2, 5, 1)]
    shapes = ({0: D},)
    program = torch.export.export(Call(function), (matrices[0],), dynamic_shapes=(shapes,)).run_decompositions()
    exported = onnxplug.to_onnx(program)
    for x in matrices:
        torch.testing.assert_close(exported(x)[0], function(x))
