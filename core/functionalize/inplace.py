"""In-place operators made functional in one linear pass over the graph.

Storages that are written are followed through their aliases: a write to a view reaches the base by the view's inverse
(``select_scatter`` for ``select``), and a view that is read after a write is taken again of what the base holds by then.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from onnxplug.errors import CaptureError
from onnxplug.functionalize.effects import aliased_arguments, argument_of, effects_of, owns_results, written_argument
from onnxplug.functionalize.memory import Alias, Storage, TensorState
from onnxplug.functionalize.views import VIEWS, invert_item, is_inactive_dropout
from onnxplug.torch_private import FakeTensor, OpOverload, pytree

#: What makes a tensor another size, in place.
_RESIZES = frozenset([torch.ops.aten.resize.default, torch.ops.aten.resize_as.default])


class Functionalized(NamedTuple):
    """A graph made functional.

    Attributes:
        graph: The functional copy.
        nodes: Nodes of the old graph to those of the copy.
        mutated: Placeholders of the old graph that were written, to the nodes of the copy that they end with.
    """

    graph: torch.fx.Graph
    nodes: dict[torch.fx.Node, torch.fx.Node]
    mutated: dict[torch.fx.Node, torch.fx.Node]


def make_functional(graph: torch.fx.Graph) -> Functionalized | None:
    """Copies a graph with its in-place operators made functional.

    Returns:
        The copy; ``None`` where the pass can't tell what a write changes: an operator without functional form writes, or
        something is written or read later of which it isn't known whether it is a view (``reshape``, ``contiguous``).
    """
    return _Pass(graph).run()


class _Pass:
    """One run of :func:`make_functional`."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.graph = graph
        self.copy = torch.fx.Graph(owning_module=graph.owning_module)
        self.nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tensors: dict[torch.fx.Node, TensorState] = {}
        #: Nodes that may alias these storages, it isn't known how.
        self.unknown: dict[torch.fx.Node, tuple[Storage, ...]] = {}
        self.items: dict[tuple[torch.fx.Node, Any], torch.fx.Node] = {}
        self.written: dict[Storage, None] = {}
        self.last_use: dict[torch.fx.Node, int] = {}
        #: Tensors that were given the memory of another one.
        self.replaced: set[TensorState] = set()

    def run(self) -> Functionalized | None:
        """The functional copy, or ``None``."""
        for index, node in enumerate(self.graph.nodes):
            for argument in node.all_input_nodes:
                self.last_use[argument] = index
        for index, node in enumerate(self.graph.nodes):
            effects = effects_of(node.target) if node.op == "call_function" else None
            if effects is not None and effects.written:
                if not self._write(node, index):
                    return None
                continue
            self.nodes[node] = self.copy.node_copy(node, self.read)
            if effects is not None and effects.aliases:
                self._record_alias(node)
        self.copy._codegen = self.graph._codegen
        written = [storage.source for storage in self.written]
        replaced = [node for node, tensor in self.tensors.items() if tensor in self.replaced]
        mutated = {node: self.read(node) for node in (*written, *replaced) if node.op == "placeholder"}
        return Functionalized(self.copy, self.nodes, mutated)

    def read(self, node: torch.fx.Node) -> torch.fx.Node:
        """What a node of the old graph holds now."""
        tensor = self.tensors.get(node)
        return self.nodes[node] if tensor is None else self._value(tensor.alias)

    def _value(self, alias: Alias) -> torch.fx.Node:
        """The node that holds an alias now: views are taken again of a storage that was written since."""
        stale = []
        upper = alias
        while upper.version != upper.storage.version:
            stale.append(upper)
            assert upper.base is not None
            upper = upper.base
        for view in reversed(stale):
            assert view.base is not None
            assert view.view is not None
            target, args, kwargs = view.view
            args, kwargs = torch.fx.map_arg((args, kwargs), self.read)
            view.value = self.copy.call_function(target, (view.base.value, *args), kwargs)
            view.value.meta = dict(view.meta)
            view.version = view.storage.version
        return alias.value

    def _tensor(self, node: torch.fx.Node) -> TensorState:
        """The tensor that a node is; a storage of its own unless it is known to be a view."""
        found = self.tensors.get(node)
        if found is None:
            found = self.tensors[node] = TensorState(Alias(Storage(node), self.nodes[node], node.meta))
        return found

    # -- nodes that alias ----------------------------------------------------------------------------------------------

    def _record_alias(self, node: torch.fx.Node) -> None:
        """Records which storage a node's results alias."""
        base = node.args[0] if node.args else None
        if is_inactive_dropout(node) and isinstance(base, torch.fx.Node) and base not in self.unknown:
            self.tensors[node] = self._tensor(base)
        elif node.target not in VIEWS or not isinstance(base, torch.fx.Node):
            bases = aliased_arguments(node)
            if bases or not isinstance(node.target, OpOverload):
                self._record_unknown(node, bases)
        elif base in self.unknown:
            self._record_unknown(node, [base])
        elif node.target is operator.getitem and base not in self.tensors:
            # A result of an operator with several.
            if not owns_results(base):
                self._record_unknown(node, [base])
                return
            first = self.items.setdefault((base, node.args[1]), node)
            self.tensors[node] = self._tensor(first)
        else:
            viewed = self._tensor(base).alias
            viewed.storage.shared = True
            view = (node.target, node.args[1:], dict(node.kwargs))
            self.tensors[node] = TensorState(Alias(viewed.storage, self.nodes[node], node.meta, viewed, view))

    def _record_unknown(self, node: torch.fx.Node, bases: list[torch.fx.Node]) -> None:
        """Records that a node may alias what ``bases`` alias."""
        storages: dict[Storage, None] = {}
        for base in bases:
            found = self.unknown.get(base)
            storages.update(dict.fromkeys((self._tensor(base).alias.storage,) if found is None else found))
        self.unknown[node] = tuple(storages)
        for storage in storages:
            storage.shared = True
            storage.last_unknown_read = max(storage.last_unknown_read, self.last_use.get(node, -1))

    # -- writes --------------------------------------------------------------------------------------------------------

    def _write(self, node: torch.fx.Node, index: int) -> bool:
        """Makes one in-place operator functional; whether that can be done."""
        if node.target is torch.ops.aten.set_.source_Tensor:
            return self._replace(node)
        target = written_argument(node)
        if target is None or effects_of(node.target).functional is None or target in self.unknown:
            return False
        tensor = self._tensor(target)
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            return self._change_view(node, tensor)
        if tensor.alias.storage.last_unknown_read > index:
            return False
        new = functional_call(self.copy, node, self.read)
        self.nodes[node] = new
        self.tensors[node] = tensor
        return self._store(tensor.alias, new, node.meta)

    def _replace(self, node: torch.fx.Node) -> bool:
        """Gives a tensor the memory of another one (``x.set_(y)``); whether that can be done.

        Views of the tensor that were taken before keep its old memory.
        """
        target, source = argument_of(node, 0, "self"), argument_of(node, 1, "source")
        if target in self.unknown:
            return False
        tensor = self._tensor(target)
        unknown = self.unknown.get(source)
        if unknown is None:
            tensor.alias = self._tensor(source).alias
            tensor.alias.storage.shared = True
        else:
            # It may be a copy or a view: neither it nor what it may be a view of can be written from here on.
            tensor.alias = Alias(Storage(source), self.nodes[source], source.meta)
            for storage in (tensor.alias.storage, *unknown):
                storage.shared = True
                storage.last_unknown_read = len(self.graph.nodes)
        self.replaced.add(tensor)
        self.tensors[node] = tensor
        self.nodes[node] = self._value(tensor.alias)
        return True

    def _change_view(self, node: torch.fx.Node, tensor: TensorState) -> bool:
        """Makes an operator functional that changes how a tensor views its storage (``t_``), not what the storage holds."""
        alias = tensor.alias
        functional = effects_of(node.target).functional
        if functional in _RESIZES and not alias.storage.shared and alias.storage.source.op != "placeholder":
            # Nothing else aliases the storage: another tensor takes its place.
            value = self.nodes[node] = functional_call(self.copy, node, self.read)
            self.tensors[node] = tensor
            return self._store(alias, value, node.meta)
        if (
            functional is None
            or functional not in VIEWS
            or (alias.base is None and alias.storage.source.op == "placeholder")
        ):
            return False
        if functional is not torch.ops.aten.detach.default:
            value = self.copy.call_function(
                functional,
                (self._value(alias), *torch.fx.map_arg(node.args[1:], self.read)),
                torch.fx.map_arg(node.kwargs, self.read),
            )
            value.meta = dict(node.meta)
            view = (functional, node.args[1:], dict(node.kwargs))
            tensor.alias = Alias(alias.storage, value, node.meta, alias, view)
        self.tensors[node] = tensor
        self.nodes[node] = tensor.alias.value
        return True

    def _store(self, alias: Alias, new: torch.fx.Node, meta: dict[str, Any]) -> bool:
        """Writes a new value of an alias through to its storage; whether that can be done."""
        changed = [(alias, new)]
        while alias.base is not None:
            base, whole = alias.base, self._inverted(alias, new)
            if whole is None:
                return False
            if alias.view is not None and alias.view[0] is operator.getitem:
                assert base.base is not None
                base = base.base
            if whole is not new:
                whole.meta = {**meta, "val": base.meta["val"]}
            new, alias = whole, base
            changed.append((alias, new))
        storage = alias.storage
        storage.version += 1
        self.written[storage] = None
        for written, value in changed:
            written.value, written.version = value, storage.version
        return True

    def _inverted(self, alias: Alias, new: torch.fx.Node) -> torch.fx.Node | None:
        """The value of an alias's base, or for an item of the list's base, when the alias's own value is ``new``."""
        assert alias.view is not None
        assert alias.base is not None
        base = alias.base
        target, args, kwargs = alias.view
        if target is operator.getitem:
            if base.view is None or base.base is None:
                return None
            split, rest, named = base.view
            if named:
                return None
            given = torch.fx.map_arg(rest, self.read)
            return invert_item(self.copy, self._value(base.base), new, split, given, args[0])
        inverse = VIEWS[target]
        if inverse is None or kwargs:
            return None
        return inverse(self.copy, self._value(base), new, torch.fx.map_arg(args, self.read), base.meta["val"])


def functional_call(copy: torch.fx.Graph, node: torch.fx.Node, read: Any) -> torch.fx.Node:
    """Appends the functional form of an in-place operator, with a cast where that form promotes.

    Args:
        copy: The graph to append to.
        node: The in-place operator, in the old graph.
        read: What a node of the old graph is in the new one.
    """
    functional = effects_of(node.target).functional
    assert functional is not None
    args = torch.fx.map_arg(node.args, read)
    kwargs = torch.fx.map_arg(node.kwargs, read)
    value = copy.call_function(functional, args, kwargs)
    value.meta = dict(node.meta)
    before = written_argument(node)
    wanted = before.meta.get("val") if before is not None else None
    promoted = _promoted_result(functional, args, kwargs)
    if isinstance(wanted, torch.Tensor) and promoted is not None and promoted.dtype != wanted.dtype:
        # The functional form promotes; the in-place one writes back in the dtype of what it writes to.
        value.meta["val"] = promoted
        value = copy.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": wanted.dtype})
        value.meta = dict(node.meta)
    return value


def _promoted_result(target: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
    """The fake result of a functional call whose arguments differ in dtype; ``None`` when they don't."""
    found = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.fx.Node)]
    tensors = [a.meta["val"] for a in found if isinstance(a.meta.get("val"), torch.Tensor)]
    if len({t.dtype for t in tensors}) < 2:
        return None
    fake = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    mode = next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)
    try:
        with mode if mode is not None else torch.no_grad(), torch.no_grad():
            result = target(*fake[0], **fake[1])
    except Exception as error:
        raise CaptureError(f"{target} can't be made functional: {error}") from error
    return result if isinstance(result, torch.Tensor) else None
