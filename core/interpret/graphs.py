"""What is read off a whole FX graph before it is walked."""

from __future__ import annotations

import torch


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


def features_of(graph: torch.fx.Graph) -> tuple[bool, bool]:
    """Whether any value of a graph is complex, and whether any is empty. (A complex number shows where it is given.)"""
    has_complex = has_empty = False
    for fx in graph.nodes:
        val = fx.meta.get("val")
        for item in val if isinstance(val, list | tuple) else (val,):
            if isinstance(item, torch.Tensor):
                has_complex = has_complex or item.dtype.is_complex
                has_empty = has_empty or is_empty(item)
    return has_complex, has_empty


def is_empty(tensor: torch.Tensor) -> bool:
    """Whether a size is known to be 0; dynamic sizes are not asked, which would fix them."""
    return any(type(size) is int and size == 0 for size in tensor.shape)
