"""What is read off a whole FX graph before it is walked."""

from __future__ import annotations

import torch


def live_nodes(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """The nodes that an output needs. What only assertions read (sizes, offsets) isn't converted."""
    live: set[torch.fx.Node] = set()
    for fx in reversed(graph.nodes):
        if fx.op == "output":
            live.add(fx)
            continue
        for user in fx.users:
            if user in live:
                live.add(fx)
                break
    return live


def has_complex_values(graph: torch.fx.Graph) -> bool:
    """Whether any value of a graph is complex. (A complex number shows where it is given.)"""
    for fx in graph.nodes:
        val = fx.meta.get("val")
        if isinstance(val, torch.Tensor):
            if val.dtype.is_complex:
                return True
        elif isinstance(val, (list, tuple)):
            for item in val:
                if isinstance(item, torch.Tensor) and item.dtype.is_complex:
                    return True
    return False
