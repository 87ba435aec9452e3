"""Inputs of a call of a program: by position or by name as the PyTorch model takes them, with the structure of the export."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug import UsageError

A, B, C = (torch.randn(3) for _ in range(3))


class Model(nn.Module):
    """Its result tells the inputs apart."""

    def forward(
        self, x: torch.Tensor, a: torch.Tensor | None = None, b: torch.Tensor | None = None, *, c: Any = None
    ) -> torch.Tensor:
        for factor, value in ((10, a), (100, b), (1000, c)):
            x = x if value is None else x + value * factor
        return x


def same(program: onnxplug.OnnxProgram, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(program(*args, **kwargs)[0], model(*args, **kwargs))
    torch.testing.assert_close(program.call_reference(*args, **kwargs)[0], model(*args, **kwargs))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((A,), {"b": B, "a": C}), ((A, C, B), {}), ((), {"b": B, "x": A, "a": C}), ((A, C), {"b": B})],
    ids=["names in another order", "by position", "by name", "both"],
)
def test_inputs_by_position_and_by_name(args: Any, kwargs: Any) -> None:
    """Each form of a call is right for an export with each other form."""
    model = Model()
    program = onnxplug.to_onnx(model, args, kwargs=kwargs)
    same(program, model, A, B, C)
    same(program, model, A, b=B, a=C)
    same(program, model, A, B, b=C)
    same(program, model, b=A, a=B, x=C)
    for wrong in ((A,), (A, B), (A, B, C, A)):
        with pytest.raises(UsageError, match="the exported model takes"):
            program(*wrong)
    with pytest.raises(UsageError, match="the exported model takes"):
        program(A, B, C, c=A)


def test_inputs_that_only_a_name_can_give() -> None:
    model = Model()
    program = onnxplug.to_onnx(model, (A,), kwargs={"c": B})
    same(program, model, A, c=C)
    same(program, model, c=A, x=B)
    with pytest.raises(UsageError, match="the exported model takes"):
        program(A, B)


class Nested(nn.Module):
    def forward(self, inputs: Any, pair: Any = None) -> torch.Tensor:
        result: torch.Tensor = inputs["a"] * 2 - inputs["b"]["c"]
        return result if pair is None else result + pair[0] * 3 - pair[1]


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(None, items)])
def test_keys_in_another_order(kind: Any) -> None:
    model = Nested()
    program = onnxplug.to_onnx(model, (kind({"a": A, "b": {"c": B}}),), kwargs={"pair": (B, C)})
    same(program, model, kind({"b": {"c": C}, "a": A}), pair=(A, B))
    same(program, model, {"b": {"c": C}, "a": A}, (A, B))
    same(program, model, {"b": {"c": C}, "a": A}, [A, B])
    with pytest.raises(UsageError, match=r"the positional input 1 has other keys .* \['a', 'c'\], not"):
        program(kind({"a": A, "c": {"c": C}}), pair=(A, B))
    with pytest.raises(
        UsageError, match=r"the positional input 1\['b'\] has another structure .* a leaf, not dict of 1"
    ):
        program(kind({"a": A, "b": C}), pair=(A, B))
    with pytest.raises(UsageError, match="the input 'pair' has another structure"):
        program(kind({"a": A, "b": {"c": C}}), pair=(A, (B,), C))


def test_another_nesting_with_as_many_leaves() -> None:
    class Tuples(nn.Module):
        def forward(self, pair: Any, x: Any) -> torch.Tensor:
            return torch.stack([*pair, x]) if isinstance(x, torch.Tensor) else torch.stack([*pair, *x]) * 0

    program = onnxplug.to_onnx(Tuples(), (Pair(A, B), C))
    same(program, Tuples(), Pair(B, A), C)
    with pytest.raises(UsageError, match="another structure"):
        program((A,), (B, C))


def test_a_program_without_its_model() -> None:
    """Without a signature nothing tells the position of a keyword input."""
    exported = torch.export.export(Model(), (A,), {"b": B})
    program = onnxplug.to_onnx(exported)
    torch.testing.assert_close(program(A, b=C)[0], Model()(A, b=C))
    with pytest.raises(UsageError, match="the exported model takes"):
        program(A, C)
