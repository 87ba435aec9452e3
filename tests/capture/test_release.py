"""Memory that torch keeps of captured programs is given back."""

from __future__ import annotations

import gc
import weakref

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
