"""The builder's simplifications and folds change no value: compared with the plain graph, run by ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from onnxplug.build.assemble import assemble
from onnxplug.build.builder import GraphBuilder
from onnxplug.finish.finish import finish
from onnxplug.operators.fold import FOLD

RELAXED = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
INT64_MAX = np.iinfo(np.int64).max


def run(g: GraphBuilder, inputs: list[ir.Value], output: ir.Value, feeds: list[np.ndarray]) -> np.ndarray:
    model = finish(g, *assemble(g, inputs, [("result", output)], {}))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, {v.name: x for v, x in zip(inputs, feeds, strict=True)})[0]


def chain_length(value: ir.Value) -> int:
    """The number of nodes that make a value, each from the first input of the next."""
    node = value.producer()
    return 0 if node is None else 1 + chain_length(node.inputs[0])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    # -0.0 is not 0.0 here; every NaN is the same.
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))
    np.testing.assert_array_equal(actual, expected)


# -- simplification at emission ----------------------------------------------------------------------------------------


def reshaped(draw: st.DrawFn, shape: list[int]) -> tuple[list[int], list[int]]:
    """A shape of as many elements, and a target for it: maybe with -1, and 0 where the size is the same."""
    others = [shape, [*shape, 1], [int(np.prod(shape))], [1, *shape], shape[::-1]]
    after = list(draw(st.sampled_from(others)))
    target = list(after)
    if draw(st.booleans()):
        target[draw(st.integers(0, len(target) - 1))] = -1
    for axis, (old, new) in enumerate(zip(shape, target, strict=False)):
        if old == new and draw(st.booleans()):
            target[axis] = 0
    return after, target


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Operators, most of which do nothing or undo each other, that fit an input of shape [2, 1, 3] one after the other."""
    shape, results = [2, 1, 3], []
    for _ in range(draw(st.integers(1, 7))):
        rank = len(shape)
        kind = draw(
            st.sampled_from(
                ["transpose", "reshape", "unsqueeze", "squeeze", "slice", "number", "expand", "undo", "cast"]
            )
        )
        detail: Any = None
        if kind == "transpose":
            detail = draw(st.permutations(range(rank)))
            shape = [shape[a] for a in detail]
        elif kind == "reshape":
            shape, detail = reshaped(draw, shape)
        elif kind == "unsqueeze":
            axis = draw(st.integers(-rank - 1, rank))
            shape.insert(axis % (rank + 1), 1)
            detail = [axis]
        elif kind == "squeeze":
            ones = [a - draw(st.sampled_from([0, rank])) for a, size in enumerate(shape) if size == 1]
            detail = draw(st.lists(st.sampled_from(ones), max_size=len(ones), unique=True)) if ones else []
            detail = list({a % rank: a for a in detail}.values())
            gone = {d % rank for d in detail} if detail else {a for a, size in enumerate(shape) if size == 1}
            shape = [s for a, s in enumerate(shape) if a not in gone]
        elif kind == "slice" and rank:
            axis = draw(st.integers(0, rank - 1))
            start = draw(st.sampled_from([0, 0, 0, 1, -1]))
            end = draw(st.sampled_from([INT64_MAX, shape[axis], 7]))
            detail = (start, end, axis)
            shape[axis] = len(range(shape[axis])[slice(start, end)])
            if shape[axis] == 0:
                break
        elif kind == "number":
            detail = (draw(st.sampled_from(["Mul", "Div", "Add", "Sub"])), draw(st.sampled_from([0.0, -0.0, 1.0, 2.0])))
            if detail[0] == "Div" and detail[1] == 0:
                continue
        elif kind == "expand":
            detail = draw(st.sampled_from([shape, [1] * rank, [1, *shape]]))
            shape = list(np.broadcast_shapes(tuple(shape), tuple(detail)))
        elif kind == "undo":
            detail = draw(st.integers(1, 3))
        elif kind == "cast":
            detail = draw(st.sampled_from([[ir.DataType.FLOAT], [ir.DataType.DOUBLE, ir.DataType.FLOAT]]))
        results.append((kind, detail))
    return results


def apply(g: GraphBuilder, x: ir.Value, kind: str, detail: Any) -> ir.Value:
    match kind:
        case "transpose":
            return g.op.Transpose(x, perm=list(detail))
        case "reshape":
            return g.op.Reshape(x, g.const(np.array(detail, dtype=np.int64)))
        case "unsqueeze":
            return g.op.Unsqueeze(x, detail)
        case "squeeze":
            return g.op.Squeeze(x, g.const(np.array(detail, dtype=np.int64)))
        case "slice":
            start, end, axis = detail
            return g.op.Slice(x, [start], [end], [axis])
        case "number":
            return getattr(g.op, detail[0])(x, g.const(detail[1]))
        case "expand":
            return g.op.Expand(x, g.const(np.array(detail, dtype=np.int64)))
        case "undo":
            for _ in range(detail):
                x = g.op.Neg(x)
            return x
        case _:
            for dtype in detail:
                x = g.op.Cast(x, to=int(dtype))
            return x


@RELAXED
@given(chain=steps(), dynamic=st.booleans())
def test_simplification_changes_no_bit(chain: list[tuple[str, Any]], dynamic: bool) -> None:
    data = np.array([[[0.0, -0.0, np.nan]], [[np.inf, -1.5, 3.0]]], dtype=np.float32)
    results, counts = [], []
    for optimize in (True, False):
        g = GraphBuilder({"": 21}, optimize=optimize)
        dims = [ir.SymbolicDim("n"), 1, 3] if dynamic else [2, 1, 3]
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(dims))
        value = x
        for kind, detail in chain:
            value = apply(g, value, kind, detail)
        results.append(run(g, [x], value, [data]))
        counts.append(chain_length(value))
        if optimize and value.shape is not None:
            for size, actual in zip(value.shape, results[0].shape, strict=True):
                assert not isinstance(size, int) or size == actual
    assert_same_bits(*results)
    assert counts[0] <= counts[1]


@pytest.mark.parametrize(
    ("sizes", "target", "merged"),
    [
        ([-1, 5, 12], [0, 0, 3, 4], True),
        (["b", "s", 12], [0, 0, 3, 4], True),
        (["b", "s", 12], [0, 0, -1, 4], False),
        (["b", "s", 12], [0, 5, 12], True),
        (["b", "s", 12], [2, 0, 12], False),
        (["b", "s", 3, 4], [0, 0, 12], True),
        ([-1, "s", 12], [0, 0, 3, 4], True),
        ([0, 12], [0, 3, 4], True),
    ],
)
def test_two_reshapes_are_one(sizes: list[int | str], target: list[int], merged: bool) -> None:
    """A size that the second reshape copies is a size of the first reshape, also where only the run knows it."""
    results = []
    for optimize in (True, False):
        g = GraphBuilder({"": 21}, optimize=optimize)
        x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([None, 12]))
        names = {name: ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1])) for name in "bs"}
        parts = [names[size] if isinstance(size, str) else g.const([size]) for size in sizes]
        first = g.op.Reshape(x, g.op.Concat(*parts, axis=0))
        first.shape = ir.Shape([None if not isinstance(size, int) or size < 1 else size for size in sizes])
        second = g.op.Reshape(first, g.const(target))
        node = second.producer()
        assert node is not None
        assert (node.inputs[0] is x) == (merged and optimize)
        feed = [np.arange(120, dtype=np.float32).reshape(10, 12), np.array([2]), np.array([5])]
        results.append(run(g, [x, *names.values()], second, feed))
    assert_same_bits(*results)


# -- constant folding --------------------------------------------------------------------------------------------------

SPECIAL = {
    "f": [0.0, -0.0, 1.0, -1.5, 2.5, np.nan, np.inf, -np.inf, 3e38, 1e-40],
    "i": [0, 1, -1, 2, -7, 7, 100],
    "b": [True, False],
}
DTYPES = {"f": [np.float32, np.float64], "i": [np.int32, np.int64], "b": [np.bool_]}
#: Operator to the kinds of its operands, and their number.
ELEMENTWISE = {
    **dict.fromkeys(["Add", "Sub", "Mul", "Div", "Max", "Min", "Equal", "Greater", "Less"], ("fi", 2)),
    **dict.fromkeys(["GreaterOrEqual", "LessOrEqual"], ("fi", 2)),
    **dict.fromkeys(["And", "Or", "Xor"], ("b", 2)),
    **dict.fromkeys(["Abs", "Neg"], ("fi", 1)),
    **dict.fromkeys(["Ceil", "Floor", "Sqrt"], ("f", 1)),
    "Not": ("b", 1),
    "Mod": ("i", 2),
}
SHAPING = {
    "Reshape": lambda g, x: g.op.Reshape(x, g.const([2, -1])),
    "Squeeze": lambda g, x: g.op.Squeeze(g.op.Reshape(x, g.const([1, -1, 1])), [0, -1]),
    "Unsqueeze": lambda g, x: g.op.Unsqueeze(x, [0, -1]),
    "Slice": lambda g, x: g.op.Slice(x, [-5], [INT64_MAX], [0], [2]),
    "Gather": lambda g, x: g.op.Gather(x, [[0, -1], [2, 2]], axis=0),
    "Concat": lambda g, x: g.op.Concat(x, x, axis=0),
    "Transpose": lambda g, x: g.op.Transpose(g.op.Reshape(x, g.const([2, -1])), perm=[1, 0]),
    "Expand": lambda g, x: g.op.Expand(x, g.const([2, 1])),
    "Where": lambda g, x: g.op.Where(g.op.Equal(x, x), x, g.op.Gather(x, [0], axis=0)),
    "ReduceMax": lambda g, x: g.op.ReduceMax(x, [0], keepdims=0),
    "ReduceMin": lambda g, x: g.op.ReduceMin(x),
    "ReduceSum": lambda g, x: g.op.ReduceSum(x, [0]),
    "ReduceProd": lambda g, x: g.op.ReduceProd(x, keepdims=0),
    "Range": lambda g, x: g.op.Range(g.const(-3), g.const(9), g.op.Reshape(g.op.Slice(x, [3], [4]), [])),
    "ConstantOfShape": lambda g, x: g.op.ConstantOfShape(g.op.Slice(x, [3], [5])),
    "Cast": lambda g, x: g.op.Cast(x, to=int(ir.DataType.FLOAT16)),
}


def compare_folded(build: Any, arrays: list[np.ndarray]) -> None:
    """Compares the folded graph of constants with the plain graph, where the arrays are inputs."""
    folded = GraphBuilder({"": 21})
    constant = build(folded, *[folded.const(a) for a in arrays])
    plain = GraphBuilder({"": 21}, optimize=False)
    inputs = [
        ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.from_numpy(a.dtype)), shape=ir.Shape(a.shape))
        for i, a in enumerate(arrays)
    ]
    expected = run(plain, inputs, build(plain, *inputs), arrays)
    known = folded.constant(constant)
    assert_same_bits(known if known is not None else run(folded, [], constant, []), expected)


@RELAXED
@given(data=st.data(), op=st.sampled_from(sorted(ELEMENTWISE)))
def test_folded_elementwise_operators_agree_with_onnx_runtime(data: st.DataObject, op: str) -> None:
    kinds, count = ELEMENTWISE[op]
    kind = data.draw(st.sampled_from(kinds))
    dtype = data.draw(st.sampled_from(DTYPES[kind]))
    size = data.draw(st.sampled_from([0, 1, 4]))
    numbers = st.sampled_from(SPECIAL[kind])
    arrays = [np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype=dtype) for _ in range(count)]
    if kind == "i" and op in ("Div", "Mod"):
        arrays[1] = np.where(arrays[1] == 0, dtype(3), arrays[1])
    if op in ("Max", "Min") and kind == "f":
        # ONNX leaves open which zero comes out.
        arrays = [np.where(a == 0, dtype(1), a) for a in arrays]
    compare_folded(lambda g, *xs: getattr(g.op, op)(*xs), arrays)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
@pytest.mark.parametrize("op", SHAPING)
def test_folded_shape_operators_agree_with_onnx_runtime(op: str, dtype: type) -> None:
    if dtype is not np.int64 and op in ("Range", "ConstantOfShape"):
        pytest.skip("takes int64")
    compare_folded(lambda g, x: SHAPING[op](g, x), [np.array([5, -1, 0, 2, 3, 7], dtype=dtype)])


def test_every_folded_operator_is_held_against_onnx_runtime() -> None:
    assert set(FOLD) == {*ELEMENTWISE, *SHAPING}


# -- sharing and undoing -----------------------------------------------------------------------------------------------


def _input(dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([2]))


def test_equal_pure_nodes_are_shared_and_random_ones_are_not() -> None:
    g = GraphBuilder({"": 21})
    x = _input()
    assert g.op.Exp(x) is g.op.Exp(x)
    assert g.op.LeakyRelu(x, alpha=0.1) is not g.op.LeakyRelu(x, alpha=0.2)
    assert g.op.RandomNormalLike(x) is not g.op.RandomNormalLike(x)
    assert g.const(0.0) is g.const(0.0)
    assert g.const(0.0) is not g.const(-0.0)
    assert g.const(1) is not g.const(True)


def test_rollback_forgets_nodes_and_shared_values() -> None:
    g = GraphBuilder({"": 21})
    x = _input()
    kept = g.op.Exp(x)
    mark = g.mark()
    undone = g.op.Sin(kept)
    g.rollback(mark)
    again = g.op.Sin(kept)
    assert again is not undone
    assert [n.op_type for n in assemble(g, [x], [("y", again)], {})[0]] == ["Exp", "Sin"]


def test_nodes_of_a_subgraph_are_not_shared_outside_it() -> None:
    g = GraphBuilder({"": 21})
    x = _input()
    inner: list[ir.Value] = []

    def branch() -> ir.Value:
        inner.append(g.op.Exp(x))
        return inner[0]

    graph = g.subgraph(branch)
    outside = g.op.Exp(x)
    assert outside is not inner[0]
    assert [n.op_type for n in graph] == ["Exp"]
    # In the other direction, a branch uses a node outside of it.
    assert [n.op_type for n in g.subgraph(lambda: g.op.Neg(g.op.Exp(x)))] == ["Neg"]


def test_values_of_equal_shapes_share_a_frozen_shape() -> None:
    g = GraphBuilder({"": 20})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 4]))
    first, second = g.op.Sin(x), g.op.Cos(x)
    assert first.shape is second.shape is not x.shape
    with pytest.raises(TypeError, match="frozen"):
        first.shape[0] = 3
    assert x.shape is not None
    x.shape[0] = 3
    assert first.shape == ["batch", 4]


def test_unknown_dimensions_are_not_taken_for_equal() -> None:
    g = GraphBuilder({"": 20})
    x, y = (ir.Value(name=n, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["n", 4])) for n in "xy")
    rows = [g.op.Compress(v, ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL)), axis=0) for v in (x, y)]
    assert [v.shape.dims[1] for v in rows] == [4, 4]
    assert rows[0].shape is not rows[1].shape
    assert rows[0].shape.dims[0] is not rows[1].shape.dims[0]


def test_outputs_of_a_graph_have_shapes_of_their_own() -> None:
    g = GraphBuilder({"": 20})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["batch", 4]))
    outputs = [("a", g.op.Sin(x)), ("b", g.op.Cos(x))]
    graph, _ = assemble(g, [x], outputs, {})
    graph.outputs[0].shape[0] = "n"
    assert [v.shape.dims[0].value for v in graph.outputs] == ["n", "batch"]


def test_numbers_of_different_types_are_different_constants_and_attributes() -> None:
    g = GraphBuilder({"": 20})
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 4]))
    constants = [g.const(v) for v in (1, 1.0, True, [1], [1.0], [True], 0.0, -0.0)]
    assert len({id(v) for v in constants}) == len(constants)
    assert [v.dtype for v in constants[3:6]] == [ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.BOOL]
    assert g.const([1]) is constants[3]
    nodes = [g.domain("com.acme").Scale(x, by=by).producer() for by in (1, 1.0, 0.0, -0.0, [1], [1.0])]
    kinds = [node.attributes["by"].type.name for node in nodes]
    assert kinds == ["INT", "FLOAT", "FLOAT", "FLOAT", "INTS", "FLOATS"]
    assert [str(node.attributes["by"].value) for node in nodes[2:4]] == ["0.0", "-0.0"]
    leaky = [g.op.LeakyRelu(x, alpha=alpha) for alpha in (0.0, -0.0, 0.0)]
    assert leaky[0] is leaky[2] is not leaky[1]
