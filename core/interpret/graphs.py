"""What is read off a whole FX graph before it is walked."""

from __future__ import annotations

import torch

from onnxplug.build.quantized import QUANTIZERS


def live_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that an output needs. What only assertions read (sizes, offsets) isn't converted."""
    live: set[torch.fx.Node] = set()
    for fx in reversed(graph.nodes):
        if fx.op == "output":
            live.add(fx)
            live.update(fx.all_input_nodes)
        elif fx in live:
            live.update(fx.all_input_nodes)
    return live


def has_quantized_values(graph: torch.fx.Graph) -> bool:
    """Whether a graph makes quantised tensors; a model can't be given any."""
    return any(fx.target in QUANTIZERS for fx in graph.nodes)


def has_complex_values(graph: torch.fx.Graph) -> bool:
    """Whether any value of a graph is complex. (A complex number shows where it is given.)"""
    for fx in graph.nodes:
        val = fx.meta.get("val")
        for item in val if isinstance(val, (list, tuple)) else (val,):
            if isinstance(item, torch.Tensor) and item.dtype.is_complex:
                return True
    return False
