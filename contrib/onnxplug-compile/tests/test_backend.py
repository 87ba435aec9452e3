"""torch.compile(backend="onnxplug"): results, structure and memory of eager."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from onnxplug_compile.backend import onnxplug_backend
from torch import nn

from tests.support.compiled import Everything, compare
from tests.support.tolerances import looser

Model = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def equals_eager(
    model: Model, *calls: Sequence[Any], options: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Runs each call by eager and compiled, from the same seed, without fallback; returns the backend's store."""
    store: dict[str, Any] = {}
    arguments = {"fallback": False, "store": store, **(options or {})}
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="onnxplug", options=arguments, **settings)
    for args in calls:
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        torch.manual_seed(7)
        expected = eager(*theirs)
        torch.manual_seed(7)
        got = compiled(*mine)
        compare(got, expected)
        compare(mine, theirs)
    return store


@pytest.mark.long
def test_mutation_views_numbers_and_none() -> None:
    calls = [(torch.randn(n, 4), k, 0.5) for n, k in ((3, 2), (5, 3), (2, 4), (7, 2))]
    with torch.no_grad():
        equals_eager(Everything(), *calls)


FUNCTIONS: dict[str, tuple[Model, Sequence[Sequence[Any]]]] = {
    "elementwise": (lambda x: (x.sin() + 1) * 2, [(torch.randn(3, 4),), (torch.randn(6, 4),), (torch.randn(1, 9),)]),
    "an input returned": (lambda x: (x, x + 1, x.t()), [(torch.randn(3, 4),)]),
    "nothing computed": (lambda x: (x.t(), None), [(torch.randn(3, 4),)]),
    "no element": (lambda x: (x * 2, x.sum()), [(torch.randn(0, 4),)]),
    "transposed input": (lambda x: x.t() @ x, [(torch.randn(3, 4).t(),), (torch.randn(5, 4).t(),)]),
    "layout of eager": (
        lambda x: (x.permute(0, 2, 1) * 2, x.to(memory_format=torch.channels_last) if x.dim() == 4 else x + 1),
        [(torch.randn(2, 3, 4),)],
    ),
    "expanded": (
        lambda x: ((x * 2).unsqueeze(1).expand(-1, 3, -1), x.sum(0, keepdim=True).expand(3, 4), x.sum().expand(2, 2)),
        [(torch.randn(3, 4),), (torch.randn(5, 4),), (torch.randn(1, 4),)],
    ),
    "windows": (lambda x: (x + 1).unfold(0, 3, 2), [(torch.randn(9),), (torch.randn(11),)]),
    "channels last": (lambda x: x + 1, [(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),)]),
    "bfloat16": (lambda x: (x + 1) * x, [(torch.randn(3, 4).to(torch.bfloat16),)]),
    "half": (lambda x: x @ x.t(), [(torch.randn(3, 4).half(),)]),
    "bool and int": (lambda x: (x > 0, x.to(torch.int32), x.bool().any()), [(torch.randn(3, 4),)]),
    "complex": (lambda x: (torch.fft.fft(x), x.conj() * x), [(torch.randn(3, 4, dtype=torch.complex64),)]),
    "conjugated input": (lambda x: x * 2, [(torch.randn(3, dtype=torch.complex64).conj(),)]),
    "0-dim": (lambda x: (x + 1, x.expand(3)), [(torch.tensor(2.5),)]),
    "sizes of data": (lambda x: (x[x > 0], (x > 0).nonzero()), [(torch.randn(8, 3),), (torch.randn(8, 3),)]),
    "constant": (lambda x: (x + torch.tensor([1.0, 2.0]), torch.ones(2)), [(torch.randn(3, 2),)]),
    "branch": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, (x,)),
        [(torch.ones(3),), (-torch.ones(3),)],
    ),
    "dropout": (lambda x: nn.functional.dropout(x.transpose(0, 1), 0.4), [(torch.randn(5, 6),), (torch.randn(8, 6),)]),
    "random": (
        lambda x: (
            torch.rand_like(x) + torch.randn(x.shape[0], 2).sum() + torch.randint(0, 9, (3,)).sum(),
            torch.empty_like(x).bernoulli_(0.3),
            torch.empty_like(x).uniform_(1, 2),
            torch.randperm(5),
        ),
        [(torch.randn(5, 6),), (torch.randn(8, 6),)],
    ),
}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equals_eager(name: str, dynamic: bool | None) -> None:
    function, calls = FUNCTIONS[name]
    settings: dict[str, Any] = {}
    if name == "sizes of data":
        settings["fullgraph"] = True
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        equals_eager(function, *calls, dynamic=dynamic, **settings)


def test_one_session_for_all_sizes() -> None:
    calls = [(torch.randn(n, 3),) for n in (2, 5, 9, 33)]
    store = equals_eager(lambda x: x.softmax(0) * x.shape[0], *calls, dynamic=True)
    assert len(store["graphs"]) == 1
    assert len(store["graphs"][0].calls) == 4


def test_graph_breaks() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y.relu() + 1

    store = equals_eager(broken, (torch.randn(3),))
    assert [graph.kind for graph in store["graphs"]] == ["inference", "inference"]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4)), (5, 8)),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    "embedding": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Softmax(-1)), (3, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_eager_with_dropout(name: str) -> None:
    """Dropout draws from PyTorch's generator, so that losses are eager's, and forward and backward agree."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    eager = make().train()
    mine = copy.deepcopy(eager)
    compiled = torch.compile(mine, backend="onnxplug", options={"fallback": False})
    losses: dict[str, list[float]] = {"eager": [], "compiled": []}
    for which, model, run in (("eager", eager, eager), ("compiled", mine, compiled)):
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        torch.manual_seed(5)
        for step in range(20):
            x = torch.randn(shape[0] + step % 3, *shape[1:])
            loss = (run(x) - x.mean()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[which].append(loss.item())
    torch.testing.assert_close(torch.tensor(losses["compiled"]), torch.tensor(losses["eager"]), **looser("training"))
    assert losses["eager"][-1] < losses["eager"][0]


class Region(nn.Module):
    """A region that is compiled once and called twice, each time with numbers of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropped(x) + dropped(x * 2)


@torch.compiler.nested_compile_region
def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x.sin(), 0.5)


@pytest.mark.parametrize("backend", ["onnxplug", "onnxplug_debug"])
def test_a_region_draws_the_numbers_of_eager(backend: str) -> None:
    compiled = torch.compile(Region(), backend=backend, options={"fallback": False})
    for rows in (4, 9):
        results = []
        for call in (compiled, Region()):
            x = torch.arange(3.0 * rows).reshape(rows, 3).requires_grad_()
            torch.manual_seed(rows)
            result = call(x)
            result.sum().backward()
            results.append((result, x.grad, torch.rand(2)))
        torch.testing.assert_close(*results)


def test_a_graph_that_does_not_convert_is_run_by_eager_with_one_warning() -> None:
    library = torch.library.custom_op("onnxplug_backend_test::odd", mutates_args=())(_odd)
    library.register_fake(torch.empty_like)
    compiled = torch.compile(lambda x: torch.ops.onnxplug_backend_test.odd(x) + 1, backend="onnxplug")
    with pytest.warns(UserWarning, match=r"run by eager PyTorch.*\n?.*onnxplug_backend_test::odd"):
        got = compiled(torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(got, torch.tensor([4.0, -5.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(torch.tensor([2.0, -2.0])), torch.tensor([7.0, -5.0]))
    torch._dynamo.reset()
    strict = torch.compile(
        lambda x: torch.ops.onnxplug_backend_test.odd(x) + 1, backend="onnxplug", options={"fallback": False}
    )
    with pytest.raises(Exception, match="onnxplug_backend_test::odd"):
        strict(torch.tensor([1.0, -2.0]))


def _odd(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_threads() -> None:
    compiled = torch.compile(lambda x: (x @ x.t()).softmax(-1), backend="onnxplug", dynamic=True)
    inputs = [torch.randn(3 + i % 5, 16) for i in range(40)]
    compiled(inputs[0])
    expected = [(x @ x.t()).softmax(-1) for x in inputs]
    wrong: list[int] = []

    def work(start: int) -> None:
        for i in range(start, len(inputs), 4):
            if not torch.allclose(compiled(inputs[i]), expected[i], atol=1e-6):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_results_are_memory_of_their_own() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="onnxplug")
    first = compiled(torch.ones(3))
    second = compiled(torch.zeros(3))
    first.add_(1)
    assert first.tolist() == [3, 3, 3]
    assert second.tolist() == [0, 0, 0]


def test_the_backend_is_known_by_name() -> None:
    assert "onnxplug" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("onnxplug") is onnxplug_backend
