"""In-place operators made functional in one linear pass, where nothing else sees the memory that they write."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from onnxplug.errors import CaptureError

#: Composite operators whose result may be a view of their first argument though their schema doesn't say so.
_MAY_ALIAS = frozenset(
    [
        "reshape",
        "flatten",
        "contiguous",
        "to",
        "type_as",
        "expand_as",
        "view_as",
        "reshape_as",
        "squeeze",
        "ravel",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "numpy_T",
        "mT",
        "mH",
        "matrix_H",
        "adjoint",
        "unflatten",
        "narrow",
        "chunk",
        "tensor_split",
        "split",
        "unsafe_chunk",
        "broadcast_to",
        "broadcast_tensors",
        "resolve_conj",
        "resolve_neg",
        "real",
        "imag",
        "positive",
        "float",
        "double",
        "half",
        "bfloat16",
        "int",
        "long",
        "bool",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "vsplit",
        "hsplit",
        "dsplit",
        "diagonal",
        "linalg_diagonal",
        "dropout",
        "feature_dropout",
        "alpha_dropout",
        "meshgrid",
    ]
)


class _Kind(NamedTuple):
    """What a target does to memory.

    Attributes:
        written: Positions (or names) of the arguments that it writes.
        aliases: Whether a result may share memory with an argument.
        functional: The overload that computes the same without writing.
    """

    written: tuple[tuple[int, str], ...]
    aliases: bool
    functional: Any


@functools.cache
def _kind(target: Any) -> _Kind:
    if not isinstance(target, torch._ops.OpOverload):
        return _Kind((), True, None)
    schema = target._schema
    written = tuple(
        (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = any(r.alias_info is not None for r in schema.returns) or schema.name.partition("::")[2] in _MAY_ALIAS
    return _Kind(written, aliases, _functional_overload(target) if len(written) == 1 else None)


def _functional_overload(target: torch._ops.OpOverload) -> Any:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    namespace, _, name = target._schema.name.partition("::")
    if not name.endswith("_") or name.startswith("__") or namespace != "aten":
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    if packet is None:
        return None
    ours = [(a.name, str(a.type)) for a in target._schema.arguments]
    # The overload of the same name first; transpose_.default is transpose.int.
    names = [target._schema.overload_name or "default", *packet.overloads()]
    for overload in (getattr(packet, name, None) for name in names):
        if overload is not None and [(a.name, str(a.type)) for a in overload._schema.arguments] == ours:
            return overload
    return None


def mutates(node: torch.fx.Node) -> bool:
    """Whether a node's schema says that it writes an argument."""
    return node.op == "call_function" and bool(_kind(node.target).written)


def hides_mutation(node: torch.fx.Node) -> bool:
    """Whether a node writes running statistics although its schema doesn't say so."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.batch_norm.default:
        return bool(_argument(node, 5, "training")) and _argument(node, 3, "running_mean") is not None
    if node.target is torch.ops.aten.instance_norm.default:
        return bool(_argument(node, 5, "use_input_stats")) and _argument(node, 3, "running_mean") is not None
    return False


def _argument(node: torch.fx.Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


class _Memory:
    """A piece of memory: the nodes that may share it, and the value that it holds now."""

    __slots__ = ("current", "members", "owner")

    def __init__(self, owner: torch.fx.Node) -> None:
        self.owner = owner
        self.members: dict[torch.fx.Node, None] = {owner: None}
        self.current: torch.fx.Node | None = None


def make_functional(
    graph: torch.fx.Graph,
) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node], dict[torch.fx.Node, torch.fx.Node]] | None:
    """Copies a graph with its in-place operators made functional.

    Returns:
        The copy, old nodes to new ones, and the placeholders that were written with the value they end with; ``None``
        where aliasing forbids the rewrite: a view is written, or another view of what is written is read later.
    """
    last_use: dict[torch.fx.Node, int] = {}
    for index, node in enumerate(graph.nodes):
        for argument in node.all_input_nodes:
            last_use[argument] = index
    copy = torch.fx.Graph(owning_module=graph.owning_module)
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    memory: dict[torch.fx.Node, _Memory] = {}
    mutated: dict[torch.fx.Node, torch.fx.Node] = {}

    def read(node: torch.fx.Node) -> torch.fx.Node:
        piece = memory.get(node)
        if piece is None or piece.current is None or not (node is piece.owner or mutates(node)):
            return env[node]
        return piece.current

    for index, node in enumerate(graph.nodes):
        kind = _kind(node.target) if node.op == "call_function" else None
        if kind is None or not kind.written:
            env[node] = copy.node_copy(node, read)
            if kind is not None and kind.aliases:
                _join(node, memory)
            continue
        target = _written_argument(node, kind)
        if target is None or kind.functional is None:
            return None
        piece = memory.setdefault(target, _Memory(target))
        if piece.owner is not target and not mutates(target):
            return None  # a view is written: its base changes too
        if any(last_use.get(m, -1) > index and not _is_result(m, piece, target) for m in piece.members):
            return None  # another view of the memory is read later
        value = _functional_node(copy, node, kind, read)
        env[node] = value
        piece.current = value
        piece.members[node] = None
        memory[node] = piece
        if piece.owner.op == "placeholder":
            mutated[piece.owner] = value
    copy._codegen = graph._codegen
    return copy, env, mutated


def _is_result(member: torch.fx.Node, piece: _Memory, target: torch.fx.Node) -> bool:
    """Whether a member is the memory's owner or the result of an earlier write: both are read through it."""
    return member is piece.owner or member is target or mutates(member)


def _written_argument(node: torch.fx.Node, kind: _Kind) -> torch.fx.Node | None:
    if len(kind.written) != 1:
        return None
    position, name = kind.written[0]
    argument = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return argument if isinstance(argument, torch.fx.Node) else None


def _join(node: torch.fx.Node, memory: dict[torch.fx.Node, _Memory]) -> None:
    """A node that may be a view shares the memory of everything that it reads."""
    for argument in node.all_input_nodes:
        if not isinstance(argument.meta.get("val"), torch.Tensor | list | tuple):
            continue
        piece = memory.setdefault(argument, _Memory(argument))
        piece.members[node] = None
        memory.setdefault(node, piece)


def _functional_node(copy: torch.fx.Graph, node: torch.fx.Node, kind: _Kind, read: Any) -> torch.fx.Node:
    args = torch.fx.map_arg(node.args, read)
    kwargs = torch.fx.map_arg(node.kwargs, read)
    value = copy.call_function(kind.functional, args, kwargs)
    value.meta = dict(node.meta)
    before = _written_argument(node, kind)
    wanted = before.meta.get("val") if before is not None else None
    result = _result_dtype(kind.functional, args, kwargs)
    if isinstance(wanted, torch.Tensor) and result is not None and result[0] != wanted.dtype:
        # The functional form promotes; the in-place one writes back in the dtype of what it writes to.
        value.meta["val"] = result[1]
        value = copy.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": wanted.dtype})
        value.meta = dict(node.meta)
    return value


def _result_dtype(target: Any, args: Any, kwargs: Any) -> tuple[torch.dtype, torch.Tensor] | None:
    """Dtype and fake value of a functional call whose arguments differ in dtype; ``None`` when they don't."""
    found = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.fx.Node)]
    tensors = [a.meta["val"] for a in found if isinstance(a.meta.get("val"), torch.Tensor)]
    if len({t.dtype for t in tensors}) < 2:
        return None
    fake = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = next((t.fake_mode for t in tensors if isinstance(t, torch._subclasses.FakeTensor)), None)
    try:
        with mode if mode is not None else torch.no_grad(), torch.no_grad():
            result = target(*fake[0], **fake[1])
    except Exception as error:
        raise CaptureError(f"{target} can't be made functional: {error}") from error
    return (result.dtype, result) if isinstance(result, torch.Tensor) else None
