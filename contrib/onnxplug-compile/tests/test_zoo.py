"""Whole models by torch.compile: eager's results, and no more graphs than Dynamo captures for the backend ``eager``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from onnxplug.verification.compare import compare
from tests.support.tolerances import looser
from tests.support.zoo import ZOO, ZooModel

#: Sizes of the calls after the first: Dynamo makes sizes dynamic at the second, and has a graph of its own for size 1.
LATER: Sequence[Mapping[str, int]] = (
    {"batch": 3, "sequence": 9, "target": 6, "texts": 4, "images": 3},
    {"batch": 4, "sequence": 11, "target": 8, "texts": 5, "images": 5},
    {"batch": 1, "sequence": 5, "target": 4, "texts": 2, "images": 2},
)
#: Models that the default run tries; `make zoo` runs them all.
QUICK = ("bert",)
#: Models whose gradients are compared.
TRAINED = ("resnet18", "convnext_atto", "vit", "bert", "gpt2", "llama", "t5")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def runs(backend: str, model: torch.nn.Module, calls: Sequence[Any], **settings: Any) -> tuple[int, list[Any]]:
    """The number of graphs that a backend compiles for some calls, and the result of each call."""
    torch._dynamo.reset()
    count = 0

    def counting(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend(backend)(module, inputs, **options)

    compiled = torch.compile(model, backend=counting, **settings)
    results = [compiled(*args, **kwargs) for args, kwargs in calls]
    return count, results


def calls_of(entry: ZooModel) -> list[Any]:
    sizes = [{}, *({name: s[name] for name in entry.sizes} for s in LATER)]
    return [entry.inputs(seed=seed, **chosen) for seed, chosen in enumerate(sizes)]


def agree(got: Any, expected: Any) -> None:
    assert torch.utils._pytree.tree_structure(got) == torch.utils._pytree.tree_structure(expected)
    leaves = zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected), strict=True)
    for i, (one, other) in enumerate(leaves):
        if isinstance(other, torch.Tensor):
            comparison = compare(one, other)
            assert comparison.equal, f"output {i} {comparison}"
        else:
            assert one == other


def choice(names: Sequence[str], quick: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.long) for name in names]


@pytest.mark.parametrize("name", choice(list(ZOO), QUICK))
@pytest.mark.long
def test_a_model_equals_eager_with_as_many_graphs(name: str) -> None:
    entry = ZOO[name]
    model, calls = entry.module(), calls_of(entry)
    with torch.no_grad():
        graphs, _ = runs("eager", model, calls)
        mine, got = runs("onnxplug", model, calls, options={"fallback": False})
        expected = [model(*args, **kwargs) for args, kwargs in calls]
    assert mine == graphs
    agree(got, expected)


@pytest.mark.parametrize("name", choice(TRAINED, ()))
def test_gradients_of_a_model_equal_eager(name: str) -> None:
    entry = ZOO[name]
    model, calls = entry.module(), calls_of(entry)
    compiled = torch.compile(model, backend="onnxplug", options={"fallback": False})
    for args, kwargs in calls[:2]:
        gradients = []
        for run in (model, compiled):
            model.zero_grad()
            leaves = torch.utils._pytree.tree_leaves(run(*args, **kwargs))
            torch.stack([x.square().mean() for x in leaves if x.is_floating_point()]).sum().backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
        for parameter, expected in gradients[0].items():
            got = gradients[1][parameter]
            if expected is None:
                assert got is None
            else:
                size = float(expected.abs().max()) + 1e-3  # a bias of keys has the gradient 0, up to rounding
                comparison = compare(got / size, expected / size, **looser("gradients of models"))
                assert comparison.equal, f"the gradient of {parameter} {comparison}"
