"""Products of which some columns are gathered: only those between the least and the greatest index are computed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.plugins.manager import registry_for
from onnxplug.rewrites import columns

AUTO = torch.export.Dim.AUTO
HEADS, SIZE = 2, 8
Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def repeated(query: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """DeBERTa's second version: heads in the batch, the vectors of places repeated for each."""
    batch = query.shape[0]
    return torch.bmm(query.flatten(0, 1), places.repeat(batch, 1, 1).transpose(-1, -2))


def broadcast(query: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Its first version: four axes, scaled."""
    return torch.matmul(query, (places / math.sqrt(3 * SIZE)).unsqueeze(0).transpose(-1, -2))


def read_again(query: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    scores = broadcast(query, places)
    return scores + scores.mean()


class Relative(nn.Module):
    """Scores of each query with the vectors of positions relative to it."""

    def __init__(self, scores: Scores, vectors: int = 96) -> None:
        super().__init__()
        self.scores, self.vectors = scores, vectors
        self.places = nn.Parameter(torch.randn(HEADS, vectors, SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        scores = self.scores(query, self.places)
        rows = torch.arange(x.shape[1])
        index = (rows[:, None] - rows[None, :] + self.vectors // 2).clamp(0, self.vectors - 1)
        return scores.gather(-1, index.expand(*scores.shape[:-1], -1))


class Gathered(nn.Module):
    """Elements of a product, anywhere along an axis."""

    def __init__(self, axis: int = -1, sizes: tuple[int, ...] = (HEADS, SIZE, 70)) -> None:
        super().__init__()
        self.axis, self.weight = axis, nn.Parameter(torch.randn(*sizes))

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).gather(self.axis, index)


Export = Callable[..., onnxplug.OnnxProgram]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Export:
    """Exports a module with dynamic sizes, with this rewrite alone or with all of them."""

    def export(module: nn.Module, args: tuple[Any, ...], alone: bool = True, opset: int = 21) -> onnxplug.OnnxProgram:
        registry, manager = registry_for(plugins=[])
        if alone:
            monkeypatch.setattr(manager, "rewrites", lambda: columns.REWRITES)
        sizes = tuple({0: AUTO, 1: AUTO} for _ in args)
        return onnxplug.to_onnx(module, args, dynamic_shapes=sizes, opset_version=opset, registry=(registry, manager))

    return export


def counted(program: onnxplug.OnnxProgram) -> Counter[str]:
    return Counter(node.op_type for node in program.model.graph.all_nodes())


@pytest.mark.parametrize(("alone", "opset"), [(True, 13), (True, 21), (False, 18), (False, 23)])
@pytest.mark.parametrize("scores", [repeated, broadcast, read_again])
def test_relative_positions(scores: Scores, alone: bool, opset: int, exported: Export) -> None:
    torch.manual_seed(1)
    module = Relative(scores).eval()
    program = exported(module, (torch.randn(2, 5, 16),), alone, opset)
    assert (counted(program)["ReduceMin"] == 1) == (scores is not read_again)
    # At the length 60 the outer positions are clamped.
    for batch, length in ((2, 5), (3, 7), (1, 1), (2, 60)):
        x = torch.randn(batch, length, 16)
        torch.testing.assert_close(program(x)[0], module(x))
    with torch.no_grad():
        module.places[:, 45:52:3, 1] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    program.apply_weights(module.state_dict())
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(program(x)[0], module(x), equal_nan=True)


def test_only_the_columns_between_are_computed(exported: Export) -> None:
    """The vectors are cut before they are repeated and multiplied."""
    program = exported(Relative(repeated), (torch.randn(2, 5, 16),), False)
    graph = program.model.graph
    (product,) = [node for node in graph if node.op_type == "MatMul"]
    made = product.inputs[1]
    for op_type in ("Transpose", "Tile", "Slice"):
        assert made is not None
        node = made.producer()
        assert node is not None
        assert node.op_type == op_type
        made = node.inputs[0]
    assert made is not None
    assert made.name == "places"


@pytest.mark.parametrize("index", [(0, 69), (3, 3), (69, 69), (40, 12)])
def test_places(index: tuple[int, int], exported: Export) -> None:
    """Indices of both ends, of one column alone, and no indices."""
    module = Gathered()
    x, here = torch.randn(2, 3, SIZE), torch.tensor(index).expand(2, 3, -1).contiguous()
    program = exported(module, (x, torch.zeros(2, 3, 2, dtype=torch.int64)))
    assert counted(program)["ReduceMin"] == 1
    for places in (here, here[:, :0]):
        torch.testing.assert_close(program(x, places)[0], module(x, places))


def test_indices_from_the_end(exported: Export) -> None:
    """torch has no indices from the end, ONNX has: they count from the last of all columns."""
    module = Gathered()
    x, index = torch.randn(2, 3, SIZE), torch.tensor([[-1, 5], [-70, -3], [2, 69]]).repeat(2, 1, 1)
    program = exported(module, (x, index.clamp(0)))
    torch.testing.assert_close(program(x, index)[0], module(x, index % 70))


def test_an_index_beyond_the_columns_is_an_error(exported: Export) -> None:
    program = exported(Gathered(), (torch.randn(2, 3, SIZE), torch.zeros(2, 3, 2, dtype=torch.int64)))
    with pytest.raises(Exception, match="Out of range"):
        program(torch.randn(2, 3, SIZE), torch.full((2, 3, 2), 70))


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(lambda: Gathered(axis=1), id="rows"),
        pytest.param(lambda: Gathered(sizes=(HEADS, SIZE, 30)), id="few columns"),
        pytest.param(lambda: Gathered(sizes=(SIZE, 70)), id="one matrix"),
    ],
)
def test_left_alone(module: Callable[[], nn.Module], exported: Export) -> None:
    args = (torch.randn(2, 3, SIZE), torch.tensor([[0, 2], [1, 1], [2, 0]]).repeat(2, 1, 1))
    program = exported(module(), args)
    assert counted(program)["ReduceMin"] == 0
    program.verify()
