"""A call of a module while torch.export traces: its arguments and weights, and what tells it from another call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onnxplug.capture.sameness import PLAIN, same_value
from onnxplug.torch_private import enable_thunkify, function_modes, pytree, torch_c


@dataclass
class Site:
    """A call of a module.

    Attributes:
        tracer: torch's tracer.
        module, tree, path: The module, all modules in it, and where it is in the model.
        leaves, spec: The arguments, flat.
        tensors: The tensors among the arguments, then parameters and buffers; each once.
        arguments: How many of these are arguments.
        nodes: The FX node of each.
        alike: What must be equal in a call that is to be a copy.
    """

    tracer: Any
    module: nn.Module
    tree: list[tuple[str, nn.Module]]
    path: str
    leaves: list[Any]
    spec: Any
    tensors: list[torch.Tensor]
    arguments: int
    nodes: list[torch.fx.Node]
    alike: Any


def site_of(
    tracer: Any, module: nn.Module, tree: list[tuple[str, nn.Module]], path: str, args: Any, kwargs: Any
) -> Site | None:
    """The call; ``None`` where an argument is no tensor that is traced and no plain value."""
    with apart_from_trace(tracer):
        leaves, spec = flat_arguments(args, kwargs)
        places: dict[int, int] = {}
        tensors: list[torch.Tensor] = []
        shape: list[Any] = []

        def place(tensor: torch.Tensor) -> int:
            if id(tensor) not in places:
                places[id(tensor)] = len(tensors)
                tensors.append(tensor)
            return places[id(tensor)]

        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                shape.append(("tensor", place(leaf)))
            elif isinstance(leaf, torch.SymInt):
                shape.append(("size", id(leaf.node)))
            elif isinstance(leaf, torch.SymFloat | torch.SymBool):
                return None
            elif is_plain(leaf):
                shape.append(("value", PlainValue(leaf)))
            else:
                return None
        arguments = len(tensors)
        for _, part in tree:
            shape.append(part.training)
            for kind in (part._parameters, part._buffers):
                shape.append([(name, None if t is None else place(t)) for name, t in kind.items()])
        nodes = []
        storages: dict[int, int] = {}
        for i, tensor in enumerate(tensors):
            entry = tracer.tensor_tracker.get(tensor)
            if entry is None or entry.constant is not None or tensor.layout is not torch.strided:
                return None
            if i < arguments and tensor.requires_grad:
                return None
            nodes.append(entry.proxy.node)
            storage = storages.setdefault(tensor.untyped_storage()._cdata, i)
            shape.append((*type_of(tensor), storage))
    state = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        list(map(id, function_modes())),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
    return Site(tracer, module, tree, path, leaves, spec, tensors, arguments, nodes, (shape, state))


def flat_arguments(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of arguments. What is no tuple, list or dict is a leaf: caches change when they are used."""
    return pytree.tree_flatten(
        (args, kwargs), is_leaf=lambda v: not (type(v) in (tuple, list, dict) or hasattr(v, "_fields"))
    )


@contextlib.contextmanager
def apart_from_trace(tracer: Any) -> Iterator[None]:
    """While it holds, looking at tensors and sizes adds nothing to the graph."""
    with torch_c.DisableTorchFunction(), enable_thunkify(tracer):
        yield


class _Sizes:
    """Symbolic sizes, equal where their expressions are by all that torch knows by then."""

    def __init__(self, sizes: Sequence[Any]) -> None:
        self.sizes = sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sizes) and list(map(_expr, self.sizes)) == list(map(_expr, other.sizes))

    __hash__ = None  # type: ignore[assignment]


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


class PlainValue:
    """A plain argument, equal to those that code can't tell from it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainValue) and same_value(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


def is_plain(value: Any) -> bool:
    """Whether a value among arguments or results says all by itself."""
    return isinstance(value, (float, *PLAIN))


def type_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.dim(),
        _Sizes((*tensor.shape, *tensor.stride(), tensor.storage_offset())),
    )


def symbol_count(site: Site) -> Any:
    """The symbols that torch has made so far for sizes."""
    for tensor in site.tensors:
        mode = getattr(tensor, "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            return len(mode.shape_env.var_to_range)
    return None
