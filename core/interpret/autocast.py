"""Composite operators under ``torch.autocast``, as the operators that they call.

Autocast casts the operands of the operators that it knows, such as ``bmm``, also where another operator, such as ``einsum``,
calls them. torch.export records the outer operator, and ``run_decompositions`` decomposes it where autocast no longer holds.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from onnxplug.capture.composites import RECURRENT
from onnxplug.functionalize.effects import writes
from onnxplug.functionalize.subgraphs import subgraph_at
from onnxplug.interpret.decompose import trace_function
from onnxplug.torch_private import DispatchKey, OpOverload, has_kernel_for_dispatch_key

_LAYERS = frozenset(overload for name in RECURRENT for overload in (f"aten::{name}.input", f"aten::{name}.data"))
#: The recurrent layers whose operands autocast casts, by the type of the device: those that a library computes as a whole.
_CAST_LAYERS = {"cpu": frozenset(("aten::lstm.input",)), "cuda": _LAYERS}
#: Where a region begins with a branch or a loop, torch leaves it in the graph around it, behind the second.
_WRAPPED, _ENTER, _EXIT = "wrap_with_autocast", "_enter_autocast", "_exit_autocast"


class Region(NamedTuple):
    """An autocast: the type of its device, and the dtype to which it casts; ``None`` where it is turned off."""

    device: str
    dtype: torch.dtype | None

    @property
    def key(self) -> str:
        """The name of its dispatch key."""
        return f"Autocast{self.device.upper()}"


def autocast_region(node: torch.fx.Node) -> Region | None:
    """The autocast that a node turns on or off; ``None`` for any other node."""
    if node.op != "call_function" or isinstance(node.target, OpOverload) or _name(node) not in (_WRAPPED, _ENTER):
        return None
    arguments = dict(enumerate(node.args))  # device type, dtype, enabled, cache
    device, dtype = str(arguments[0]), arguments.get(1)
    if not arguments.get(2, True):
        return Region(device, None)
    return Region(device, dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(device))


def with_casts(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with those composite operators under autocast inlined within which autocast casts operands.

    Recurrent layers stay whole, for their decompositions have static lengths, and get casts of their own.
    """
    if not any(_is_composite(node) for _, node, _ in _under_autocast(program.graph_module, {})):
        return program
    program, module = copy.copy(program), copy.deepcopy(program.graph_module)
    program._graph_module = module
    changed = set()
    for owner, node, region in list(_under_autocast(module, {})):
        if _overload(node) in _CAST_LAYERS.get(region.device, ()):
            _cast_operands(node, region.dtype)
        elif (called := _calls_cast(node, region)) is not None:
            _inline(node, *called)
        else:
            continue
        changed.add(owner)
    for owner in changed:
        owner.recompile()
    return program


def _name(node: torch.fx.Node) -> str:
    return getattr(node.target, "__name__", "")


def _under_autocast(
    module: torch.fx.GraphModule, outer: Mapping[str, Region]
) -> Iterator[tuple[torch.fx.GraphModule, torch.fx.Node, Region]]:
    """The calls under the autocast of their operands' device, each with its graph's module and that autocast.

    Args:
        outer: The autocasts around the module, by the types of their devices.
    """
    entered = [outer]
    for node in module.graph.nodes:
        region = autocast_region(node)
        if _name(node) == _ENTER and region is not None:
            entered.append({**entered[-1], region.device: region})
        elif _name(node) == _EXIT:
            entered.pop()
        inner = subgraph_at(node, module)
        if inner is not None:
            regions = filter(None, map(autocast_region, node.users))
            yield from _under_autocast(inner, {**entered[-1], **{region.device: region for region in regions}})
        elif entered[-1] and isinstance(node.target, OpOverload):
            values = [operand.meta.get("val") for operand in node.all_input_nodes]
            device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), "")
            current = entered[-1].get(device)
            if current is not None and current.dtype is not None:
                yield module, node, current


def _is_composite(node: torch.fx.Node) -> bool:
    return bool(node.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))  # type: ignore[union-attr]


def _overload(node: torch.fx.Node) -> str:
    return str(node.target.name())  # type: ignore[union-attr]


def _cast_operands(node: torch.fx.Node, dtype: torch.dtype | None) -> None:
    """Casts the operands of a recurrent layer, as autocast does: neither integers nor doubles."""

    def cast(operand: torch.fx.Node) -> torch.fx.Node:
        value = operand.meta["val"]
        if not value.is_floating_point() or value.dtype == torch.float64:
            return operand
        with node.graph.inserting_before(node):
            result = node.graph.call_function(torch.ops.aten.to.dtype, (operand, dtype))
        result.meta["val"] = value.to(dtype)
        return result

    node.args = torch.fx.map_arg(node.args, cast)


def _calls_cast(node: torch.fx.Node, region: Region) -> tuple[torch.fx.GraphModule, list[torch.fx.Node]] | None:
    """The graph of a composite operator, casts included, and its operands, if autocast casts operands within the operator alone."""
    target: Any = node.target
    operands = node.all_input_nodes
    if (
        not _is_composite(node)
        or _overload(node) in _LAYERS
        or has_kernel_for_dispatch_key(target.name(), region.key)
        or not all(isinstance(operand.meta["val"], torch.Tensor) for operand in operands)
    ):
        return None

    def call(*values: torch.Tensor) -> Any:
        bound = dict(zip(operands, values, strict=True))
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), bound.__getitem__)
        return target.decompose(*args, **kwargs)

    try:
        with torch.autocast(region.device, dtype=region.dtype):
            module = trace_function(call, [operand.meta["val"] for operand in operands])
    except Exception:  # it stays whole, and more precise than PyTorch computes it
        return None
    called = [n for n in module.graph.nodes if n.op in ("call_function", "get_attr")]
    if writes(module.graph) or any(n.op == "get_attr" for n in called):
        return None
    overloads = [n.target for n in called if isinstance(n.target, OpOverload)]
    return (module, operands) if any(has_kernel_for_dispatch_key(o.name(), region.key) for o in overloads) else None


def _inline(node: torch.fx.Node, module: torch.fx.GraphModule, operands: list[torch.fx.Node]) -> None:
    """Replaces a call by the nodes of its decomposition."""
    graph, before = node.graph, set(node.graph.nodes)
    formals = [n for n in module.graph.nodes if n.op == "placeholder"]
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(module.graph, dict(zip(formals, operands, strict=True)))
    for inner in set(graph.nodes) - before:
        inner.meta["stack_trace"] = node.meta.get("stack_trace", "")
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
