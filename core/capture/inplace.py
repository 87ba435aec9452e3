"""In-place operators made functional in one linear pass over the graph.

Memory that is written is followed through its views: a write reaches the base by the view's inverse (``select_scatter``
for ``select``), and a view that is read after a write is taken again from what the base holds by then.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch

from onnxplug.capture.views import VIEWS, is_dropped, undo_item
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
        "feature_alpha_dropout",
        "meshgrid",
        "cartesian_prod",
        "einsum",
        "sum_to_size",
        "conj_physical",
        "unsafe_split",
        "unsafe_split_with_sizes",
    ]
)


#: Those of them that copy where the dtype changes.
_CASTS = frozenset(["to", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool"])


#: What makes a tensor another size, in place.
_RESIZES = frozenset([torch.ops.aten.resize.default, torch.ops.aten.resize_as.default])


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


def hidden_views(graph: torch.fx.Graph) -> list[torch._ops.OpOverload]:
    """Composite operators of a graph whose result may be a view though their schema doesn't say so.

    torch's functionalization takes them for copies unless it is told to take them apart.
    """
    found = dict.fromkeys(n.target for n in graph.nodes if n.op == "call_function")
    return [
        target
        for target in found
        if isinstance(target, torch._ops.OpOverload)
        and _kind(target).aliases
        and all(r.alias_info is None for r in target._schema.returns)
        and target._can_decompose()
    ]


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
    """A piece of memory.

    Attributes:
        source: The node that made it.
        version: How often it was written.
        opaque_until: Position of the last node that reads something of which it isn't known whether it is a view of it.
        shared: Whether something else is, or may be, a view of it.
    """

    __slots__ = ("opaque_until", "shared", "source", "version")

    def __init__(self, source: torch.fx.Node) -> None:
        self.source = source
        self.version = 0
        self.opaque_until = -1
        self.shared = False


class _Sight:
    """A piece of memory as one tensor sees it: whole, or through a view of another sight (``parent``).

    Attributes:
        view: The call that makes it of its parent: operator, arguments after the first one, keywords.
        meta: Metadata of the node that made it first.
        value: The node of the new graph that holds it, as the memory was at ``version``.
    """

    __slots__ = ("memory", "meta", "parent", "value", "version", "view")

    def __init__(
        self,
        memory: _Memory,
        value: torch.fx.Node,
        meta: dict[str, Any],
        parent: _Sight | None = None,
        view: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        self.memory = memory
        self.value = value
        self.meta = meta
        self.parent = parent
        self.view = view
        self.version = memory.version


class _Tensor:
    """A tensor object of the program: every in-place operator returns the object that it is given."""

    __slots__ = ("sight",)

    def __init__(self, sight: _Sight) -> None:
        self.sight = sight


Functional = tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node], dict[torch.fx.Node, torch.fx.Node]]


def make_functional(graph: torch.fx.Graph) -> Functional | None:
    """Copies a graph with its in-place operators made functional.

    Returns:
        The copy, old nodes to new ones, and the placeholders that were written with the value they end with; ``None``
        where the pass can't tell what a write changes: an operator without functional form writes, or something is
        written or read later of which it isn't known whether it is a view (``reshape``, ``contiguous``).
    """
    return _Pass(graph).run()


class _Pass:
    """One run of :func:`make_functional`."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.copy = torch.fx.Graph(owning_module=graph.owning_module)
        self.env: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tensors: dict[torch.fx.Node, _Tensor] = {}
        #: What may share memory with others, it isn't known how.
        self.opaque: dict[torch.fx.Node, tuple[_Memory, ...]] = {}
        self.items: dict[tuple[torch.fx.Node, Any], torch.fx.Node] = {}
        self.written: dict[_Memory, None] = {}
        self.last_use: dict[torch.fx.Node, int] = {}

    def run(self) -> Functional | None:
        """The graph's copy, or ``None``."""
        for index, node in enumerate(self.graph.nodes):
            for argument in node.all_input_nodes:
                self.last_use[argument] = index
        for index, node in enumerate(self.graph.nodes):
            kind = _kind(node.target) if node.op == "call_function" else None
            if kind is not None and kind.written:
                if not self._write(node, kind, index):
                    return None
                continue
            self.env[node] = self.copy.node_copy(node, self.read)
            if kind is not None and kind.aliases:
                self._see(node)
        self.copy._codegen = self.graph._codegen
        mutated = {
            memory.source: self.read(memory.source) for memory in self.written if memory.source.op == "placeholder"
        }
        return self.copy, self.env, mutated

    def read(self, node: torch.fx.Node) -> torch.fx.Node:
        """What a node of the old graph holds now."""
        tensor = self.tensors.get(node)
        return self.env[node] if tensor is None else self._value(tensor.sight)

    def _value(self, sight: _Sight) -> torch.fx.Node:
        stale = []
        upper = sight
        while upper.version != upper.memory.version:
            stale.append(upper)
            assert upper.parent is not None
            upper = upper.parent
        for one in reversed(stale):
            assert one.parent is not None
            assert one.view is not None
            target, args, kwargs = one.view
            args, kwargs = torch.fx.map_arg((args, kwargs), self.read)
            one.value = self.copy.call_function(target, (one.parent.value, *args), kwargs)
            one.value.meta = dict(one.meta)
            one.version = one.memory.version
        return sight.value

    def _tensor(self, node: torch.fx.Node) -> _Tensor:
        """The tensor that a node is; memory of its own unless it is known to be a view."""
        found = self.tensors.get(node)
        if found is None:
            found = self.tensors[node] = _Tensor(_Sight(_Memory(node), self.env[node], node.meta))
        return found

    # -- nodes that share memory ---------------------------------------------------------------------------------------

    def _see(self, node: torch.fx.Node) -> None:
        """Notes what memory a node shares."""
        base = node.args[0] if node.args else None
        if is_dropped(node) and isinstance(base, torch.fx.Node) and base not in self.opaque:
            self.tensors[node] = self._tensor(base)
        elif node.target not in VIEWS or not isinstance(base, torch.fx.Node):
            bases = _aliased(node)
            if bases or not isinstance(node.target, torch._ops.OpOverload):
                self._hide(node, bases)
        elif base in self.opaque:
            self._hide(node, [base])
        elif node.target is operator.getitem and base not in self.tensors:
            # A result of an operator with several.
            if not _owns_results(base):
                self._hide(node, [base])
                return
            first = self.items.setdefault((base, node.args[1]), node)
            self.tensors[node] = self._tensor(first)
        else:
            parent = self._tensor(base).sight
            parent.memory.shared = True
            view = (node.target, node.args[1:], dict(node.kwargs))
            self.tensors[node] = _Tensor(_Sight(parent.memory, self.env[node], node.meta, parent, view))

    def _hide(self, node: torch.fx.Node, bases: list[torch.fx.Node]) -> None:
        """Notes that a node may be a view of what ``bases`` are views of."""
        memories: dict[_Memory, None] = {}
        for base in bases:
            found = self.opaque.get(base)
            memories.update(dict.fromkeys((self._tensor(base).sight.memory,) if found is None else found))
        self.opaque[node] = tuple(memories)
        for memory in memories:
            memory.shared = True
            memory.opaque_until = max(memory.opaque_until, self.last_use.get(node, -1))

    # -- writes --------------------------------------------------------------------------------------------------------

    def _write(self, node: torch.fx.Node, kind: _Kind, index: int) -> bool:
        """Makes one in-place operator functional; whether that can be done."""
        target = _written_argument(node, kind)
        if target is None or kind.functional is None or target in self.opaque:
            return False
        tensor = self._tensor(target)
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            return self._turn(node, kind, tensor)
        if tensor.sight.memory.opaque_until > index:
            return False
        new = _functional_node(self.copy, node, kind, self.read)
        self.env[node] = new
        self.tensors[node] = tensor
        return self._store(tensor.sight, new, node.meta)

    def _turn(self, node: torch.fx.Node, kind: _Kind, tensor: _Tensor) -> bool:
        """An operator that changes how a tensor sees its memory (``t_``), not what is there."""
        sight = tensor.sight
        if kind.functional in _RESIZES and not sight.memory.shared and sight.memory.source.op != "placeholder":
            # Nobody else sees the memory: another tensor takes its place.
            value = self.env[node] = _functional_node(self.copy, node, kind, self.read)
            self.tensors[node] = tensor
            return self._store(sight, value, node.meta)
        if kind.functional not in VIEWS or (sight.parent is None and sight.memory.source.op == "placeholder"):
            return False
        if kind.functional is not torch.ops.aten.detach.default:
            value = self.copy.call_function(
                kind.functional,
                (self._value(sight), *torch.fx.map_arg(node.args[1:], self.read)),
                torch.fx.map_arg(node.kwargs, self.read),
            )
            value.meta = dict(node.meta)
            view = (kind.functional, node.args[1:], dict(node.kwargs))
            tensor.sight = _Sight(sight.memory, value, node.meta, sight, view)
        self.tensors[node] = tensor
        self.env[node] = tensor.sight.value
        return True

    def _store(self, sight: _Sight, new: torch.fx.Node, meta: dict[str, Any]) -> bool:
        """Writes what a sight shows to the memory behind it; whether that can be done."""
        changed = [(sight, new)]
        while sight.parent is not None:
            parent, whole = sight.parent, self._undone(sight, new)
            if whole is None:
                return False
            if sight.view is not None and sight.view[0] is operator.getitem:
                assert parent.parent is not None
                parent = parent.parent
            if whole is not new:
                whole.meta = {**meta, "val": parent.meta["val"]}
            new, sight = whole, parent
            changed.append((sight, new))
        memory = sight.memory
        memory.version += 1
        self.written[memory] = None
        for one, value in changed:
            one.value, one.version = value, memory.version
        return True

    def _undone(self, sight: _Sight, new: torch.fx.Node) -> torch.fx.Node | None:
        """The value of a sight's parent, or of the list's parent for an item, when the sight's own is ``new``."""
        assert sight.view is not None
        assert sight.parent is not None
        parent = sight.parent
        target, args, kwargs = sight.view
        if target is operator.getitem:
            if parent.view is None or parent.parent is None:
                return None
            split, rest, named = parent.view
            given = () if named else torch.fx.map_arg(rest, self.read)
            return None if named else undo_item(self.copy, self._value(parent.parent), new, split, given, args[0])
        undo = VIEWS[target]
        if undo is None or kwargs:
            return None
        return undo(self.copy, self._value(parent), new, torch.fx.map_arg(args, self.read), parent.meta["val"])


def _aliased(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that a node's results may share memory with."""
    schema = getattr(node.target, "_schema", None)
    found = node.all_input_nodes
    if schema is not None and any(r.alias_info is not None for r in schema.returns):
        found = [
            leaf
            for argument, given in zip(schema.arguments, node.args, strict=False)
            if argument.alias_info is not None
            for leaf in torch.utils._pytree.tree_leaves(given)
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


def _owns_results(node: torch.fx.Node) -> bool:
    """Whether a node's results are memory of their own."""
    return isinstance(node.target, torch._ops.OpOverload) and not _kind(node.target).aliases


def _written_argument(node: torch.fx.Node, kind: _Kind) -> torch.fx.Node | None:
    if len(kind.written) != 1:
        return None
    position, name = kind.written[0]
    argument = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return argument if isinstance(argument, torch.fx.Node) else None


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
