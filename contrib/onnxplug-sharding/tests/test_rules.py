"""Each rule by computation: every operator with each operand split along each axis, as a weight and as a result."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import ShapeInferencePass
from onnxplug_sharding import Split, read_shardings, shard
from onnxplug_sharding.rules import RULES

import onnxplug
from onnxplug.build.stored import META, Origin
from tests.support.sharding import prove

#: Operator, attributes, shapes of operands.
CASES: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("Sigmoid", {}, [(4, 6)]),
    ("Add", {}, [(2, 4, 6), (2, 4, 6)]),
    ("Sub", {}, [(2, 4, 6), (6,)]),
    ("Mul", {}, [(4, 1), (1, 6)]),
    ("Div", {}, [(4, 1, 2), (6, 2)]),
    ("Max", {}, [(4, 6), (6,), (4, 1)]),
    ("PRelu", {}, [(4, 6), (6,)]),
    ("MatMul", {}, [(4, 6), (6, 8)]),
    ("MatMul", {}, [(2, 4, 6), (6, 8)]),
    ("MatMul", {}, [(2, 4, 6), (2, 6, 8)]),
    ("MatMul", {}, [(2, 1, 4, 6), (4, 6, 8)]),
    ("MatMul", {}, [(4, 6), (2, 6, 8)]),
    *[
        (
            "Gemm",
            {"transA": a, "transB": b, "alpha": 0.5, "beta": 2.0},
            [(6, 4) if a else (4, 6), (8, 6) if b else (6, 8), c],
        )
        for a in (0, 1)
        for b in (0, 1)
        for c in ((8,), (4, 8), (4, 1))
    ],
    ("Gemm", {}, [(4, 6), (6, 8)]),
    ("Transpose", {"perm": [2, 0, 1]}, [(2, 4, 6)]),
    ("Transpose", {}, [(2, 4, 6)]),
    ("ReduceSum", {"keepdims": 1}, [(2, 4, 6)]),
    ("ReduceMean", {"keepdims": 0}, [(2, 4, 6)]),
    ("ReduceMax", {"keepdims": 0}, [(2, 4, 6)]),
]
REDUCED = ([1], [-1], [0, 2], [])


def _cases() -> Iterator[Any]:
    for op, attributes, shapes in CASES:
        for axes in REDUCED if op.startswith("Reduce") else [None]:
            for operand, shape in enumerate(shapes):
                for axis, size in enumerate(shape):
                    if size > 1:
                        name = f"{op}-{'-'.join(map(str, [*attributes.values(), *shapes, axes]))}-{operand}-{axis}"
                        yield pytest.param(op, attributes, shapes, axes, operand, axis, id=name)


def _program(
    op: str, attributes: Any, values: list[np.ndarray], constants: list[np.ndarray], weights: set[int]
) -> onnxplug.OnnxProgram:
    """A node that reads weights (``w0``) directly, or after an operator, so that its inputs may get another layout."""
    nodes, operands, initializers = [], [], []
    for index, array in enumerate(values):
        weight = ir.Value(name=f"w{index}", const_value=ir.tensor(array, name=f"w{index}"))
        weight.shape, weight.type = ir.Shape(array.shape), ir.TensorType(ir.DataType.from_numpy(array.dtype))
        weight.meta[META] = Origin((f"w{index}",), lambda t: t, torch.float32, torch.Size(array.shape))
        initializers.append(weight)
        if index not in weights:
            after = ir.Value(name=f"a{index}", shape=weight.shape, type=weight.type)
            nodes.append(ir.Node("", "Neg", [weight], outputs=[after], name=f"before{index}"))
            weight = after
        operands.append(weight)
    for index, array in enumerate(constants):
        operands.append(
            ir.Value(name=f"c{index}", const_value=ir.tensor(array, name=f"c{index}"), shape=ir.Shape(array.shape))
        )
        initializers.append(operands[-1])
    output = ir.Value(name="y", type=ir.TensorType(ir.DataType.FLOAT))
    nodes.append(ir.node(op, operands, attributes, outputs=[output], name="node"))
    graph = ir.Graph([], [output], nodes=nodes, initializers=initializers, opset_imports={"": 20}, name="graph")
    model = ir.Model(graph, ir_version=9)
    inferred = ShapeInferencePass()(model).model
    for value, old in zip(inferred.graph.initializers.values(), initializers, strict=True):
        value.meta.update(old.meta)
    return onnxplug.OnnxProgram(inferred, None)


def _proved(program: onnxplug.OnnxProgram, plan: Any, mesh: tuple[int, ...], folder: Path) -> Any:
    shardings = shard(program, plan, mesh=mesh)
    ir.save(program.model, folder / "model.onnx")
    assert read_shardings(folder / "model.onnx") == shardings
    assert shardings.undefined == ()
    assert "node" in shardings.nodes
    assert prove(folder / "model.onnx", {}, mesh).total() == len(shardings.nodes)
    return shardings


@pytest.mark.parametrize(("op", "attributes", "shapes", "axes", "operand", "axis"), _cases())
def test_every_split(
    op: str, attributes: Any, shapes: list[Any], axes: Any, operand: int, axis: int, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    constants = [np.array(axes, dtype=np.int64)] if axes is not None else []
    for weights in ({operand}, set()):
        program = _program(op, attributes, values, constants, weights)
        _proved(program, {f"w{operand}": [Split(axis)]}, (2,), tmp_path)
    if shapes[operand][axis] % 4 == 0:
        program = _program(op, attributes, values, constants, {operand})
        _proved(program, {f"w{operand}": [Split(axis, 2)]}, (2,), tmp_path)
        program = _program(op, attributes, values, constants, {operand})
        _proved(program, {f"w{operand}": [Split(axis), Split(axis)]}, (2, 2), tmp_path)
    for other, size in enumerate(shapes[operand]):
        if size > 1 and other != axis:
            program = _program(op, attributes, values, constants, {operand})
            _proved(program, {f"w{operand}": [Split(axis), Split(other)]}, (2, 2), tmp_path)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("split", [0, 1, 2])
def test_lookups(axis: int, split: int, tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((4, 6, 2), dtype=np.float32)
    rows = table.shape[axis]
    indices = np.array([[0, 1, rows - 1], [-1, -rows, 0]], dtype=np.int64)
    program = _program("Gather", {"axis": axis}, [table], [indices], {0})
    shardings = _proved(program, {"w0": [Split(split)]}, (2,), tmp_path)
    assert (shardings.nodes["node"]["y"][0].is_shard()) == (split != axis % 3)


def test_two_operands_split_differently(tmp_path: Path) -> None:
    """The second operand takes the first's layout, or a weight's; with two weights the node is left to the runtime."""
    values = [np.ones((4, 6), dtype=np.float32), np.ones((4, 6), dtype=np.float32)]
    shardings = _proved(_program("Add", {}, values, [], set()), {"w0": [Split(0)], "w1": [Split(1)]}, (2,), tmp_path)
    assert shardings.nodes["node"]["a1"] == shardings.nodes["node"]["a0"]
    shardings = _proved(_program("Add", {}, values, [], {1}), {"w0": [Split(0)], "w1": [Split(1)]}, (2,), tmp_path)
    assert shardings.nodes["node"]["a0"] == shardings.nodes["node"]["w1"]
    left = shard(_program("Add", {}, values, [], {0, 1}), {"w0": [Split(0)], "w1": [Split(1)]}, mesh=2)
    assert left.undefined == ("node",)
    assert "y" not in left.nodes["node"]


def test_every_operator_has_a_case() -> None:
    """Every rule has a case: elementwise operators share a rule, and so do reductions."""
    tested = {RULES[op] for op, *_ in CASES} | {RULES["Gather"]}
    assert set(RULES.values()) == tested
