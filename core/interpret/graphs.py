"""Facts about a whole FX graph that the interpreter needs before it converts the first node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Survey(NamedTuple):
    """The facts about a graph.

    Attributes:
        live: The nodes that an output needs. Nodes that only assertions read (sizes, offsets) aren't converted.
        has_complex: Whether any value is complex. (A complex number shows where it is an argument.)
    """

    live: set[torch.fx.Node]
    has_complex: bool


#: Asserts that a tensor of one element is true, with a message or without.
ASSERTIONS = frozenset((torch.ops.aten._assert_async.msg, torch.ops.aten._assert_async.default))


def survey(graph: torch.fx.Graph, assertions: bool = False) -> Survey:
    """Looks at every node of a graph once.

    Args:
        assertions: Whether the model's assertions about its data are needed too.
    """
    live: set[torch.fx.Node] = set()
    has_complex = False
    for fx in reversed(graph.nodes):
        if not has_complex:
            has_complex = _is_complex(fx.meta.get("val"))
        if fx.op == "output" or (assertions and fx.target in ASSERTIONS):
            live.add(fx)
            continue
        for user in fx.users:
            if user in live:
                live.add(fx)
                break
    return Survey(live, has_complex)


def _is_complex(val: Any) -> bool:
    if isinstance(val, torch.Tensor):
        return val.dtype.is_complex
    return isinstance(val, list | tuple) and any(isinstance(v, torch.Tensor) and v.dtype.is_complex for v in val)
