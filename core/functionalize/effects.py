"""Operators' effects on memory: the arguments that they write, and whether their results may alias arguments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.torch_private import OpOverload

#: Composite operators whose result may be a view of their first argument although their schema doesn't say so.
_MAY_ALIAS = frozenset(
    (
        "reshape flatten contiguous to type_as expand_as view_as reshape_as squeeze ravel movedim moveaxis swapaxes "
        "swapdims numpy_T mT mH matrix_H adjoint unflatten narrow chunk tensor_split split unsafe_chunk broadcast_to "
        "broadcast_tensors resolve_conj resolve_neg real imag positive float double half bfloat16 int long bool "
        "atleast_1d atleast_2d atleast_3d vsplit hsplit dsplit diagonal linalg_diagonal dropout feature_dropout "
        "alpha_dropout feature_alpha_dropout meshgrid cartesian_prod einsum sum_to_size conj_physical unsafe_split "
        "unsafe_split_with_sizes histogramdd dequantize"
    ).split()
)

#: Operators among them that copy where the dtype changes.
_CASTS = frozenset("to type_as float double half bfloat16 int long bool dequantize".split())

#: Operators among them that return the tensor itself where there is nothing to do.
_ITSELF = _CASTS | {"contiguous", "positive", "resolve_conj", "resolve_neg"}


class Effects(NamedTuple):
    """The effects of a target on memory.

    Attributes:
        written: Positions and names of the arguments that it writes.
        aliases: Whether a result may share memory with an argument.
        functional: The overload that computes the same without writing; ``None`` where there is none.
        appends: Whether that overload returns the operator's own results before the new values of the written tensors; else
            it returns the new values alone, as the operator itself returns the written tensors.
    """

    written: tuple[tuple[int, str], ...]
    aliases: bool
    functional: OpOverload | None
    appends: bool = False


#: By identity, as the hash of a torch operator is computed in Python. Each keeps its target alive: no id is used again.
_known: dict[int, tuple[Any, Effects]] = {}


def effects_of(target: Any) -> Effects:
    """The effects of an FX target, read off its schema."""
    cached = _known.get(id(target))
    if cached is None:
        cached = _known[id(target)] = (target, _compute_effects(target))
    return cached[1]


def _compute_effects(target: Any) -> Effects:
    if not isinstance(target, OpOverload):
        return Effects((), True, None)
    schema = target._schema
    written = tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = any(r.alias_info is not None for r in schema.returns) or schema.name.partition("::")[2] in _MAY_ALIAS
    if not written or schema.name.partition("::")[0] != "aten":
        return Effects(written, aliases, None)
    functional = _named_functional(target) or _functional_overload(target, {name for _, name in written})
    count = len(functional._schema.returns) if functional is not None else 0
    appends = bool(schema.returns) and count == len(schema.returns) + len(written)
    return Effects(written, aliases, functional, appends)


def _functional_overload(target: OpOverload, written: set[str]) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor`` and for ``aten.add.out``; ``None`` where no overload has those arguments."""
    schema = target._schema
    name = schema.name.partition("::")[2]
    out = all(a.kwarg_only for a in schema.arguments if a.name in written)
    if not out and name.startswith("__i"):
        name = f"__{name[3:]}"
    elif not out:
        if len(written) > 1 or not name.endswith("_"):
            return None
        name = name[:-1]
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    # The first argument's name may differ: it is ``input`` in dropout and ``self`` in dropout_.
    ours = [
        (a.name if i else "", str(a.type)) for i, a in enumerate(schema.arguments) if not (out and a.name in written)
    ]
    # The overload of the same name first; the functional form of transpose_.default is transpose.int.
    names = [schema.overload_name or "default", *packet.overloads()]
    for overload in (getattr(packet, name, None) for name in names):
        if overload is None or any(
            a.alias_info is not None and a.alias_info.is_write for a in overload._schema.arguments
        ):
            continue
        theirs = [(a.name if i else "", str(a.type)) for i, a in enumerate(overload._schema.arguments)]
        if theirs == ours and len(overload._schema.returns) == len(written):
            functional: OpOverload = overload
            return functional
    return None


def _named_functional(target: OpOverload) -> OpOverload | None:
    """``aten._native_batch_norm_legit_functional`` for ``aten._native_batch_norm_legit``, ``normal_functional`` for ``normal_``."""
    name = target._schema.name.partition("::")[2]
    packet = getattr(torch.ops.aten, f"{name.rstrip('_')}_functional", None)
    overload: OpOverload | None = getattr(packet, "default", None)
    ours = [(a.name, str(a.type)) for a in target._schema.arguments]
    if overload is None or [(a.name, str(a.type)) for a in overload._schema.arguments] != ours:
        return None
    return overload


def targets_of(graph: torch.fx.Graph) -> list[Any]:
    """The targets of a graph's nodes, each once."""
    # By identity: the hash of a torch operator is computed in Python.
    return list({id(node.target): node.target for node in graph.nodes if node.op == "call_function"}.values())


def writes(graph: torch.fx.Graph, targets: Iterable[Any] | None = None) -> bool:
    """Whether a node of a graph writes an argument.

    Args:
        targets: The targets of its nodes, where they are known.
    """
    called = targets_of(graph) if targets is None else targets
    if any(effects_of(target).written for target in called):
        return True
    return any(id(target) in _HIDDEN for target in called) and any(map(hides_writes, graph.nodes))


#: Operators, by identity, that write running statistics although their schema doesn't say so, each with the argument that turns
#: it on. The statistics are the arguments at 3 and 4.
_HIDDEN: dict[int, str] = {
    id(torch.ops.aten.batch_norm.default): "training",
    id(torch.ops.aten.native_batch_norm.default): "training",
    id(torch.ops.aten.instance_norm.default): "use_input_stats",
}


def hides_writes(node: torch.fx.Node) -> bool:
    """Whether a node writes running statistics although its schema doesn't say so."""
    flag = _HIDDEN.get(id(node.target)) if node.op == "call_function" else None
    return (
        flag is not None
        and bool(argument_of(node, 5, flag))
        and isinstance(argument_of(node, 3, "running_mean"), torch.fx.Node)
    )


def argument_of(node: torch.fx.Node, position: int, name: str) -> Any:
    """An argument of a node by its position or its name; ``None`` where it is absent."""
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def written_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node writes, in the schema's order; lists one by one."""
    places: tuple[tuple[int, str], ...] = ((3, "running_mean"), (4, "running_var"))
    if not hides_writes(node):
        places = effects_of(node.target).written if node.op == "call_function" else ()
    return [leaf for place in places for leaf in _items(argument_of(node, *place)) if isinstance(leaf, torch.fx.Node)]


def _items(argument: Any) -> Sequence[Any]:
    """The items of a list, or an argument alone."""
    return argument if isinstance(argument, list | tuple) else (argument,)


def hidden_effects(graph: torch.fx.Graph) -> list[OpOverload]:
    """Composite operators of a graph that may give a view, or write running statistics, although their schema doesn't say so.

    torch's functionalization treats them as copies without a write unless it decomposes them.
    """
    writers = {id(node.target) for node in graph.nodes if hides_writes(node)}
    return [
        target
        for target in targets_of(graph)
        if isinstance(target, OpOverload)
        and (effects_of(target).aliases or id(target) in writers)
        and all(r.alias_info is None for r in target._schema.returns)
        and target._can_decompose()
    ]


def aliased_arguments(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node's results may share memory with."""
    schema = getattr(node.target, "_schema", None)
    arguments = node.all_input_nodes
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        arguments = []
        for i, formal in enumerate(schema.arguments):
            if formal.alias_info is not None:
                value = argument_of(node, i, formal.name)
                arguments += [leaf for leaf in _items(value) if isinstance(leaf, torch.fx.Node)]
    return [a for a in arguments if isinstance(a.meta.get("val"), torch.Tensor | list | tuple) and not _copies(node, a)]


def _copies(node: torch.fx.Node, base: torch.fx.Node) -> bool:
    """Whether a node is known not to share ``base``'s memory: another dtype, or a product of several tensors."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.name == "aten::einsum":
        return len(node.all_input_nodes) > 1
    if schema is None or schema.name.partition("::")[2] not in _CASTS:
        return False
    if base is not node.args[0]:
        return True  # type_as takes only the type of its second argument
    return getattr(node.meta.get("val"), "dtype", None) != getattr(base.meta.get("val"), "dtype", None)


def returns_itself(node: torch.fx.Node) -> bool:
    """Whether a node's operator, where it does not copy, returns its argument itself, and no view of it."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.partition("::")[2] in _ITSELF


def owns_results(node: torch.fx.Node) -> bool:
    """Whether a node's results are memory of their own."""
    return isinstance(node.target, OpOverload) and not effects_of(node.target).aliases


def branches_own_results(node: torch.fx.Node) -> bool:
    """Whether a node is a call of ``torch.cond`` neither of whose branches returns an input, or a possible view of an input."""
    if getattr(node.target, "__name__", "") != "cond":
        return False
    owner = node.graph.owning_module
    branches = [getattr(owner, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"]
    if not branches or not all(isinstance(branch, torch.fx.GraphModule) for branch in branches):
        return False
    return not any(_returns_inputs(branch.graph) for branch in branches if isinstance(branch, torch.fx.GraphModule))


def _returns_inputs(graph: torch.fx.Graph) -> bool:
    """Whether a result of a graph may share memory with an input, or with a constant."""
    pending = graph.output_node().all_input_nodes
    seen: set[torch.fx.Node] = set()
    while pending:
        node = pending.pop()
        if node.op != "call_function":
            return True
        if node not in seen and not owns_results(node):
            seen.add(node)
            pending += aliased_arguments(node)
    return False
