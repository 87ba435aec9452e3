"""torch.export's passes over the traced graph, without their redundant work."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.torch_private import export_trace, exported_programs, make_graph_module, pytree, set_grad_pass, torch_c


@contextlib.contextmanager
def lean_passes() -> Iterator[None]:
    """While it holds, torch.export's passes over a finished graph take less time; the program is the same."""
    with _modes_of_gradients_erased(), _paths_of_modules_shortened_once(), _program_compiled_when_called():
        yield


@contextlib.contextmanager
def _modes_of_gradients_erased() -> Iterator[None]:
    """While it holds, nodes that set the gradient mode to its present value are erased.

    torch.export splits the graph at each of these nodes, and joins the parts again.
    """
    name = "_sequential_split_and_maybe_inline_subgraphs"
    original = getattr(set_grad_pass, name, None)
    if original is None:
        yield
        return

    def erase(graph_module: Any, signature: Any) -> Any:
        setting = [n for n in graph_module.graph.nodes if n.target is torch_c._set_grad_enabled]
        ambient = torch.is_grad_enabled()
        if any(n.op != "call_function" or n.args != (ambient,) or n.users for n in setting):
            return original(graph_module, signature)
        for node in setting:
            graph_module.graph.erase_node(node)
        return graph_module, signature

    with patched(set_grad_pass, name, erase):
        yield


@contextlib.contextmanager
def _paths_of_modules_shortened_once() -> Iterator[None]:
    """While it holds, torch.export strips its wrapper's name from the paths of modules once for each module, not for each node."""
    strip_root = getattr(export_trace, "_strip_root", None)
    if strip_root is None or getattr(export_trace, "pytree", None) is not pytree:
        yield
        return
    with patched(export_trace, "pytree", _Paths(strip_root)):
        yield


class _Paths:
    """``torch.utils._pytree`` with a ``tree_map`` that caches the results for entries of module stacks.

    Args:
        strip_root: torch.export's function that strips the name of its wrapper from a path.
    """

    def __init__(self, strip_root: Callable[[Any], Any]) -> None:
        self._strip_root = strip_root
        self._known: dict[tuple[Any, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(pytree, name)

    def tree_map(self, function: Any, tree: Any, *rests: Any, **options: Any) -> Any:
        if function is not self._strip_root or rests or options or type(tree) not in (dict, OrderedDict):
            return pytree.tree_map(function, tree, *rests, **options)
        known = self._known
        for entry in tree.values():
            if entry not in known:
                known[entry] = pytree.tree_map(function, entry)
        return type(tree)((name, known[entry]) for name, entry in tree.items())


@contextlib.contextmanager
def _program_compiled_when_called() -> Iterator[None]:
    """While it holds, the graph of an exported program becomes Python code when it is called, or its code is read."""
    name = "_create_graph_module_for_export"
    if not hasattr(exported_programs, name):
        yield
        return
    with patched(exported_programs, name, make_graph_module):
        yield
