"""Sums and products to bool and to integers of few bits, and variances with a dynamic correction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.check import check
from tests.support.releases import not_with

DYNAMIC = torch.export.Dim.DYNAMIC
NARROW = [torch.uint8, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sums_wrap(dtype: torch.dtype, opset: int) -> None:
    """ONNX Runtime's own sums of these types saturate."""
    large = torch.tensor([[2**30 + 1] * 9, [2**31 - 1] * 9, [-(2**31)] * 9])

    def model(x: torch.Tensor) -> Any:
        some = x.sum(dtype=dtype), x.sum(1, dtype=dtype), x.sum((0, 1), keepdim=True, dtype=dtype), x.trace()
        return *some, x[0, 0].sum(dtype=dtype)

    for x in (large, large.int(), large.to(torch.int16)):
        check(model, x, others=[(-x,)], opset=opset)
    check(lambda x: x.sum(0, dtype=dtype), torch.tensor([[100.7, -3.5], [27.9, -4.5]]), opset=opset)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_products_wrap(dtype: torch.dtype, opset: int, exact: bool) -> None:
    """Up to 2**53 in the plain form, of any size in the exact one."""
    x = torch.tensor([[65537, 65537, 3], [-1, 7, 301]])
    largest = torch.iinfo(dtype).max
    others = [(torch.full((2, 3), largest),)] if exact or dtype.itemsize == 1 else [(x.flip(1),)]
    model = lambda x: (x.prod(dtype=dtype), x.prod(1, dtype=dtype), x.prod(0, keepdim=True, dtype=dtype))  # noqa: E731
    for of in (x, x.int()):
        check(model, of, others=[(o.to(of.dtype),) for (o,) in others], opset=opset, exact=exact)


def test_form_of_narrow_sums() -> None:
    """A Cast on each side, no more."""
    x = torch.ones(3, 4, dtype=torch.int32)
    program = check(lambda x: x.sum(1, dtype=torch.int32), x)
    assert [node.op_type for node in program.model.graph] == ["Cast", "ReduceSum", "Cast"]
    program = check(lambda x: x.prod(1, dtype=torch.int32), x)
    assert [node.op_type for node in program.model.graph] == ["Cast", "ReduceProd", "Cast"]


TRUTHS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: (torch.sum(x, dtype=torch.bool), x.sum(1, dtype=torch.bool), x.sum(0, True, dtype=torch.bool)),
    "prod": lambda x: (torch.prod(x, dtype=torch.bool), x.prod(1, dtype=torch.bool), x.prod(0, True, dtype=torch.bool)),
    "nansum": lambda x: (torch.nansum(x, dtype=torch.bool), x.nansum(1, dtype=torch.bool)),
}


@pytest.mark.parametrize(("opset", "target"), [(13, "onnxruntime"), (21, "onnxruntime"), (21, None)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", TRUTHS)
def test_truth_values(name: str, dtype: torch.dtype, opset: int, target: str | None, request: Any) -> None:
    """Each element becomes a bool before it is counted."""
    if name == "nansum" and dtype.is_floating_point:
        request.applymarker(not_with("2.9", "has no nansum of floats as bools"))
    x = torch.tensor([[0.25, 0.5, 0.0], [1, -1, 0], [0, 0, 0], [float("nan")] * 3])
    x = x if dtype.is_floating_point else torch.tensor([[256, 0, 1], [1, -1, 0], [0, 0, 0], [128, 128, 4]])
    x = x.to(dtype)
    others = [(x[:1, :2],), (x[1:3],), (x[:0],), (x[3:],)]
    check(TRUTHS[name], x, others=others, dynamic=({0: DYNAMIC, 1: DYNAMIC},), opset=opset, target=target)


SPREADS: dict[str, Callable[[torch.Tensor], Any]] = {
    "var": lambda x: x.var(0, correction=x.shape[0] - 1),
    "std": lambda x: x.std(0, correction=x.shape[0] - 2, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 0, correction=x.shape[0] // 2),
    "std_mean": lambda x: torch.std_mean(x, correction=x.shape[0] / 2),
    "complex": lambda x: torch.view_as_complex(x.reshape(-1, 2, 2)).var(0, correction=x.shape[0] - 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", SPREADS)
def test_dynamic_correction(name: str, dtype: torch.dtype) -> None:
    x = torch.arange(20.0).reshape(5, 4).square().remainder(7).to(dtype)
    if name == "complex" and dtype == torch.float16:
        pytest.skip("torch has no variance of complex halves")
    check(SPREADS[name], x, others=[(x[:3],), (x.flip(0)[:4],)], dynamic=({0: DYNAMIC},))
