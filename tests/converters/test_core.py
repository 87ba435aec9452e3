"""Core ATen: every overload with torch's tag has a rule, or a decomposition that can be converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onnxplug.interpret.decompose import find_decompositions
from onnxplug.plugins.builtin import onnxplug_rules
from onnxplug.registry.names import without_prefix
from tests.support.check import check
from tests.support.tolerances import looser

#: Gradients for which torch has no decomposition; models in inference have none of them.
WITHOUT = {
    "aten::_adaptive_avg_pool2d_backward.default",
    "aten::avg_pool2d_backward.default",
}

#: Operators that write their arguments, which functionalization replaces.
WRITING = {"aten::resize_.default", "aten::atan2.out", "aten::_native_batch_norm_legit.default"}


def core() -> dict[str, torch._ops.OpOverload]:
    """The overloads with torch's tag `core`, from its dispatcher: `dir(torch.ops.aten)` lists only used overloads."""
    overloads = {}
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if namespace == "aten":
            operator = getattr(getattr(torch.ops.aten, name), overload or "default")
            if torch.Tag.core in operator.tags:
                overloads[f"aten::{name}.{overload or 'default'}"] = operator
    return overloads


def test_every_core_overload_is_covered() -> None:
    ruled = {without_prefix(rule.op) for rule in onnxplug_rules()}
    operators = core()
    assert len(operators) > 180
    bare = {
        name
        for name, operator in operators.items()
        if name not in ruled and not operator._schema.is_mutable and not list(find_decompositions(operator, name, None))
    }
    assert bare == WITHOUT
    assert {name for name, operator in operators.items() if operator._schema.is_mutable} == WRITING


def into_another(x: torch.Tensor) -> Any:
    return torch.atan2(x, x + 1, out=torch.empty(6, 6)) * 2


def resized(x: torch.Tensor) -> Any:
    return (x * 2).resize_(4, 9)


def running(x: torch.Tensor) -> Any:
    mean, var = torch.zeros(6), torch.ones(6)
    result = aten._native_batch_norm_legit(x, W6, W6 + 1, mean, var, True, 0.1, 1e-5)
    return result[0], mean, var


@pytest.mark.parametrize("function", [into_another, resized, running])
def test_operators_that_write(function: Callable[[torch.Tensor], Any]) -> None:
    check(function, ROWS, others=[(ROWS * 2 - 1,)], **looser("core"))


aten = torch.ops.aten
X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
ROWS = X[0, 0].contiguous()
W4, W6 = torch.arange(4.0) - 1.5, torch.arange(6.0) - 2.5


def of_pool(g: torch.Tensor, x: torch.Tensor) -> Any:
    _, indices = aten.max_pool2d_with_indices(x, [2, 2])
    return aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)


DECOMPOSED: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "_native_batch_norm_legit": (
        lambda x, m, v: aten._native_batch_norm_legit_no_training(x, W4, W4 + 1, m, v, 0.1, 1e-5)[0],
        (X, W4, W4.abs()),
    ),
    "batch_norm_in_training": (
        lambda x: aten._native_batch_norm_legit.no_stats(x, W4, W4 + 1, True, 0.1, 1e-5)[:1],
        (X,),
    ),
    "embedding_dense_backward": (
        lambda g: aten.embedding_dense_backward(g, torch.tensor([0, 3, 3, 1, 0, 2]), 5, 2, False),
        (ROWS,),
    ),
    "max_pool2d_with_indices_backward": (of_pool, (X[..., :3, :3].contiguous(), X)),
    "native_group_norm_backward": (
        lambda g, x: aten.native_group_norm_backward(
            g, x, x.mean((2, 3))[:, :2] * 0, torch.ones(2, 2), W4, 2, 4, 36, 2, [True, True, True]
        ),
        (X, X * 2 - 1),
    ),
    "native_layer_norm_backward": (
        lambda g, x: aten.native_layer_norm_backward(
            g, x, [6], x.mean(-1, keepdim=True), x.var(-1, keepdim=True).rsqrt(), W6, W6, [True, True, True]
        ),
        (ROWS, ROWS * 3 + 1),
    ),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decompositions_serve(name: str) -> None:
    function, args = DECOMPOSED[name]
    check(function, *args, others=[tuple(a * 0.5 + 1 if a.dim() != 1 else a for a in args)], **looser("core"))
