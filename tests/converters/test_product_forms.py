"""Products by a weight in ONNX Runtime's form, with the weights of the export and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.rewrites import patterns
from tests.support.forms import AUTO, Form, check_form, stirred


class Conv1D(nn.Module):
    """GPT-2's linear layer: a product of rows."""

    def __init__(self, width: int, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width, columns)), nn.Parameter(torch.empty(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class Heads(nn.Module):
    """Queries, keys and values by one product, taken apart as timm does."""

    def __init__(self, order: tuple[int, ...], sizes: tuple[int, ...], axis: int, bias: bool = True) -> None:
        super().__init__()
        self.order, self.sizes, self.axis = order, sizes, axis
        self.qkv = nn.Linear(16, 3 * 32, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], *self.sizes).permute(*self.order).unbind(self.axis)
        return (q * 0.5) @ k.mT @ v


class Parts(nn.Module):
    """A product whose last axis is split by ``take``."""

    def __init__(self, take: Callable[[torch.Tensor], Any], layer: type[nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.layer, self.take = layer(16, 96), take

    def forward(self, x: torch.Tensor) -> Any:
        return self.take(self.layer(x))


class Tied(nn.Module):
    """A weight that is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x).chunk(3, -1), self.layer.weight.sum(0)


class Shared(nn.Module):
    """One layer, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            a, b, c = self.layer(torch.cat([x, x], -1)).chunk(3, -1)
            x = (a * b + c)[..., :16]
        return x


class Branches(nn.Module):
    """A product that is split in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def parts(x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.layer(x).chunk(3, -1)
            return a * b + c

        return torch.cond(x.sum() > 0, parts, lambda x: torch.cat([x, x], -1), (x,))


class Product(nn.Module):
    """A product by a parameter, without a layer."""

    def __init__(self, take: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.take = nn.Parameter(torch.empty(16, 96)), take

    def forward(self, x: torch.Tensor) -> Any:
        return self.take(x @ self.weight)


class Outside(nn.Module):
    """A product that only branches split."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)

        def parts(y: torch.Tensor) -> torch.Tensor:
            a, b, c = y.chunk(3, -1)
            return a * b + c

        return torch.cond(x.sum() > 0, parts, lambda y: y[..., :32] * 2, (y,))


class Twice(nn.Module):
    """A weight that two products read, one of them of itself."""

    def __init__(self, width: int, columns: int) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(width, columns), nn.Parameter(torch.empty(columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * nn.functional.linear(x, self.layer.weight, self.other)


class Called(nn.Module):
    """A layer whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, x[0, :1].sin().expand(5, -1), self.bias)


def heads(y: torch.Tensor) -> torch.Tensor:
    return y.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)


def by_select(y: torch.Tensor) -> torch.Tensor:
    qkv = heads(y)
    return qkv[0] @ qkv[1].mT @ qkv[-1]


def copied(y: torch.Tensor) -> torch.Tensor:
    q, k, v = heads(nn.functional.dropout(y, 0.1, training=False)).contiguous().unbind(0)
    return q @ k.mT @ v


def measured(y: torch.Tensor) -> torch.Tensor:
    a, b, c = y.chunk(3, -1)
    return a * b * y.shape[1] + c


def narrowed(y: torch.Tensor) -> torch.Tensor:
    return y.narrow(-1, 0, 32) * y.narrow(2, -32, 32)


#: The parts with a bias are Gemms, of all rows; the parts without a bias are MatMuls.
THREE = {"Gemm": 3, "MatMul": 0, "Split": 0, "Slice": 0}
BARE = {**THREE, "Gemm": 0, "MatMul": 3}
UNBOUND = {"Gemm": 3, "MatMul": 2, "Split": 0, "Squeeze": 0}
ONE = {"Gemm": 0, "MatMul": 1, "Reshape": 0}
FORMS: dict[str, Form] = {
    "rows": Form("linear_of_rows", lambda: nn.Linear(16, 96), {"Gemm": 1, "MatMul": 0, "Transpose": 0}),
    "rows without bias": Form("linear", lambda: nn.Linear(16, 96, bias=False), ONE),
    "rows by a tied weight": Form("linear_of_rows", lambda: Parts(lambda y: y, Twice), {"Gemm": 2, "Transpose": 0}),
    "rows of one column": Form("linear_of_rows", lambda: nn.Linear(16, 1), {"Gemm": 1}),
    "rows of no column": Form("linear", lambda: nn.Linear(16, 0), {"Gemm": 0}),
    "rows by the call's weight": Form("linear", Called, {"Gemm": 0, "MatMul": 1}),
    "rows of a layer of rows": Form("product_of_rows", lambda: Conv1D(16, 96), {"Gemm": 1, "MatMul": 0, "Reshape": 2}),
    "rows of heads": Form(
        "product_of_rows",
        lambda: nn.Sequential(
            nn.Unflatten(-1, (4, 4)), nn.Flatten(-2), Parts(lambda y: y[..., :48] * y[..., 48:], Conv1D)
        ),
        {"Gemm": 2, "Slice": 0},
    ),
    "rows that change their number": Form(
        "product_of_rows",
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(16, 4), nn.Unflatten(0, (1, -1))),
        {"Gemm": 1},
    ),
    "unbind of heads": Form("parts_of_product", lambda: Heads((2, 0, 3, 1, 4), (3, 4, 8), 0), UNBOUND),
    "without bias": Form(
        "parts_of_product",
        lambda: Heads((2, 0, 3, 1, 4), (3, 4, 8), 0, bias=False),
        {**UNBOUND, "Gemm": 0, "MatMul": 5},
    ),
    "heads first": Form("parts_of_product", lambda: Heads((0, 2, 1, 3, 4), (4, 3, 8), 3), UNBOUND),
    "inner axis": Form("parts_of_product", lambda: Heads((4, 0, 2, 1, 3), (4, 8, 3), 0), UNBOUND),
    "chunk": Form(
        "parts_of_product", lambda: Parts(lambda y: [p.sin() for p in y.chunk(3, -1)]), {"Split": 0, "Gemm": 3}
    ),
    "unequal": Form("parts_of_product", lambda: Parts(lambda y: y.split([32, 64], -1)), {"Split": 0, "Gemm": 2}),
    "slices": Form(
        "parts_of_product", lambda: Parts(lambda y: y[..., :32] * y[..., 64:]), {"Slice": 0, "Gemm": 2, "Split": 0}
    ),
    "overlapping slices": Form("parts_of_product", lambda: Parts(lambda y: y[..., :64] * y[..., 32:]), {"MatMul": 1}),
    "read whole too": Form("parts_of_product", lambda: Parts(lambda y: (y.chunk(3, -1), y)), {"MatMul": 1}),
    "many parts": Form("parts_of_product", lambda: Parts(lambda y: y.chunk(12, -1)), {"MatMul": 1}),
    "rows taken apart": Form("parts_of_product", lambda: Parts(lambda y: (y[0], y[1])), {"MatMul": 1}),
    "weight read elsewhere": Form("parts_of_product", Tied, {"MatMul": 1}),
    "layer used twice": Form("parts_of_product", Shared, {"MatMul": 2}),
    "selects": Form("part_of_product", lambda: Parts(by_select), UNBOUND),
    "narrow": Form("part_of_product", lambda: Parts(narrowed), {**THREE, "Gemm": 2}),
    "tensor_split": Form("parts_of_product", lambda: Parts(lambda y: [p.sin() for p in y.tensor_split(3, 2)]), THREE),
    "tensor_split at": Form(
        "parts_of_product", lambda: Parts(lambda y: [p.sin() for p in y.tensor_split((32, 64), -1)]), THREE
    ),
    "split in rest": Form(
        "parts_of_product", lambda: Parts(lambda y: [p.sin() for p in y.split(64, -1)]), {**THREE, "Gemm": 2}
    ),
    "copies between": Form("parts_of_product", lambda: Parts(copied), UNBOUND),
    "its size read": Form("parts_of_product", lambda: Parts(measured), {"Gemm": 3, "Split": 0}),
    "rows and columns": Form("parts_of_product", lambda: Parts(lambda y: (y[0], y.chunk(3, -1))), {"MatMul": 1}),
    "every second": Form("part_of_product", lambda: Parts(lambda y: y[..., ::2] * y[..., 1::2]), {"MatMul": 1}),
    "rows of parts": Form(
        "product_of_rows", lambda: Parts(lambda y: [p.sin() for p in y.split(32, -1)], Conv1D), THREE
    ),
    "a parameter": Form("parts_of_product", lambda: Product(lambda y: [p.sin() for p in y.chunk(3, -1)]), BARE),
    "outside of branches": Form("parts_of_product", Outside, {"Gemm": 1}),
    "weight stored transposed": Form("linear", lambda: nn.Linear(16, 8), {"Transpose": 0}),
    "in a branch": Form("parts_of_product", Branches, {"Gemm": 3, "Split": 0}),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    """Dynamo, which traces branches, takes a size that differed in an earlier test for a dynamic one."""
    torch._dynamo.reset()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("alone", "opset"),
    [pytest.param(True, 13, marks=LONG), (True, 21), (False, 18), pytest.param(False, 23, marks=LONG)],
)
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, alone: bool, opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_form(FORMS[name], opset, monkeypatch, patterns.REWRITES if alone else None)


@pytest.mark.parametrize("target", [None, "onnxruntime:cpu", "onnxruntime"])
@pytest.mark.parametrize("name", ["chunk", "rows"])
def test_the_forms_are_those_of_onnx_runtimes_cpu(name: str, target: str | None) -> None:
    """The default is the form that tools know."""
    program = onnxplug.to_onnx(
        stirred(FORMS[name].module(), 1),
        (torch.randn(2, 5, 16),),
        plugins=[],
        target=target,
        dynamic_shapes=({0: AUTO},),
    )
    assert FORMS[name].is_in(program) == (target == "onnxruntime:cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["chunk", "unbind of heads", "rows"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, x = stirred(FORMS[name].module(), 1).to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    dynamic = ({0: AUTO, 1: AUTO},)
    onnxplug.to_onnx(model, (x,), plugins=[], dynamic_shapes=dynamic, target="onnxruntime:cpu").verify()


def test_the_plain_translation_keeps_one_product() -> None:
    program = onnxplug.to_onnx(
        stirred(FORMS["chunk"].module(), 1), (torch.randn(2, 5, 16),), plugins=[], optimize=False
    )
    counts = [node.op_type for node in program.model.graph]
    assert (counts.count("MatMul"), counts.count("Split"), counts.count("Transpose")) == (1, 1, 1)


def test_a_rule_of_the_call_goes_first() -> None:
    requests = []

    def unbind(g: Any, node: Any) -> Any:
        requests.append(node.op_name)
        return g.call_next(node)

    module = stirred(FORMS["unbind of heads"].module(), 1)
    rule = onnxplug.Rule("aten::unbind.int", unbind)
    program = onnxplug.to_onnx(module, (torch.randn(2, 5, 16),), plugins=[], rules=[rule], target="onnxruntime:cpu")
    assert requests == ["aten::unbind.int"]
    assert FORMS["unbind of heads"].is_in(program)
