"""The operators of torch_scatter and pyg_lib: as functions, in models that call them, and in captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug.errors import OnnxplugError
from tests.support.check import check
from tests.support.contrib import plugged
from tests.support.scatter_kernels import define_scatter_kernels, scatter_kernels

REGISTRY = plugged("onnxplug-torch-geometric")
REDUCTIONS = ("sum", "mean", "min", "max")
SCATTERS = [f"scatter_{name}" for name in (*REDUCTIONS, "mul")]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
N = {0: "elements"}


@pytest.fixture(autouse=True)
def _operators(seeded: None) -> None:
    define_scatter_kernels()


def operator(name: str, namespace: str = "torch_scatter") -> Any:
    return getattr(getattr(torch.ops, namespace), name)


def ours(name: str) -> Callable[..., Any]:
    from onnxplug_torch_geometric import capture

    return capture.function_of(f"torch_scatter::{name}")


def values(shape: tuple[int, ...], dtype: torch.dtype, special: bool = False) -> torch.Tensor:
    if special and dtype.is_floating_point:
        some = torch.tensor([0.0, -0.0, 1, 2, float("nan"), float("inf"), float("-inf"), -3, 2])
        return some[torch.randint(0, len(some), shape)].to(dtype)
    return torch.randint(-9, 9, shape).to(dtype)


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_functions(name: str, dtype: torch.dtype) -> None:
    """Axes counted from either end, indices of fewer axes, empty groups, no elements, and a tensor to start from."""
    shapes: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [
        ((6, 3), 0, (6,)),
        ((4, 6), -1, (4, 6)),
        ((2, 5, 3), 1, (5,)),
        ((2, 5, 3), -2, (2, 5)),
        ((2, 5, 3), 1, (2, 5, 1)),
        ((1,), 0, (1,)),
        ((0, 3), 0, (0,)),
    ]
    for shape, dim, index_shape in shapes:
        for special in (False, True):
            x, index = values(shape, dtype, special), torch.randint(0, 5, index_shape)
            for size in (None, 8):
                same(ours(name)(x, index, dim, None, size), operator(name)(x, index, dim, None, size))
            start = values((*shape[:dim], 8, *shape[dim:][1:]), dtype)
            outs = start.clone(), start.clone()
            same(ours(name)(x, index, dim, outs[0]), operator(name)(x, index, dim, outs[1], None))
            if name != "scatter_mean":
                same(*outs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [f"segment_{name}_{form}" for name in REDUCTIONS for form in ("coo", "csr")])
def test_segment_functions(name: str, dtype: torch.dtype) -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((6, 3), (6,)),
        ((4, 6, 2), (4, 6)),
        ((4, 6, 2), (1, 6)),
        ((1,), (1,)),
        ((0, 2), (0,)),
        ((5, 0), (5,)),
    ]
    for shape, index_shape in shapes:
        for special in (False, True):
            x = values(shape, dtype, special)
            if name.endswith("coo"):
                index = torch.randint(0, 5, index_shape).sort(-1)[0]
                calls: list[tuple[Any, ...]] = [(x, index, None, None), (x, index, None, 7)]
            else:
                ends = torch.randint(0, index_shape[-1] + 1, (*index_shape[:-1], 7))
                calls = [(x, ends.sort(-1)[0], None)]
            for args in calls:
                got, expected = ours(name)(*args), operator(name)(*args)
                if special and isinstance(expected, tuple):
                    # Where no element of a segment counts, torch_scatter's position is left over from another segment.
                    got, expected = got[0], expected[0]
                same(got, expected)


def test_a_group_of_nan_and_minus_infinity() -> None:
    """torch_scatter starts at the least finite number: NaN and -inf are no better, and their group counts as empty."""
    x, index = torch.tensor([float("nan"), float("-inf"), 1.0]), torch.tensor([0, 0, 2])
    for function in (operator("scatter_max"), ours("scatter_max")):
        best, where = function(x, index, 0, None, 3)
        assert best.tolist() == [0, 0, 1]
        assert where.tolist() == [3, 3, 2]


@pytest.mark.parametrize("opset", [13, 16, 21])
@pytest.mark.parametrize("name", SCATTERS)
def test_scatter_in_a_model(name: str, opset: int) -> None:
    """The operator is called by torch's namespace, as torch_scatter calls it: a dynamic size stays dynamic."""

    def model(x: torch.Tensor, index: torch.Tensor) -> Any:
        return getattr(torch.ops.torch_scatter, name)(x, index, 0, None, x.size(0) + 1)

    def made(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return values((n, 3), torch.float32, special=n > 4), torch.randint(0, n + 1, (n,))

    check(model, *made(4), dynamic=(N, N), others=[made(9), made(1), made(0)], opset=opset, registry=REGISTRY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("name", SCATTERS)
def test_size_that_values_decide(name: str, dtype: torch.dtype) -> None:
    def model(x: torch.Tensor, index: torch.Tensor) -> Any:
        return getattr(torch.ops.torch_scatter, name)(x, index, 1, None, None)

    def made(n: int, top: int) -> tuple[torch.Tensor, torch.Tensor]:
        return values((2, n), dtype), torch.randint(0, top, (n,))

    shapes = ({1: "n"}, {0: "n"})
    check(model, *made(4, 3), dynamic=shapes, others=[made(9, 20), made(1, 1), made(0, 1)], registry=REGISTRY)


@pytest.mark.parametrize("name", ["scatter_sum", "scatter_mul", "scatter_max", "segment_sum_coo"])
def test_the_tensor_that_it_starts_from_is_written(name: str) -> None:
    """The operators' schemas hide the write."""

    def model(x: torch.Tensor, index: torch.Tensor, start: torch.Tensor) -> Any:
        out = start * 2
        rest = (0, out, None) if "scatter" in name else (out, None)
        result = getattr(torch.ops.torch_scatter, name)(x, index, *rest)
        return (result if isinstance(result, torch.Tensor) else result[0]) + 0, out + 1

    def made(n: int) -> tuple[torch.Tensor, ...]:
        index = torch.randint(0, 5, (n,)).sort()[0]
        index[:1] = 0
        return values((n, 2), torch.float32), index, values((5, 2), torch.float32)

    check(model, *made(4), dynamic=(N, N, None), others=[made(9), made(1)], registry=REGISTRY)


def test_one_that_stands_in_the_graph_with_a_tensor_to_write_is_refused() -> None:
    held = operator("scatter_max").default
    index, out = torch.tensor([0, 1, 1]), torch.zeros(2)
    with pytest.raises(OnnxplugError, match="torch_scatter::scatter_max with out="):
        onnxplug.to_onnx(lambda x: held(x, index, 0, out, None)[0], (torch.ones(3),), registry=REGISTRY)


@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_segments_in_a_model(name: str, form: str) -> None:
    def model(x: torch.Tensor, index: torch.Tensor) -> Any:
        rest = (None, None) if form == "coo" else (None,)
        return getattr(torch.ops.torch_scatter, f"segment_{name}_{form}")(x, index, *rest)

    def made(n: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        if form == "coo":
            return values((n, 3), torch.float32), torch.randint(0, groups, (n,)).sort()[0]
        return values((n, 3), torch.float32), torch.randint(0, n + 1, (groups + 1,)).sort()[0]

    shapes = (N, N) if form == "coo" else (N, {0: "pointers"})
    for opset in (13, 21):
        others = [made(9, 7), made(1, 1), made(0, 2)]
        check(model, *made(5, 3), dynamic=shapes, others=others, opset=opset, registry=REGISTRY)


def test_gathering_in_a_model() -> None:
    def model(x: torch.Tensor, index: torch.Tensor, pointers: torch.Tensor) -> Any:
        scatter = torch.ops.torch_scatter
        return scatter.gather_coo(x, index, None), scatter.gather_csr(x, pointers, None)

    def made(rows: int, n: int) -> tuple[torch.Tensor, ...]:
        ends = torch.cat([torch.zeros(1), torch.randint(0, 3, (rows,)).cumsum(0)]).long()
        return values((rows, 2), torch.float32), torch.randint(0, rows, (n,)).sort()[0], ends

    rows = torch.export.Dim("rows")
    shapes = ({0: rows}, {0: "n"}, {0: rows + 1})
    check(model, *made(4, 6), dynamic=shapes, others=[made(7, 3), made(1, 1)], registry=REGISTRY)


@pytest.mark.parametrize("opset", [13, 18, 23])
def test_of_pyg_lib(opset: int) -> None:
    def model(x: torch.Tensor, ptr: torch.Tensor, weight: torch.Tensor, index: torch.Tensor) -> Any:
        pyg = torch.ops.pyg
        product = pyg.segment_matmul(x, ptr, weight)
        sums = pyg.sampled_op(x, product[:, :3], None, index, "add")
        return product, pyg.grouped_matmul([x, sums], [weight[0], weight[1]]), pyg.softmax_csr(x, ptr, 0)

    def made(n: int) -> tuple[torch.Tensor, ...]:
        inner = torch.randint(0, n + 1, (2,)).sort()[0]
        ptr = torch.cat([torch.tensor([0]), inner, torch.tensor([n])])
        return torch.randn(n, 3), ptr, torch.randn(3, 3, 4), torch.randint(0, n, (n,))

    others = [made(9), made(1)]
    check(model, *made(5), dynamic=(N, None, None, N), others=others, opset=opset, registry=REGISTRY)


def test_sorting_by_a_bound_that_is_dynamic() -> None:
    def model(index: torch.Tensor) -> Any:
        return torch.ops.pyg.index_sort(index, index.size(0))

    made = [(torch.randint(0, n, (n,)),) for n in (5, 9, 1)]
    check(model, *made[0], dynamic=(N,), others=made[1:], registry=REGISTRY)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_products_in_other_dtypes(dtype: torch.dtype) -> None:
    x, weight = values((5, 3), dtype), values((2, 3, 4), dtype)
    ptr = torch.tensor([0, 2, 5])
    check(torch.ops.pyg.segment_matmul, x, ptr, weight, registry=REGISTRY)


def test_everything_is_put_back() -> None:
    before = {name: vars(torch.ops.torch_scatter).get(name) for name in SCATTERS}
    kernels = [dict(operator(name).default.py_kernels) for name in SCATTERS]
    index = torch.tensor([0, 1, 1])
    onnxplug.to_onnx(
        lambda x: torch.ops.torch_scatter.scatter_sum(x, index, 0, None, 2), (torch.ones(3),), registry=REGISTRY
    )
    assert {name: vars(torch.ops.torch_scatter).get(name) for name in SCATTERS} == before
    assert [dict(operator(name).default.py_kernels) for name in SCATTERS] == kernels


def test_the_installed_package_is_the_reference() -> None:
    pytest.importorskip("torch_scatter")
    assert not scatter_kernels().define()
