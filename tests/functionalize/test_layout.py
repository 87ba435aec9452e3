"""View or copy, decided by the expressions of strides, against PyTorch at sizes that fulfil the conditions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch.export import Dim

from onnxplug.functionalize.layout import COPY, PERMUTED, RESHAPED, SAME, Sharing, sharing
from onnxplug.torch_private import is_alias_of

SIZES = (1, 2, 3, 4, 6)

#: Views of a tensor of shape [a, b, 4], and operators on the views.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: torch.ops.aten.alias(x),
    "transposed": lambda x: x.transpose(0, 1),
    "last two transposed": lambda x: x.transpose(1, 2),
    "first to the end": lambda x: x.permute(1, 2, 0),
    "part of the last axis": lambda x: x[:, :, :2],
    "row": lambda x: x[:, 0],
    "column": lambda x: x[:, :, 1],
    "every other": lambda x: x[:, :, ::2],
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1),
    "expanded at the end": lambda x: x.unsqueeze(-1).expand(-1, -1, -1, 2),
}
OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to one axis": lambda v: v.reshape(-1),
    "first two merged": lambda v: v.flatten(0, 1),
    "last two merged": lambda v: v.flatten(-2, -1),
    "first axis kept": lambda v: v.reshape(v.shape[0], -1),
    "last axis kept": lambda v: v.reshape(-1, v.shape[-1]),
    "an axis of size 1": lambda v: v.reshape(*v.shape[:-1], 1, -1),
    "ravel": torch.ravel,
    "contiguous": lambda v: v.contiguous(),
    "channels last": lambda v: v.contiguous(memory_format=torch.channels_last) if v.dim() == 4 else v.contiguous(),
    "to": lambda v: v.to(torch.float32),
    "einsum": lambda v: torch.einsum("a...->...a", v),
    "atleast_3d": torch.atleast_3d,
}


class Two(torch.nn.Module):
    def __init__(self, view: str, operator: str) -> None:
        super().__init__()
        self.view, self.operator = VIEWS[view], OPERATORS[operator]

    def forward(self, x: torch.Tensor) -> Any:
        view = self.view(x)
        return view, self.operator(view)


def layout(model: Two) -> tuple[Sharing | None, list[Any]]:
    program = torch.export.export(model, (torch.randn(5, 7, 4),), dynamic_shapes=({0: Dim("a"), 1: Dim("b")},))
    view, result = program.graph.output_node().args[0]
    (x,) = (node for node in program.graph.nodes if node.op == "placeholder")
    return sharing(result, view, {}), [n.node.expr for n in x.meta["val"].shape[:2]]


@pytest.mark.parametrize("view", VIEWS)
def test_as_torch_decides(view: str) -> None:
    known = 0
    for name in OPERATORS:
        model = Two(view, name)
        outcome, symbols = layout(model)
        if outcome is None:
            continue
        tried = 0
        for sizes in itertools.product(SIZES, SIZES):
            numbers = dict(zip(symbols, map(sympy.Integer, sizes), strict=True))
            if not all(bool(c.xreplace(numbers)) for c in outcome.conditions):
                continue
            base, result = model(torch.randn(*sizes, 4))
            assert is_alias_of(base, result) == (outcome.kind != COPY), (name, sizes, outcome)
            if outcome.kind == SAME:
                assert (base.shape, base.stride()) == (result.shape, result.stride())
            elif outcome.kind == RESHAPED:
                assert torch.equal(base.reshape(result.shape), result)
            elif outcome.kind == PERMUTED:
                assert torch.equal(base.permute(outcome.order), result)
            tried += 1
        assert tried >= 16, (name, outcome)
        known += 1
    assert known >= 10


def test_nothing_is_assumed_of_a_contiguous_tensor() -> None:
    for name in OPERATORS:
        result, _ = layout(Two("itself", name))
        assert result is not None
        assert not result.conditions or name == "channels last"


def test_pieces_of_random_strides() -> None:
    """On static sizes, with axes of size 1 and repeated elements, the answer is that of torch.Tensor.view itself."""
    chance = random.Random(0)
    for _ in range(400):
        shape = [chance.choice((1, 2, 3, 4)) for _ in range(chance.randint(1, 4))]
        memory = torch.zeros(4096)
        strides = [chance.choice((0, 1, 2, 3, 4, 6, 8, 12, 24)) for _ in shape]
        if chance.random() < 0.5:
            order = chance.sample(range(len(shape)), len(shape))
            strides = list(
                torch.empty([shape[a] for a in order]).permute([order.index(a) for a in range(len(shape))]).stride()
            )
        tensor = memory.as_strided(shape, strides)
        count = tensor.numel()
        wanted = [d for d in (chance.choice((1, 2, 3, 4, 6)) for _ in range(2)) if count % d == 0]
        rest = count
        for d in wanted:
            rest //= d if rest % d == 0 else 1
        wanted = [*(d for d in wanted), rest] if torch.Size(wanted).numel() * rest == count else [count]
        graph = torch.fx.Graph()
        base = graph.placeholder("x")
        base.meta["val"] = tensor
        node = graph.call_function(torch.ops.aten.reshape.default, (base, wanted))
        node.meta["val"] = tensor.reshape(wanted)
        result = sharing(node, base, {})
        assert result is not None
        assert (result.kind == RESHAPED) == is_alias_of(node.meta["val"], tensor), (shape, strides, wanted)
        assert not result.conditions
