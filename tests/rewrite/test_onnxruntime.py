"""Forms that ONNX Runtime's optimisations get wrong: wrong for portable ONNX, right for the target onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

import onnxplug
from tests.chains.run import session
from tests.support.check import Call, check
from tests.support.tolerances import looser

torch.manual_seed(0)
IMAGE = -torch.rand(2, 3, 9, 9) - 0.5
HEADS = torch.randn(2, 2, 5, 4)


def scaled_attention(x: torch.Tensor) -> torch.Tensor:
    s = x * -1.5
    return F.scaled_dot_product_attention(s, s, s)


def divided_attention(x: torch.Tensor) -> torch.Tensor:
    s = x / 3.0
    return torch.softmax((s / 2.0) @ s.transpose(-1, -2), -1) @ s


def three_scales(x: torch.Tensor) -> torch.Tensor:
    a = x * -1.5
    b = a * 0.7
    c = b * 0.3
    return c @ x.mT @ b + a @ x.mT @ a


def quantised(x: torch.Tensor) -> torch.Tensor:
    return torch.fake_quantize_per_tensor_affine(x, 0.02, 3, -128, 127)


#: Functions that ONNX Runtime gets wrong in the plain form.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "pad, max pool": (lambda x: F.max_pool2d(F.pad(x, [1, 1, 1, 1]), 3, 2), IMAGE),
    "pad, max pool, of one axis": (lambda x: F.max_pool1d(F.pad(x, [1, 0]), 2), IMAGE[0]),
    "pad as wide as the kernel": (lambda x: F.max_pool2d(F.pad(x, [2, 2, 2, 2]), 3, 1, 1), IMAGE),
    "two pads, average": (lambda x: F.avg_pool2d(F.pad(F.pad(x, [1, 2]), [1, 1, 1, 1]), 3), IMAGE),
    "average, pad as wide as the kernel": (lambda x: F.avg_pool2d(F.pad(x, [2, 2, 2, 2]), 2), IMAGE),
    "average, pads that add up": (lambda x: F.avg_pool2d(F.pad(x, [2, 2, 2, 2]), 3, 1, 1), IMAGE),
    "scaled attention": (scaled_attention, HEADS),
    "divided attention": (divided_attention, HEADS),
    "three scales": (three_scales, HEADS),
    "int8, transposed": (lambda x: quantised(x).transpose(1, 2).sin(), HEADS),
    "int8, sliced": (lambda x: quantised(x)[..., 1:].sin(), HEADS),
    "int8, max pool": (lambda x: F.max_pool2d(quantised(x), 2).sin(), IMAGE),
    "relu, clip of doubles": (lambda x: x.relu().clamp(0, 6), HEADS.double() * 5),
    "relu, clip above 0": (lambda x: x.relu().clamp(1, 2), HEADS.double() * 5),
    "relu, clip from below 0 to below 0": (lambda x: x.relu().clamp(-3, -1), HEADS.double() * 5),
    "relu, clip of int8": (lambda x: x.relu().clamp(1, 6), (HEADS * 20).to(torch.int8)),
    "relu, clip of int32": (lambda x: x.relu().clamp(min=2), (HEADS * 20).to(torch.int32)),
    "quantised twice": (
        lambda x: torch.fake_quantize_per_tensor_affine(
            torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127), 0.05, 3, -128, 127
        ).sin(),
        HEADS,
    ),
}

#: These functions and their neighbours, which must be right with the rewrites.
CASES: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    **WRONG,
    "relu read twice": (lambda x: [(r := x.relu()).clamp(0, 6), r + 1], HEADS.double() * 5),
    "relu, clip of floats": (lambda x: x.relu().clamp(1, 6), HEADS * 5),
    "relu, clip to infinity, of doubles with NaN": (
        lambda x: x.relu().clamp(0.5, float("inf")),
        torch.tensor([[float("nan"), -float("inf"), float("inf"), -0.0]] * 2, dtype=torch.float64),
    ),
    "pad read twice": (lambda x: [F.max_pool2d(p := F.pad(x, [1, 1, 1, 1]), 3), F.avg_pool2d(p, 3)], IMAGE),
    "int8 per channel, transposed": (
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.tensor([0.02, 0.01]), torch.tensor([0, 3], dtype=torch.int32), 1, -128, 127
        ).mT.sin(),
        HEADS,
    ),
}


SQUARE, VECTOR = torch.randn(2, 4, 4), torch.randn(4)
#: Products of a transposed matrix and a vector.
TRANSPOSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda x: x.mT @ VECTOR,
    "mv": lambda x: torch.mv(x[0].t(), VECTOR),
    "addmv": lambda x: torch.addmv(VECTOR, x[0].t(), VECTOR),
    "linear": lambda x: F.linear(x.mT, VECTOR),
    "inner": lambda x: torch.inner(x.mT, VECTOR),
    "scaled": lambda x: (x.mT * 0.3) @ VECTOR,
    "scaled before": lambda x: (x * 0.3).mT @ VECTOR,
    "scaled after": lambda x: (x.mT @ VECTOR) * 0.3,
    "joined": lambda x: torch.cat([x.mT, x.mT], 1) @ VECTOR,
    "squared": lambda x: (x.mT * x.mT) @ VECTOR,
    "double": lambda x: x.double().mT @ VECTOR.double(),
    "computed vector": lambda x: x.mT @ x[0, 0].sin(),
}
#: These products and their neighbours, which must be right with the rewrites.
BESIDE_TRANSPOSED: dict[str, Callable[[torch.Tensor], Any]] = {
    **TRANSPOSED,
    "relu": lambda x: x.mT.relu() @ VECTOR,
    "sliced": lambda x: x.mT[:, 1:] @ VECTOR,
    "batch and rows": lambda x: x.permute(1, 2, 0) @ x[:, 0, 0],
    "vector first": lambda x: VECTOR @ x.mT,
    "einsum": lambda x: torch.einsum("bij,i->bj", x, VECTOR),
    "tensordot": lambda x: torch.tensordot(x[0], VECTOR, ([0], [0])),
    "of a product": lambda x: (x.mT @ x) @ VECTOR,
    "half": lambda x: (x.half().mT @ VECTOR.half()).float(),
}


@pytest.mark.parametrize("name", BESIDE_TRANSPOSED)
def test_a_transposed_matrix_and_a_vector(name: str) -> None:
    others = [(x,) for x in (SQUARE[:1] * 2, torch.randn(3, 4, 4))]
    axes: Any = ({0: torch.export.Dim.DYNAMIC},)
    check(BESIDE_TRANSPOSED[name], SQUARE, others=others, dynamic=axes, **(looser("half") if name == "half" else {}))


@pytest.mark.parametrize("name", TRANSPOSED)
def test_the_plain_product_with_a_vector_is_still_wrong(name: str) -> None:
    """When this fails ONNX Runtime has mended the fault: the rewrite can go."""
    model = onnxplug.to_onnx(Call(TRANSPOSED[name]), (SQUARE,), target=None).model_proto.SerializeToString()
    (plain,), (optimised,) = (outcome(model, SQUARE, on) for on in (False, True))
    assert not np.allclose(plain, optimised, atol=1e-5)


def test_a_transposed_matrix_and_a_vector_are_one_product(expect_graph: Any) -> None:
    expect_graph(check(lambda x: x.mT @ x[0, 0], SQUARE, others=[(SQUARE * 2,)]), "Gather Gather MatMul")
    expect_graph(check(lambda x: x @ x[0, 0], SQUARE, others=[(SQUARE * 2,)]), "Gather Gather MatMul")


#: Products of doubles whose factor ONNX Runtime rounds to a float.
DOUBLES: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.1),
    "before": lambda x: (x * 0.1) @ x.mT,
    "transposed": lambda x: x @ (0.1 * x).mT,
    "quotient before": lambda x: (x / 3.3) @ x.mT,
    "after": lambda x: (x @ x.mT) * 0.1,
    "quotient after": lambda x: (x @ x.mT) / 3.3,
    "two factors": lambda x: ((x * 0.1) * 0.7) @ x.mT,
}


@pytest.mark.parametrize("name", DOUBLES)
def test_doubles_are_scaled_by_doubles(name: str) -> None:
    x = HEADS.double()
    check(DOUBLES[name], x, others=[(x[:1] * 2,)], dynamic=({0: torch.export.Dim.DYNAMIC},), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in DOUBLES if name != "attention"])
def test_factors_of_doubles_are_still_rounded_in_the_plain_form(name: str) -> None:
    """When this fails ONNX Runtime has mended the fault: the rewrite can go."""
    x = HEADS.double()
    model = onnxplug.to_onnx(Call(DOUBLES[name]), (x,), target=None).model_proto.SerializeToString()
    (plain,), (optimised,) = (outcome(model, x, on) for on in (False, True))
    assert not np.allclose(plain, optimised, rtol=1e-14, atol=1e-14)


def test_factors_that_a_float_holds_stay_numbers(expect_graph: Any) -> None:
    program = check(lambda x: (x * 0.25) @ x.mT, HEADS.double(), others=[(HEADS.double() * 2,)])
    expect_graph(program, "Mul Transpose MatMul")
    assert [list(value.shape) for value in program.model.graph.initializers.values()] == [[]]


def outcome(model: bytes, x: torch.Tensor, optimised: bool) -> Any:
    """ONNX Runtime's results, or the text of its error."""
    try:
        ort = session(model, optimised)
        return ort.run(None, {ort.get_inputs()[0].name: x.numpy()})
    except Exception as error:
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_right_with_optimisations(name: str) -> None:
    function, x = CASES[name]
    check(function, x, others=[(x[:1] * 2,)], dynamic=({0: torch.export.Dim.DYNAMIC},))


#: The release that mended a fault: the rewrite can go when pyproject.toml admits no other.
MENDED = {"two pads, average": (1, 32)}


@pytest.mark.parametrize("name", WRONG)
def test_the_plain_form_is_still_wrong(name: str) -> None:
    """When this fails ONNX Runtime has mended the fault: it belongs into MENDED."""
    if tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= MENDED.get(name, (99,)):
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} has mended it")
    function, x = WRONG[name]
    model = onnxplug.to_onnx(Call(function), (x,), target=None).model_proto.SerializeToString()
    plain, optimised = (outcome(model, x, on) for on in (False, True))
    assert not isinstance(plain, str), plain
    if not isinstance(optimised, str):
        assert not all(np.allclose(a, b, atol=1e-5) for a, b in zip(plain, optimised, strict=True))


OF_EVERY_OPSET = ["pad, max pool", "scaled attention", "int8, transposed", "quantised twice", "relu, clip of doubles"]


@pytest.mark.parametrize("opset", [13, 19, 21, 23])
@pytest.mark.parametrize("name", OF_EVERY_OPSET)
def test_opsets(name: str, opset: int) -> None:
    function, x = CASES[name]
    check(function, x, opset=opset)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_inputs_of_a_pool(value: float) -> None:
    x = IMAGE.clone()
    x[0, 0, 0, 0] = value
    check(CASES["pad, max pool"][0], x)


def test_a_computed_minimum_stays_apart_from_relu() -> None:
    """A computed minimum is a Max, which ONNX Runtime leaves alone: the exporter makes a Clip of constants only."""
    x = HEADS.double() * 5
    program = check(lambda x: x.relu().clamp(x.amin(), x.amax() / 2), x, others=[(x.abs() + 1,), (-x.abs(),)])
    assert "Clip" not in [node.op_type for node in program.model.graph]


@pytest.mark.parametrize("low", [-128, 0])
def test_values_outside_a_quantised_range(low: int) -> None:
    x = torch.tensor([[-1e9, -2.57, -2.5, 0.0, 0.01, 0.03, 2.53, 2.55, 1e9]])
    check(lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, low + 128, low, low + 255).mT.neg(), x)


#: Gathered by ranges that end or begin below 0.
RANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last to first": lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)],
    "every other, backwards": lambda x: x[:, torch.arange(x.shape[1] - 1, -1, -2)],
    "by numbers": lambda x: x.index_select(0, torch.arange(x.shape[0] - 1.0, -1.0, -1.0, dtype=torch.int64)),
    "from the end on": lambda x: x[torch.arange(-2, x.shape[0] - 2)],
}


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("name", RANGES)
def test_gather_by_a_range(name: str, opset: int) -> None:
    x, both = torch.randn(5, 6, 2), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    check(RANGES[name], x, others=[(torch.randn(n, n + 1, 2),) for n in (2, 9)], dynamic=(both,), opset=opset)
    program = onnxplug.to_onnx(Call(RANGES[name]), (x,), dynamic_shapes=((both,),), target=None)
    (places,) = [node.inputs[1] for node in program.model.graph if node.op_type == "Gather"]
    if places.producer().op_type != "Range":  # torch 2.15 computes the numbers of "by numbers" in floats
        assert name == "by numbers"
        return
    off, on = (outcome(program.model_proto.SerializeToString(), x, on) for on in (False, True))
    assert isinstance(on, str) or on[0].shape != off[0].shape or not np.allclose(off[0], on[0])


def test_gather_by_a_range_upwards_is_plain() -> None:
    """For ranges upwards ONNX Runtime's Slice is right, and faster."""
    for function in (lambda x: x[torch.arange(x.shape[0])], lambda x: x[:, torch.arange(1, x.shape[1], 2)]):
        both = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        program = check(function, torch.randn(5, 6), others=[(torch.randn(2, 3),)], dynamic=(both,))
        operators = [node.op_type for node in program.model.graph]
        assert "Range" in operators
        assert "Neg" not in operators


PLACES = torch.tensor([0, 2, 0, -1, 2, 0])
ADDED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_add": lambda x, v: x.index_add(0, PLACES.remainder(3), v),
    "index_put, one index": lambda x, v: x.index_put((PLACES,), v, accumulate=True),
    "index_put, two indices": lambda x, v: x.index_put((PLACES, PLACES.flip(0)), v[:, 0], accumulate=True),
    "index_put, every axis": lambda x, v: x.index_put((PLACES, PLACES.flip(0), PLACES), v[:, 0, 0], accumulate=True),
}


@pytest.mark.parametrize("opset", [16, 21])
@pytest.mark.parametrize("name", ADDED)
def test_accumulating(name: str, opset: int) -> None:
    x, v = torch.randn(3, 4, 5), torch.randn(6, 4, 5)
    dynamic = ({1: torch.export.Dim("n")}, {1: torch.export.Dim("n")}) if name == "index_add" else None
    other = [(torch.randn(3, 7, 5), torch.randn(6, 7, 5))] if dynamic else [(x * 2, v * -1)]
    program = check(ADDED[name], x, v, others=other, dynamic=dynamic, opset=opset)
    assert "ScatterND" not in [node.op_type for node in program.model.graph]


def test_accumulating_rows_takes_few_nodes() -> None:
    """Rows are added as a layer of a graph network sums over edges."""

    def add(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).index_add(0, index, x[index]) / x[:, 0].index_add(0, index, x[index, 1]).unsqueeze(1)

    edges = [torch.tensor(places) for places in ([0, 2, 1, 2, 2], [], [0])]
    x = torch.rand(3, 4) + 1
    dynamic = ({0: torch.export.Dim("nodes")}, {0: torch.export.Dim("edges")})
    others = [(torch.rand(n, 4) + 1, index.long()) for n, index in zip((5, 1), edges[1:], strict=True)]
    program = check(add, x, edges[0], others=others, dynamic=dynamic)
    operators = [node.op_type for node in program.model.graph]
    assert operators.count("ScatterElements") == 2
    assert operators.count("Shape") <= 2
    assert not {"ScatterND", "ReduceProd", "Less", "Slice", "Squeeze"} & {*operators}


def test_nothing_is_lost_between_threads() -> None:
    """Runs of 200,000 rows added to 5 places; ScatterND in four threads loses rows in one run of five."""
    index = torch.arange(200_000).remainder(5)
    program = onnxplug.to_onnx(Call(lambda x, v: x.index_add(0, index, v)), (torch.zeros(5, 2), torch.ones(200_000, 2)))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    ort = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    feeds = {"args_0": np.zeros((5, 2), np.float32), "args_1": np.ones((200_000, 2), np.float32)}
    for _ in range(20):
        assert (ort.run(None, feeds)[0] == 40_000).all()


def test_nodes_that_are_left_alone() -> None:
    """A Pad before another operator than a pool stays; a MaxPool pads with −∞ itself."""
    program = onnxplug.to_onnx(Call(lambda x: F.pad(x, [1, 1, 1, 1]).relu()), (IMAGE,))
    assert [n.op_type for n in program.model.graph] == ["Pad", "Relu"]
    program = onnxplug.to_onnx(Call(lambda x: F.max_pool2d(x, 3, padding=1)), (IMAGE,))
    assert [n.op_type for n in program.model.graph] == ["MaxPool"]
    program = onnxplug.to_onnx(Call(lambda x: (x * 2.0) @ x.mT), (HEADS,))
    assert [n.op_type for n in program.model.graph] == ["Mul", "Transpose", "MatMul"]


def test_factors_whose_product_a_type_lacks() -> None:
    """Each factor is a number of float16, their product is infinite, or too small to be exact."""
    x, weight = torch.full((2, 4), 0.01).half(), torch.full((4, 4), 0.01).half()

    def scaled(factor: float) -> Any:
        return lambda x, weight: [((y := x * factor) * factor) @ weight, y]

    check(scaled(300.0), x, weight, others=[(x * 0, weight), (-x, weight)])
    check(scaled(1e-4), x * 0 + 1e4, weight * 1e4)
    check(scaled(1 / 2000), x * 0 + 1e4, weight * 1e5)


def test_doubles_of_any_size_are_scaled_by_doubles() -> None:
    """A vector of the factor has the size of a dynamic axis."""
    a, b = HEADS.double()[0, 0], HEADS.double()[0, 0].mT.contiguous()
    every = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    others = [(a[:2], b[:, :1]), (a[:1], b[:, :1])]
    for function in (
        lambda a, b: (a @ b) * 0.1,
        lambda a, b: (a / 3) @ b,
        lambda a, b: (a @ b) * 1e300,
        lambda a, b: (a @ b) * float("nan"),
    ):
        check(function, a, b, others=others, dynamic=(every, every), rtol=1e-12, atol=0)


@pytest.mark.parametrize("opset", [14, 21])
def test_accumulating_without_elements(opset: int) -> None:
    """A computed size of 0 is no size of the operand."""

    def model(x: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return x.index_put((rows, columns), values, accumulate=True)

    dim = torch.export.Dim.DYNAMIC
    places, none = torch.tensor([0, 1]), torch.zeros(0, dtype=torch.int64)
    check(
        model,
        *(torch.randn(2, 3, 4), places, places, torch.randn(2, 4)),
        others=[
            (torch.randn(2, 3, 0), places, places, torch.randn(2, 0)),
            (torch.randn(2, 0, 4), none, none, torch.randn(0, 4)),
        ],
        dynamic=({0: dim, 1: dim, 2: dim}, {0: dim}, {0: dim}, {0: dim, 1: dim}),
        opset=opset,
    )
