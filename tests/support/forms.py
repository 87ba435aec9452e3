"""Forms that a runtime computes faster: a module, and the operators that it becomes."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.plugins.manager import registry_for
from onnxplug.rewrite.rewrite import Rewrite
from tests.support.tolerances import looser

AUTO = torch.export.Dim.AUTO


@dataclass(frozen=True)
class Form:
    """A module and its form in the graph.

    Attributes:
        name: The rewrite or the converter under test.
        module: Makes the module.
        found: How often each operator is in the graph, rewritten by that rewrite alone.
        special: Numbers to try besides random ones.
        since: The opset from which on the operators are there.
    """

    name: str
    module: Callable[[], nn.Module]
    found: Mapping[str, int]
    special: tuple[float, ...] = (0.0,)
    since: int = 13

    def is_in(self, program: onnxplug.OnnxProgram) -> bool:
        """Whether the operators are in a graph as often as they should be."""
        counts = Counter(node.op_type for node in program.model.graph.all_nodes())
        return {op: counts[op] for op in self.found} == dict(self.found)


def stirred(module: nn.Module, seed: int) -> nn.Module:
    """The module with other weights."""
    torch.manual_seed(seed)
    other = copy.deepcopy(module).eval()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)
    return other


def check_form(form: Form, opset: int, monkeypatch: pytest.MonkeyPatch, alone: Sequence[Rewrite] | None) -> None:
    """Exports the form's module and compares it with eager PyTorch, with the weights of the export and with others.

    Args:
        form: The form.
        opset: The version of ai.onnx.
        monkeypatch: pytest's.
        alone: The rewrites of the export; all of them when ``None``.
    """
    registry, manager = registry_for(plugins=[])
    if alone is not None:
        monkeypatch.setattr(manager, "rewrites", lambda: alone)
    model = stirred(form.module(), 1)
    x = torch.randn(2, 5, 16)
    inputs = [x, torch.randn(3, 7, 16), *(torch.full((2, 5, 16), number) for number in form.special)]
    inputs[-1][0, 0, :3] = 1.0
    program = onnxplug.to_onnx(
        model,
        (x,),
        dynamic_shapes=({0: AUTO, 1: AUTO},),
        opset_version=opset,
        registry=(registry, manager),
        target="onnxruntime:cpu",
    )
    if alone is not None and opset >= form.since:
        assert form.is_in(program), Counter(node.op_type for node in program.model.graph.all_nodes())
    for x in inputs:
        compare(program, model, x)
    other = stirred(model, 2)
    program.apply_weights(other.state_dict())
    for x in inputs:
        compare(program, other, x)


def compare(program: Any, model: nn.Module, x: torch.Tensor) -> None:
    """Compares a program's results with eager PyTorch's."""
    with torch.no_grad():
        expected = torch.utils._pytree.tree_leaves(model(x))
    for got, wanted in zip(torch.utils._pytree.tree_leaves(program(x)), expected, strict=True):
        tolerances = looser("fast forms")
        torch.testing.assert_close(got, wanted, rtol=tolerances["rtol"], atol=tolerances["atol"], equal_nan=True)
