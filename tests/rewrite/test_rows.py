"""Rows that are added to a tensor, in the form for ONNX Runtime's CPU: right with any number of threads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
import torch

import onnxplug
from onnxplug.rewrites import rows
from tests.support.check import Call, check

CPU = {"target": "onnxruntime:cpu"}
NODES, EDGES = torch.export.Dim("nodes"), torch.export.Dim("edges")


def added(x: torch.Tensor, index: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.index_add(0, index, v)


def scattered(x: torch.Tensor, index: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Adds rows as torch_geometric adds messages."""
    return x.scatter_add(0, index.view(-1, *[1] * (v.dim() - 1)).expand_as(v), v)


def drawn(nodes: int, edges: int, *width: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Small integers, whose sums are the same in any order."""
    x, v = (torch.randint(-9, 9, (count, *width)).to(dtype) for count in (nodes, edges))
    return x, torch.randint(nodes, (edges,)), v


def operators(program: onnxplug.OnnxProgram) -> Counter[str]:
    return Counter(node.op_type for node in program.model.graph.all_nodes())


def run(program: onnxplug.OnnxProgram, threads: int, *args: torch.Tensor) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    result: np.ndarray = session.run(
        None, {i.name: a.numpy() for i, a in zip(session.get_inputs(), args, strict=True)}
    )[0]
    return result


@pytest.mark.parametrize("opset", [16, 21])
@pytest.mark.parametrize("function", [added, scattered])
@pytest.mark.parametrize("width", [(32,), (2, 3)])
def test_rows(function: Callable[..., torch.Tensor], width: tuple[int, ...], opset: int) -> None:
    """Few rows, more rows than one ScatterND takes, no rows, one row, and one node."""
    many = rows.MOST_ELEMENTS // 6 * 2 + 5
    others = [drawn(n, e, *width) for n, e in ((50, many), (3, 0), (2, 1), (1, 7))]
    dynamic = ({0: NODES}, {0: EDGES}, {0: EDGES})
    program = check(function, *drawn(4, 9, *width), others=others, dynamic=dynamic, opset=opset, **CPU)
    assert operators(program)["ScatterND"] == 2
    assert operators(program)["If"] == 2
    assert operators(program)["Loop"] == 1


def test_a_large_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large tensor isn't copied for every few rows."""
    monkeypatch.setattr(rows, "_MOST_COPIED", 100)
    others = [drawn(n, rows.MOST_ELEMENTS // 2 + 1, 4) for n in (25, 26)]
    check(added, *drawn(4, 9, 4), others=others, dynamic=({0: NODES}, {0: EDGES}, {0: EDGES}), **CPU)
    program = check(added, *others[0], others=[tuple(x + 0 for x in others[0])], **CPU)
    assert operators(program)["Loop"] == 1
    program = check(added, *others[1], others=[tuple(x + 0 for x in others[1])], **CPU)
    assert operators(program) == {"Unsqueeze": 1, "Cast": 1, "Expand": 1, "ScatterElements": 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int64])
def test_sizes_that_are_known(dtype: torch.dtype) -> None:
    x, index, v = drawn(4, 9, 5, dtype=dtype)
    program = check(added, x, index, v, others=[(x * 2, index.flip(0), v * 3)], **CPU)
    assert operators(program) == {"Unsqueeze": 1, "ScatterND": 1}
    x, index, v = drawn(4, 9, 4, 2, dtype=dtype)

    def elements(x: torch.Tensor, index: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.index_put((index, index.flip(0)), v[:, 0], accumulate=True)

    program = check(elements, x, index, v, others=[(x * 2, index.flip(0), v * 3)], **CPU)
    assert operators(program)["ScatterND"] == 1


def test_what_is_left_alone() -> None:
    """The form is not for single elements, another axis or reduction, an unknown width, or part of the columns."""
    x, index, v = drawn(4, 9, 5)
    vectors, others = tuple(a[:, 0] if a.dim() == 2 else a for a in (x, index, v)), [drawn(3, 7)]
    dynamic = ({0: NODES}, {0: EDGES}, {0: EDGES})
    assert "ScatterND" not in operators(check(added, *vectors, others=others, dynamic=dynamic, **CPU))
    functions: list[Callable[..., torch.Tensor]] = [
        lambda x, index, v: x.T.scatter_add(1, index.expand(5, 9), v.T),
        lambda x, index, v: x.scatter_reduce(0, index[:, None].expand(9, 5), v, "amax"),
        lambda x, index, v: x.scatter_add(0, index[:, None].expand(9, 3), v),
    ]
    for function in functions:
        program = check(function, x, index, v, others=[(x * 2, index.flip(0), v * 3)], **CPU)
        assert operators(program)["ScatterElements"] == 1
    wide = ({0: NODES, 1: torch.export.Dim("width")}, {0: EDGES}, {0: EDGES, 1: torch.export.Dim("width")})
    assert "ScatterND" not in operators(check(added, x, index, v, others=[drawn(3, 7, 6)], dynamic=wide, **CPU))
    assert "ScatterND" not in operators(onnxplug.to_onnx(Call(added), (x, index, v)))


def test_nothing_is_lost_between_threads() -> None:
    """Each of 250,000 rows is added; the last ScatterND has fewer rows than the others."""
    x, index, v = torch.zeros(3, 2), torch.arange(250_000).remainder(3), torch.ones(250_000, 2)
    dynamic = ({0: NODES}, {0: EDGES}, {0: EDGES})
    program = onnxplug.to_onnx(Call(added), (x, index, v), dynamic_shapes={"args": dynamic}, **CPU)
    expected = torch.bincount(index)[:, None].expand(3, 2).numpy()
    for threads in (2, 4, 8):
        for _ in range(10):
            np.testing.assert_array_equal(run(program, threads, x, index, v), expected)


@pytest.mark.parametrize("width", [1, 32])
def test_onnx_runtime_adds_few_rows_in_one_thread(width: int) -> None:
    """The form relies on a plain ScatterND, which loses no row, not even of half as many elements again."""
    count = rows.MOST_ELEMENTS * 3 // 2 // width
    x, index, v = torch.zeros(2, width), torch.arange(count).remainder(2), torch.ones(count, width)
    program = onnxplug.to_onnx(Call(added), (x, index, v), target=None)
    assert operators(program)["ScatterND"] == 1
    expected = torch.bincount(index)[:, None].expand(2, width).numpy()
    for threads in (2, 8):
        for _ in range(30):
            np.testing.assert_array_equal(run(program, threads, x, index, v), expected)
