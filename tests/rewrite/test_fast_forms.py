"""Forms that ONNX Runtime computes faster: each rewrite alone and all together, with the weights of the export and others."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.plugins.manager import registry_for
from onnxplug.rewrite import norms, patterns, products
from tests.support.tolerances import looser

AUTO = torch.export.Dim.AUTO
FAST = {"transposed_weight", *(rewrite.name for rewrite in (*products.REWRITES, *norms.REWRITES))}
REWRITES = {rewrite.name: rewrite for rewrite in (*patterns.REWRITES, *products.REWRITES, *norms.REWRITES)}


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
    """A product whose last axis ``take`` takes apart."""

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
    """A product that is taken apart in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def parts(x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.layer(x).chunk(3, -1)
            return a * b + c

        return torch.cond(x.sum() > 0, parts, lambda x: torch.cat([x, x], -1), (x,))


class Norm(nn.Module):
    """A sum and its layer norm, the sum read again."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.norm, self.layer = again, nn.LayerNorm(16, eps=1e-3), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x + self.layer(x)
        return self.norm(total) + total if self.again else self.norm(total)


class RootMeanSquare(nn.Module):
    """Llama's norm."""

    def __init__(self, weight_first: bool = True, axis: int = -1) -> None:
        super().__init__()
        self.weight, self.weight_first, self.axis = nn.Parameter(torch.empty(16)), weight_first, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(self.axis, keepdim=True) + 1e-3)
        return self.weight * normal if self.weight_first else normal * self.weight


@dataclass(frozen=True)
class Form:
    """A module and what becomes of it.

    Attributes:
        rewrite: The rewrite under test.
        module: Makes the module.
        found: How often each operator is in the graph, rewritten by that rewrite alone.
        special: Numbers to try besides random ones.
        since: The opset from which on the operators are there.
    """

    rewrite: str
    module: Callable[[], nn.Module]
    found: Mapping[str, int]
    special: tuple[float, ...] = (0.0,)
    since: int = 13


UNBOUND = {"MatMul": 5, "Split": 0, "Gather": 0, "Squeeze": 0}
FORMS: dict[str, Form] = {
    "rows": Form("product_of_rows", lambda: Conv1D(16, 96), {"Gemm": 0, "MatMul": 1, "Reshape": 0}),
    "rows of heads": Form(
        "product_of_rows",
        lambda: nn.Sequential(nn.Unflatten(-1, (4, 4)), nn.Flatten(-2), Conv1D(16, 5)),
        {"Gemm": 0, "MatMul": 1},
    ),
    "rows that change their number": Form(
        "product_of_rows",
        lambda: nn.Sequential(nn.Flatten(0, 1), nn.Linear(16, 4), nn.Unflatten(0, (1, -1))),
        {"Gemm": 1},
    ),
    "unbind of heads": Form("product_by_parts", lambda: Heads((2, 0, 3, 1, 4), (3, 4, 8), 0), UNBOUND),
    "without bias": Form("product_by_parts", lambda: Heads((2, 0, 3, 1, 4), (3, 4, 8), 0, bias=False), UNBOUND),
    "heads first": Form("product_by_parts", lambda: Heads((0, 2, 1, 3, 4), (4, 3, 8), 3), UNBOUND),
    "inner axis": Form("product_by_parts", lambda: Heads((4, 0, 2, 1, 3), (4, 8, 3), 0), UNBOUND),
    "chunk": Form(
        "product_by_parts", lambda: Parts(lambda y: [p.sin() for p in y.chunk(3, -1)]), {"Split": 0, "MatMul": 3}
    ),
    "unequal": Form("product_by_parts", lambda: Parts(lambda y: y.split([32, 64], -1)), {"Split": 0, "MatMul": 2}),
    "slices": Form(
        "product_by_parts", lambda: Parts(lambda y: y[..., :32] * y[..., 64:]), {"Slice": 0, "MatMul": 2, "Split": 0}
    ),
    "overlapping slices": Form("product_by_parts", lambda: Parts(lambda y: y[..., :64] * y[..., 32:]), {"MatMul": 1}),
    "read whole too": Form("product_by_parts", lambda: Parts(lambda y: (y.chunk(3, -1), y)), {"MatMul": 1}),
    "many parts": Form("product_by_parts", lambda: Parts(lambda y: y.chunk(12, -1)), {"MatMul": 1}),
    "rows taken apart": Form("product_by_parts", lambda: Parts(lambda y: (y[0], y[1])), {"MatMul": 1}),
    "weight read elsewhere": Form("product_by_parts", Tied, {"MatMul": 1}),
    "layer used twice": Form("product_by_parts", Shared, {"MatMul": 2}),
    "in a branch": Form("product_by_parts", Branches, {"MatMul": 3, "Split": 0}),
    "weight read transposed": Form("transposed_weight", lambda: nn.Linear(16, 8), {"Transpose": 0}),
    "weight read both ways": Form("transposed_weight", Tied, {"Transpose": 1}),
    "norm of a sum": Form("sum_before_norm", lambda: Norm(False), {"Sum": 1}, since=17),
    "norm of a residual sum": Form("sum_before_norm", lambda: Norm(True), {"Sum": 1, "Add": 2}, since=17),
    "root mean square": Form(
        "root_mean_square_norm",
        RootMeanSquare,
        {"Pow": 1, "Div": 1, "Reciprocal": 0},
        (0.0, float("inf"), float("nan")),
    ),
    "weight last": Form("root_mean_square_norm", lambda: RootMeanSquare(False), {"Pow": 1, "Div": 1, "Reciprocal": 0}),
    "mean over another axis": Form(
        "root_mean_square_norm", lambda: RootMeanSquare(axis=1), {"Reciprocal": 1, "Div": 0}
    ),
}


def stirred(module: nn.Module, seed: int) -> nn.Module:
    """The module with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(module).eval()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)
    return other


@pytest.mark.parametrize(("alone", "opset"), [(True, 13), (True, 21), (False, 18), (False, 23)])
@pytest.mark.parametrize("name", FORMS)
def test_form(name: str, alone: bool, opset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[name]
    registry, manager = registry_for(plugins=[])
    if alone:
        chosen = [REWRITES[name] for name in ("transposed_weight", form.rewrite)]
        monkeypatch.setattr(manager, "rewrites", lambda: chosen)
    model = stirred(form.module(), 1)
    x = torch.randn(2, 5, 16)
    inputs = [x, torch.randn(3, 7, 16), *(torch.full((2, 5, 16), number) for number in form.special)]
    inputs[-1][0, 0, :3] = 1.0
    program = onnxplug.to_onnx(
        model, (x,), dynamic_shapes=({0: AUTO, 1: AUTO},), opset_version=opset, registry=(registry, manager)
    )
    if alone and opset >= form.since:
        counts = Counter(node.op_type for node in program.model.graph.all_nodes())
        assert {op: counts[op] for op in form.found} == dict(form.found)
    for x in inputs:
        compare(program, model, x)
    other = stirred(model, 2)
    program.apply_weights(other.state_dict())
    for x in inputs:
        compare(program, other, x)


def compare(program: Any, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(x))
    for got, wanted in zip(torch.utils._pytree.tree_leaves(program(x)), expected, strict=True):
        torch.testing.assert_close(got, wanted, **looser("fast forms"), equal_nan=True)


def test_every_rewrite_has_a_form() -> None:
    assert {form.rewrite for form in FORMS.values()} == FAST


@pytest.mark.parametrize("target", [None, "onnxruntime:cpu", "onnxruntime"])
@pytest.mark.parametrize("name", ["chunk", "norm of a sum", "rows", "root mean square"])
def test_the_forms_are_onnx_runtimes(name: str, target: str | None) -> None:
    """Portable ONNX keeps the plain form."""
    form = FORMS[name]
    program = onnxplug.to_onnx(
        stirred(form.module(), 1), (torch.randn(2, 5, 16),), plugins=[], target=target, dynamic_shapes=({0: AUTO},)
    )
    counts = Counter(node.op_type for node in program.model.graph.all_nodes())
    assert ({op: counts[op] for op in form.found} == dict(form.found)) == (target is not None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["chunk", "unbind of heads", "norm of a sum", "rows", "root mean square"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    model, x = stirred(FORMS[name].module(), 1).to(dtype), torch.randn(2, 5, 16, dtype=dtype)
    onnxplug.to_onnx(model, (x,), plugins=[], dynamic_shapes=({0: AUTO, 1: AUTO},)).verify()
