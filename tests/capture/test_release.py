"""Memory that torch keeps of captured programs is given back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import onnxplug


def test_the_sizes_of_an_export_are_gone_with_the_next() -> None:
    """torch.export alone keeps every environment of sizes as long as the process lives."""

    def environment() -> weakref.ref:
        dim = {0: torch.export.Dim.DYNAMIC}
        program = onnxplug.to_onnx(_sums, (torch.zeros(4, 6),), dynamic_shapes=(dim,)).exported_program
        size = next(n.meta["val"].shape[0] for n in program.graph.nodes if n.op == "placeholder")
        return weakref.ref(size.node.shape_env)

    first = environment()
    environment()
    gc.collect()
    assert first() is None


def _sums(x: torch.Tensor) -> torch.Tensor:
    return x.relu().reshape(-1, 3).sum(0)


@pytest.mark.long
def test_a_capture_before_does_not_fix_sizes() -> None:
    """Dynamo compares the sizes of each call of its wrapper with those of the calls before it."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, key, value, scale=0.3)

    inputs = tuple(torch.randn(2, 1, 16, 8) for _ in "qkv")
    for axis in (0, 2):
        program = onnxplug.to_onnx(attend, inputs, dynamic_shapes=({axis: "size"},) * 3)
        assert len(program.verify().cases) > 1
