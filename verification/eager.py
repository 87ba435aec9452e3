"""Models run by PyTorch: a copy of a module, and a captured graph, operator by operator."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onnxplug.capture.eager import inference
from onnxplug.capture.places import plain_tensors
from onnxplug.capture.signature import FunctionalGraph, InputKind
from onnxplug.errors import VerificationError
from onnxplug.fake import is_fake
from onnxplug.torch_private import pytree

_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)

#: Called with each node, its operands (in the order of ``all_input_nodes``) and its result; returns the value that later nodes
#: read.
Visit = Callable[[torch.fx.Node, Sequence[Any], Any], Any]


def copied(model: torch.nn.Module, *, with_tensors: bool = True) -> torch.nn.Module:
    """A copy of a module in which tensors that share memory do so too.

    Attributes that can't be copied, a lock for example, are shared; results of operators, which ``copy.deepcopy`` refuses, are
    copied without their history.

    Args:
        model: The module.
        with_tensors: Copy parameters and buffers too; otherwise both modules have the same.
    """
    if isinstance(model, torch.jit.ScriptModule):
        return copy.deepcopy(model)
    memo: dict[int, Any] = {}
    if not with_tensors:
        memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for parameter in model.parameters() if with_tensors else ():
        if type(parameter) is torch.nn.Parameter:
            # copy.deepcopy gives a parameter memory of its own, and plain tensors of one memory one memory.
            content = copy.deepcopy(parameter.detach(), memo)
            memo[id(parameter)] = torch.nn.Parameter(content, parameter.requires_grad)
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        _add_uncopyable(memo, model)
    return copy.deepcopy(model, memo)


def _add_uncopyable(memo: dict[int, Any], model: torch.nn.Module) -> None:
    """Adds to the memo of a ``copy.deepcopy`` the attributes of modules that it refuses."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = copy.deepcopy(value.detach(), memo)
            elif name not in ("_parameters", "_buffers", "_modules"):
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    memo[id(value)] = value


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by their names; a tied tensor has several."""
    known = dict[str, torch.Tensor](model.named_parameters(remove_duplicate=False))
    known.update(model.named_buffers(remove_duplicate=False))
    return known


def state_of(model: Any, name: str) -> torch.Tensor | None:
    """A model's tensor by its name: a buffer, a parameter, or a tensor in another attribute, or in a list there."""
    if not isinstance(model, torch.nn.Module):
        return None
    known = tensors_of(model)
    if name in known:
        return known[name]
    if not isinstance(model, torch.jit.ScriptModule):
        return next((tensor for place, tensor in plain_tensors(model) if str(place) == name), None)
    owner: Any = model
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part, None)
    if isinstance(owner, list | tuple | dict):
        tensors = [leaf for leaf in pytree.tree_leaves(owner) if isinstance(leaf, torch.Tensor)]
        return tensors[int(last)] if last.isdigit() and int(last) < len(tensors) else None
    value = getattr(owner, last, None)
    return value if isinstance(value, torch.Tensor) else None


def placeholder_values(functional: FunctionalGraph, leaves: Sequence[Any]) -> dict[torch.fx.Node, Any]:
    """The values of a graph's placeholders in a call of the model.

    Args:
        functional: The graph.
        leaves: The flattened inputs of the call.

    Raises:
        VerificationError: A weight is fake: it has a shape and no numbers.
    """
    values: dict[torch.fx.Node, Any] = {}
    for slot in functional.inputs:
        if slot.kind in _STATE:
            if is_fake(slot.tensor):
                raise VerificationError(f"the weight {slot.name!r} has no numbers, so nothing can be compared")
            values[slot.node] = slot.tensor.detach() if slot.tensor is not None else None
        else:
            values[slot.node] = leaves[slot.position] if slot.position is not None else slot.value
    return values


def feed_of(functional: FunctionalGraph, leaves: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The inputs of a graph's ONNX model: complex tensors as real tensors with a last axis of size 2, numbers as tensors."""
    feed: dict[str, torch.Tensor] = {}
    for slot in functional.inputs:
        if slot.kind is InputKind.USER and slot.position is not None:
            value = leaves[slot.position]
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
            value = value.detach().cpu().resolve_conj().resolve_neg()
            feed[slot.name] = torch.view_as_real(value) if value.is_complex() else value
    return feed


def run_graph(
    functional: FunctionalGraph, values: Mapping[torch.fx.Node, Any], visit: Visit
) -> dict[torch.fx.Node, Exception]:
    """Runs a functional graph on real tensors, each value freed after its last use.

    Args:
        functional: The graph.
        values: The values of its placeholders.
        visit: Called after each node.

    Returns:
        The nodes that PyTorch does not run alone, with its errors; nodes that read their results are left out.
    """
    graph = functional.graph
    live = _needed(functional)
    left = Counter({node: len(node.users) for node in graph.nodes})
    env: dict[torch.fx.Node, Any] = {}
    failures: dict[torch.fx.Node, Exception] = {}
    with inference():
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = values.get(node)
            elif node.op == "get_attr":
                env[node] = _attribute(graph.owning_module, str(node.target))
            elif node.op == "call_function" and node in live and all(n in env for n in node.all_input_nodes):
                try:
                    result = node.target(*_with_values(node.args, env), **_with_values(node.kwargs, env))
                except Exception as error:
                    failures[node] = error
                else:
                    env[node] = visit(node, [env[n] for n in node.all_input_nodes], result)
            for read in node.all_input_nodes:
                left[read] -= 1
                if not left[read]:
                    env.pop(read, None)
    return failures


def call_again(node: torch.fx.Node, operands: Sequence[Any]) -> Any:
    """Calls a node's operator with other values for the nodes that it reads, in their order."""
    args, kwargs = arguments_of(node, operands)
    with inference():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def arguments_of(node: torch.fx.Node, operands: Sequence[Any]) -> tuple[Any, Any]:
    """A node's positional and keyword arguments, with values for the nodes that it reads, in their order."""
    env = dict(zip(node.all_input_nodes, operands, strict=True))
    return _with_values(node.args, env), _with_values(node.kwargs, env)


def _needed(functional: FunctionalGraph) -> set[torch.fx.Node]:
    """The nodes that outputs need, as the interpreter converts no others."""
    needed: set[torch.fx.Node] = set()
    pending = [slot.value for slot in functional.outputs if isinstance(slot.value, torch.fx.Node)]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending.extend(node.all_input_nodes)
    return needed


def _with_values(argument: Any, env: Mapping[torch.fx.Node, Any]) -> Any:
    return torch.fx.node.map_arg(argument, env.__getitem__)


def _attribute(owner: Any, path: str) -> Any:
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner.detach() if isinstance(owner, torch.Tensor) else owner
