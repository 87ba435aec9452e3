"""What an operator does to memory: which arguments it writes, and whether its results may alias them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from onnxplug.torch_private import OpOverload, pytree

#: Composite operators whose result may be a view of their first argument although their schema doesn't say so.
_MAY_ALIAS = frozenset(
    (
        "reshape flatten contiguous to type_as expand_as view_as reshape_as squeeze ravel movedim moveaxis swapaxes "
        "swapdims numpy_T mT mH matrix_H adjoint unflatten narrow chunk tensor_split split unsafe_chunk broadcast_to "
        "broadcast_tensors resolve_conj resolve_neg real imag positive float double half bfloat16 int long bool "
        "atleast_1d atleast_2d atleast_3d vsplit hsplit dsplit diagonal linalg_diagonal dropout feature_dropout "
        "alpha_dropout feature_alpha_dropout meshgrid cartesian_prod einsum sum_to_size conj_physical unsafe_split "
        "unsafe_split_with_sizes"
    ).split()
)

#: Those of them that copy where the dtype changes.
_CASTS = frozenset("to type_as float double half bfloat16 int long bool".split())


class Effects(NamedTuple):
    """What a target does to memory.

    Attributes:
        written: Positions and names of the arguments that it writes.
        aliases: Whether a result may share memory with an argument.
        functional: The overload that computes the same without writing; ``None`` where there is none.
    """

    written: tuple[tuple[int, str], ...]
    aliases: bool
    functional: OpOverload | None


@functools.cache
def effects_of(target: Any) -> Effects:
    """The effects of an FX target, read off its schema."""
    if not isinstance(target, OpOverload):
        return Effects((), True, None)
    schema = target._schema
    written = tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = any(r.alias_info is not None for r in schema.returns) or schema.name.partition("::")[2] in _MAY_ALIAS
    return Effects(written, aliases, _functional_overload(target) if len(written) == 1 else None)


def _functional_overload(target: OpOverload) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__") or namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    if packet is None:
        return None
    ours = [(a.name, str(a.type)) for a in target._schema.arguments]
    # The overload of the same name first; the functional form of transpose_.default is transpose.int.
    names = [target._schema.overload_name or "default", *packet.overloads()]
    for overload in (getattr(packet, name, None) for name in names):
        if overload is not None and [(a.name, str(a.type)) for a in overload._schema.arguments] == ours:
            found: OpOverload = overload
            return found
    return None


def targets_of(graph: torch.fx.Graph) -> list[Any]:
    """What the nodes of a graph call, each once."""
    # By identity: the hash of an operator of torch is computed in Python.
    return list({id(node.target): node.target for node in graph.nodes if node.op == "call_function"}.values())


def writes(graph: torch.fx.Graph, targets: Iterable[Any] | None = None) -> bool:
    """Whether a node of a graph writes an argument, by its schema.

    Args:
        graph: The graph.
        targets: What its nodes call, where that is known.
    """
    return any(effects_of(target).written for target in (targets_of(graph) if targets is None else targets))


def hides_mutations(graph: torch.fx.Graph, targets: Iterable[Any]) -> bool:
    """Whether a node of a graph, which calls these targets, writes running statistics although its schema doesn't say so."""
    norms = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
    return any(target in norms for target in targets) and any(map(_hides_mutation, graph.nodes))


def _hides_mutation(node: torch.fx.Node) -> bool:
    """Whether a node writes running statistics although its schema doesn't say so."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.batch_norm.default:
        return bool(argument_of(node, 5, "training")) and argument_of(node, 3, "running_mean") is not None
    if node.target is torch.ops.aten.instance_norm.default:
        return bool(argument_of(node, 5, "use_input_stats")) and argument_of(node, 3, "running_mean") is not None
    return False


def argument_of(node: torch.fx.Node, position: int, name: str) -> Any:
    """An argument of a node, given by its position or by its name; ``None`` where it isn't given."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def written_argument(node: torch.fx.Node) -> torch.fx.Node | None:
    """The one tensor that a node writes; ``None`` where it writes several, or a list."""
    written = effects_of(node.target).written
    if len(written) != 1:
        return None
    argument = argument_of(node, *written[0])
    return argument if isinstance(argument, torch.fx.Node) else None


def hidden_views(graph: torch.fx.Graph) -> list[OpOverload]:
    """Composite operators of a graph whose result may be a view although their schema doesn't say so.

    torch's functionalization takes them for copies unless it is told to decompose them.
    """
    return [
        target
        for target in targets_of(graph)
        if isinstance(target, OpOverload)
        and effects_of(target).aliases
        and all(r.alias_info is None for r in target._schema.returns)
        and target._can_decompose()
    ]


def aliased_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node's results may share memory with."""
    schema = getattr(node.target, "_schema", None)
    found = node.all_input_nodes
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        found = [
            leaf
            for argument, given in zip(schema.arguments, node.args, strict=False)
            if argument.alias_info is not None
            for leaf in pytree.tree_leaves(given)
            if isinstance(leaf, torch.fx.Node)
        ]
    return [a for a in found if isinstance(a.meta.get("val"), torch.Tensor | list | tuple) and not _copies(node, a)]


def _copies(node: torch.fx.Node, base: torch.fx.Node) -> bool:
    """Whether a node is known not to share ``base``'s memory: another dtype, or a product of several tensors."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name == "aten::einsum":
        return len(node.all_input_nodes) > 1
    if schema is None or schema.name.partition("::")[2] not in _CASTS:
        return False
    return getattr(node.meta.get("val"), "dtype", None) != getattr(base.meta.get("val"), "dtype", None)


def owns_results(node: torch.fx.Node) -> bool:
    """Whether a node's results are memory of their own."""
    return isinstance(node.target, OpOverload) and not effects_of(node.target).aliases
