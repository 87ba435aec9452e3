"""In-place operators made functional in one linear pass over the graph.

Storages that are written are followed through their aliases: a write to a view reaches the base by the view's inverse
(``select_scatter`` for ``select``), and a view that is read after a write is taken again, of the base's new value.

An example, ``y = x + 1; y[0].mul_(2); return y.sum(1)``::

    add = aten.add(x, 1)                                  a new storage, of which add is the base
    select = aten.select(add, 0, 0)                       an alias of it
    mul = aten.mul(select, 2)                             was aten.mul_(select, 2)
    select_scatter = aten.select_scatter(add, mul, 0, 0)  the content of the storage after the write
    sum = aten.sum(select_scatter, [1])                   was aten.sum(add, [1])
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from onnxplug.capture.locations import source_location
from onnxplug.errors import CaptureError
from onnxplug.functionalize.effects import (
    aliased_arguments,
    argument_of,
    branches_own_results,
    effects_of,
    hides_writes,
    owns_results,
    returns_itself,
    written_arguments,
)
from onnxplug.functionalize.forms import functional_call, functional_form, is_expanded, is_of_lists
from onnxplug.functionalize.layout import COPY, PERMUTED, SAME, Sharing, filled_order, sharing
from onnxplug.functionalize.memory import Alias, Families, Storage, TensorState, View
from onnxplug.functionalize.sizes import Ranges
from onnxplug.functionalize.views import VIEWS, invert_item, no_change, reshaped, returns_argument
from onnxplug.torch_private import OpOverload

aten = torch.ops.aten

#: The operator that resizes a tensor in place.
_RESIZES = frozenset([aten.resize.default, aten.resize_as.default])


def _keep_elements(value: torch.fx.Node, node: torch.fx.Node, is_again: bool) -> None:
    """Gives a resize the elements that an earlier resize left out: resizing changes a tensor's extent in memory, not the memory.

    Args:
        value: The functional call, changed in place.
        is_again: Whether the memory was resized before.

    Raises:
        CaptureError: The tensor was written meanwhile and becomes larger: no tensor has the elements of both.
    """
    source: Any = value.args[0]
    if is_again and source.target not in _RESIZES:
        before, after = (_count(n) for n in (source, node))
        if before is None or after is None or after > before:
            raise CaptureError(
                f"the call of resize_ at {source_location(node) or 'unknown source'} makes a tensor larger that was made smaller "
                "and written before",
                hint="Keep the larger tensor, and write a view of it.",
            )
    while source.target in _RESIZES:
        source = source.args[0]
    value.args = (source, *value.args[1:])


def _count(node: torch.fx.Node) -> int | None:
    """The number of elements, if it is static."""
    val = node.meta.get("val")
    count = val.numel() if isinstance(val, torch.Tensor) else None
    return count if isinstance(count, int) else None


class Functionalized(NamedTuple):
    """A graph made functional.

    Attributes:
        nodes: Nodes of the old graph to nodes of the copy.
        mutated: Placeholders of the old graph that were written, to the nodes of the copy with their final values.
        conditions: The conditions on sizes under which the copy is right, each with the node of the old graph that is a view
            for some sizes and a copy for others.
    """

    graph: torch.fx.Graph
    nodes: dict[torch.fx.Node, torch.fx.Node]
    mutated: dict[torch.fx.Node, torch.fx.Node]
    conditions: list[tuple[Any, torch.fx.Node]]


def make_functional(graph: torch.fx.Graph, ranges: Ranges | None = None) -> Functionalized | None:
    """Copies a graph with its in-place operators made functional.

    Args:
        ranges: The sizes that the model may have; a size without a range may be any.

    Returns:
        The copy; ``None`` where the pass can't tell which tensors a write changes: an operator without functional form writes,
        or a tensor that may or may not be a view is written, or read after a write.
    """
    return _Pass(graph, ranges or {}).run()


class _Pass:
    """One run of :func:`make_functional`."""

    def __init__(self, graph: torch.fx.Graph, ranges: Ranges) -> None:
        self.graph = graph
        self.ranges = ranges
        self.families = Families(graph.nodes)
        self.conditions: list[tuple[Any, torch.fx.Node]] = []
        #: Nodes whose results are memory of their own, although their operator may give views.
        self.own: set[torch.fx.Node] = set()
        #: Calls to the tensors that they write and return.
        self.returned: dict[torch.fx.Node, list[torch.fx.Node]] = {}
        self.copy = torch.fx.Graph(owning_module=graph.owning_module)
        self.nodes: dict[torch.fx.Node, torch.fx.Node] = {}
        self.tensors: dict[torch.fx.Node, TensorState] = {}
        #: Nodes that may alias storages in an unknown way, with these storages.
        self.unknown: dict[torch.fx.Node, tuple[Storage, ...]] = {}
        self.items: dict[tuple[torch.fx.Node, Any], torch.fx.Node] = {}
        self.written: dict[Storage, None] = {}
        self.last_use: dict[torch.fx.Node, int] = {}
        #: Tensors that took the memory of another tensor.
        self.replaced: set[TensorState] = set()

    def run(self) -> Functionalized | None:
        """The functional copy, or ``None``."""
        for index, node in enumerate(self.graph.nodes):
            for argument in node.all_input_nodes:
                self.last_use[argument] = index
        for index, node in enumerate(self.graph.nodes):
            effects = effects_of(node.target) if node.op == "call_function" else None
            if effects is not None and (effects.written or hides_writes(node)):
                if not self._write(node, index):
                    return None
                continue
            if node.target is operator.getitem and node.args[0] in self.returned:
                self._bind(node, self._tensor(self.returned[node.args[0]][node.args[1]]))
                self.nodes[node] = self.read(node)
                continue
            self.nodes[node] = self.copy.node_copy(node, self.read)
            if effects is not None and effects.aliases:
                self._record_alias(node, index)
        self.copy._codegen = self.graph._codegen
        changed = {storage.source for storage in self.written}
        changed |= {node for node, tensor in self.tensors.items() if tensor in self.replaced}
        mutated = {node: self.read(node) for node in self.graph.nodes if node.op == "placeholder" and node in changed}
        return Functionalized(self.copy, self.nodes, mutated, self.conditions)

    def read(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node of the copy with a node's present value."""
        tensor = self.tensors.get(node)
        return self.nodes[node] if tensor is None else self._value(tensor.alias)

    def _as_it_was(self, node: torch.fx.Node) -> torch.fx.Node:
        """The node of the copy with the axes that a view's argument had when the view was taken: ``y`` of ``x.view_as(y)``."""
        return self.nodes[node]

    def _value(self, alias: Alias) -> torch.fx.Node:
        """The node with an alias's present value: views are taken again of a storage that was written since."""
        stale = []
        upper = alias
        while upper.version != upper.storage.version:
            stale.append(upper)
            assert upper.base is not None
            upper = upper.base
        for view in reversed(stale):
            assert view.base is not None
            assert view.view is not None
            args, kwargs = torch.fx.map_arg((view.view.args, view.view.kwargs), self._as_it_was)
            view.value = self.copy.call_function(view.view.target, (view.base.value, *args), kwargs)
            view.value.meta = dict(view.meta)
            view.version = view.storage.version
        return alias.value

    def _tensor(self, node: torch.fx.Node) -> TensorState:
        """The tensor of a node; it has a storage of its own unless it is known to be a view."""
        state = self.tensors.get(node)
        if state is None:
            storage = Storage(node, self.last_use.get(node, -1))
            state = self.tensors[node] = TensorState(Alias(storage, self.nodes[node], node.meta))
        return state

    def _bind(self, node: torch.fx.Node, tensor: TensorState) -> None:
        """Records the tensor of a node."""
        self.tensors[node] = tensor
        storage = tensor.alias.storage
        storage.last_read = max(storage.last_read, self.last_use.get(node, -1))

    # -- nodes that alias ----------------------------------------------------------------------------------------------

    def _record_alias(self, node: torch.fx.Node, index: int) -> None:
        """Records the storage that a node's results alias."""
        base = node.args[0] if node.args else None
        if returns_argument(node) and isinstance(base, torch.fx.Node) and base not in self.unknown:
            self._bind(node, self._tensor(base))
        elif node.target not in VIEWS or not isinstance(base, torch.fx.Node):
            bases = aliased_arguments(node)
            if not isinstance(node.target, OpOverload) and branches_own_results(node):
                self.own.add(node)
            elif bases or not isinstance(node.target, OpOverload):
                self._record_possible(node, index, bases)
        elif base in self.unknown:
            self._record_possible(node, index, [base])
        elif node.target is aten.as_strided.default:
            self._record_strided(node, base, index)
        elif node.target is operator.getitem and base not in self.tensors:
            # A result of an operator with several.
            if not owns_results(base) and base not in self.own:
                self._record_possible(node, index, [base])
                return
            first = self.items.setdefault((base, node.args[1]), node)
            self._bind(node, self._tensor(first))
        else:
            args, kwargs = arguments_after_first(node)
            target = node.target
            if target is aten.view.default:
                # The new graph's values may have other strides once they are written, at which `view` would be refused.
                target = aten.reshape.default
                if self._tensor(base).alias.storage.version:
                    self.nodes[node].target = target
            self._record_view(node, base, View(target, args, kwargs, VIEWS[node.target]))

    def _record_view(self, node: torch.fx.Node, base: torch.fx.Node, view: View) -> None:
        """Records that a node is a view of a tensor."""
        viewed = self._tensor(base).alias
        viewed.storage.shared = True
        self._bind(node, TensorState(Alias(viewed.storage, self.nodes[node], node.meta, viewed, view)))

    def _record_strided(self, node: torch.fx.Node, base: torch.fx.Node, index: int) -> None:
        """Records that a node views the memory of a tensor's whole storage, which must have no gaps."""
        viewed = whole = self._tensor(base).alias
        while whole.base is not None:
            whole = whole.base
        args, kwargs = arguments_after_first(node)
        size, stride, offset = (*args, *kwargs.values(), None)[:3]
        if offset is None:
            offset = viewed.meta["val"].storage_offset()
        val = whole.meta["val"]
        if isinstance(offset, torch.SymInt) or val.dtype != viewed.meta["val"].dtype:
            self._record_possible(node, index, [base])
            return
        new = self.nodes[node]
        new.args, new.kwargs = (self._value(whole), *torch.fx.map_arg((size, stride, offset), self.read)), {}
        order = filled_order(val)
        if order is None:
            # It may reach elements of the memory that the storage's tensor lacks.
            self._record_possible(node, index, [base])
            return
        # A row of the elements, whatever the strides of the new graph's values are.
        by_axes = View(aten.permute.default, (order,), {}, VIEWS[aten.permute.default])
        permuted = self._derived(whole, by_axes, new) if order != sorted(order) else whole
        elements = self._derived(permuted, View(aten.reshape.default, ([-1],), {}, reshaped), new)
        new.update_arg(0, elements.value)
        whole.storage.shared = True
        view = View(node.target, (size, stride, offset), {}, VIEWS[node.target])
        self._bind(node, TensorState(Alias(whole.storage, new, node.meta, elements, view)))

    def _derived(self, base: Alias, view: View, before: torch.fx.Node) -> Alias:
        """A view of an alias that the program doesn't make itself."""
        with self.copy.inserting_before(before):
            value = self.copy.call_function(view.target, (base.value, *view.args))
        value.meta = {**before.meta, "val": view.target(base.meta["val"], *view.args)}
        return Alias(base.storage, value, value.meta, base, view)

    def _record_possible(self, node: torch.fx.Node, index: int, bases: list[torch.fx.Node]) -> None:
        """Records a node that may be a view of ``bases``, or a copy."""
        if self.families.last_write(node) > index and bases:
            if not any(self._is_read_after(base, index) for base in bases):
                self.own.add(node)
                return
            layout = sharing(node, bases[0], self.ranges) if len(bases) == 1 and bases[0] not in self.unknown else None
            if layout is not None:
                self.conditions += [(condition, node) for condition in layout.conditions]
                if layout.kind == COPY:
                    self.own.add(node)
                elif layout.kind == SAME and returns_itself(node):
                    self._bind(node, self._tensor(bases[0]))
                else:
                    self._record_view(node, bases[0], _view_of(node, layout))
                return
        self._record_unknown(node, bases)

    def _storages(self, node: torch.fx.Node) -> tuple[Storage, ...]:
        """The storages that a node aliases, or may."""
        storages = self.unknown.get(node)
        return (self._tensor(node).alias.storage,) if storages is None else storages

    def _is_read_after(self, base: torch.fx.Node, index: int) -> bool:
        """Whether a node that may share a tensor's memory is read after a node, or by the caller of the graph."""
        return any(
            storage.last_read > index or storage.source.op != "call_function" for storage in self._storages(base)
        )

    def _record_unknown(self, node: torch.fx.Node, bases: list[torch.fx.Node]) -> None:
        """Records that a node may alias the storages of ``bases``."""
        storages = dict.fromkeys(storage for base in bases for storage in self._storages(base))
        self.unknown[node] = tuple(storages)
        last_use = self.last_use.get(node, -1)
        for storage in storages:
            storage.shared = True
            storage.last_read = max(storage.last_read, last_use)
            storage.last_unknown_read = max(storage.last_unknown_read, last_use)

    # -- writes --------------------------------------------------------------------------------------------------------

    def _write(self, node: torch.fx.Node, index: int) -> bool:
        """Makes an in-place operator functional; returns whether it can."""
        if node.target is aten.set_.source_Tensor:
            return self._replace(node)
        written = written_arguments(node)
        if not written or any(tensor in self.unknown for tensor in written):
            return False
        tensors = [self._tensor(tensor) for tensor in written]
        if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
            return self._change_view(node, tensors[0])
        storages = {tensor.alias.storage for tensor in tensors}
        others = [n for n in node.all_input_nodes if n not in written and (n in self.tensors or n in self.unknown)]
        are_shared = is_expanded(node) and any(s in storages for n in others for s in self._storages(n))
        if is_of_lists(node.target) and (are_shared or not _are_apart(tensors)):
            raise CaptureError(
                f"the call of {node.target} at {source_location(node) or 'unknown source'} writes tensors that may share memory "
                "with each other, or with its other operands",
                hint="Write them one by one, as x.add_(...), or give clones.",
            )
        if any(storage.last_unknown_read > index for storage in storages) or not _are_apart(tensors):
            return False
        effects = effects_of(node.target)
        if are_shared:
            return False
        form = functional_form(self.copy, node, self.read, make_functional)
        if form is None:
            return False
        if form.result is not None:
            self.nodes[node] = form.result
            self.own.add(node)
        else:
            self.nodes[node] = form.values[0]
            if effects.aliases and isinstance(node.meta.get("val"), list | tuple):
                self.returned[node] = written
            elif effects.aliases:
                self._bind(node, tensors[0])
        return all(
            self._fits(tensor.alias, new) and self._store(tensor.alias, new, node.meta)
            for tensor, new in zip(tensors, form.values, strict=True)
        )

    def _fits(self, alias: Alias, new: torch.fx.Node) -> bool:
        """Whether a tensor can take a new value; an ``out=`` of another size is resized where it has no other alias."""
        before, after = (meta.get("val") for meta in (alias.meta, new.meta))
        if before is None or after is None or list(map(str, before.shape)) == list(map(str, after.shape)):
            return True
        storage = alias.storage
        if alias.base is not None or storage.shared or storage.source.op == "placeholder":
            return False
        alias.meta = new.meta
        return True

    def _replace(self, node: torch.fx.Node) -> bool:
        """Gives a tensor the memory of another tensor (``x.set_(y)``); returns whether it can.

        Views of the tensor that were taken before keep its old memory.
        """
        target, source = argument_of(node, 0, "self"), argument_of(node, 1, "source")
        if target in self.unknown:
            return False
        tensor = self._tensor(target)
        unknown = self.unknown.get(source)
        never = len(self.graph.nodes)
        if unknown is None:
            tensor.alias = self._tensor(source).alias
            tensor.alias.storage.shared = True
            tensor.alias.storage.last_read = never
        else:
            # It may be a copy or a view: neither it nor its possible bases can be written from here on.
            tensor.alias = Alias(Storage(source, never), self.nodes[source], source.meta)
            for storage in (tensor.alias.storage, *unknown):
                storage.shared = True
                storage.last_read = storage.last_unknown_read = never
        self.replaced.add(tensor)
        self.tensors[node] = tensor
        self.nodes[node] = self._value(tensor.alias)
        return True

    def _change_view(self, node: torch.fx.Node, tensor: TensorState) -> bool:
        """Makes an operator functional that changes a tensor's view of its storage (``t_``), not the storage's content."""
        alias = tensor.alias
        functional = effects_of(node.target).functional
        if functional in _RESIZES and not alias.storage.shared and alias.storage.source.op != "placeholder":
            # The storage has no other alias: another tensor replaces it.
            value = self.nodes[node] = functional_call(self.copy, node, self.read)
            _keep_elements(value, node, alias.storage.resized)
            alias.storage.resized = True
            self._bind(node, tensor)
            alias.meta = node.meta
            return self._store(alias, value, node.meta)
        if functional is None or functional not in VIEWS:
            return False
        if functional is not aten.detach.default:
            if alias.base is None and alias.storage.source.op == "placeholder":
                raise CaptureError(
                    f"the call of {node.target} at {source_location(node) or 'unknown source'} changes the axes of "
                    f"{alias.storage.source.name}, an input or a tensor that the model keeps",
                    hint="Take a view of it, as x = x.t().",
                )
            value = self.copy.call_function(
                functional,
                (self._value(alias), *torch.fx.map_arg(node.args[1:], self.read)),
                torch.fx.map_arg(node.kwargs, self.read),
            )
            value.meta = dict(node.meta)
            view = View(functional, tuple(node.args[1:]), dict(node.kwargs), VIEWS[functional])
            tensor.alias = Alias(alias.storage, value, node.meta, alias, view)
        self._bind(node, tensor)
        self.nodes[node] = tensor.alias.value
        return True

    def _store(self, alias: Alias, new: torch.fx.Node, meta: dict[str, Any]) -> bool:
        """Writes a new value of an alias through to its storage; whether that can be done."""
        changed = [(alias, new)]
        while alias.base is not None:
            base, whole = alias.base, self._inverted(alias, new)
            if whole is None:
                return False
            if alias.view is not None and alias.view.target is operator.getitem:
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
        args = torch.fx.map_arg(alias.view.args, self._as_it_was)
        if alias.view.target is operator.getitem:
            if base.view is None or base.base is None or base.view.kwargs:
                return None
            arguments = torch.fx.map_arg(base.view.args, self._as_it_was)
            return invert_item(self.copy, self._value(base.base), new, base.view.target, arguments, args[0], base.value)
        if alias.view.inverse is None:
            return None
        return alias.view.inverse(self.copy, self._value(base), new, args, base.meta["val"])


def _view_of(node: torch.fx.Node, layout: Sharing) -> View:
    """The view operator for a node that is a view here and may be a copy at other sizes."""
    if layout.kind == SAME:
        return View(aten.alias.default, (), {}, no_change)
    if layout.kind == PERMUTED:
        return View(aten.permute.default, (list(layout.order),), {}, VIEWS[aten.permute.default])
    args, kwargs = arguments_after_first(node)
    return View(node.target, args, kwargs, reshaped)


def arguments_after_first(node: torch.fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a view operator after its first, positional as far as its schema allows, and its keywords."""
    args, kwargs = list(node.args), dict(node.kwargs)
    schema = getattr(node.target, "_schema", None)
    for formal in schema.arguments[len(args) :] if schema is not None and kwargs else ():
        if formal.kwarg_only or not (formal.name in kwargs or formal.has_default_value()):
            break
        args.append(kwargs.pop(formal.name, formal.default_value))
    return tuple(args[1:]), kwargs


def _are_apart(tensors: Sequence[TensorState]) -> bool:
    """Whether the tensors that a call writes are known to have no element in common."""
    for i, first in enumerate(tensors):
        for second in tensors[:i]:
            if first.alias.storage is second.alias.storage and _may_overlap(first.alias, second.alias):
                return False
    return True


def _may_overlap(first: Alias, second: Alias) -> bool:
    """Whether two aliases of a storage may have an element in common, by the places of their first and last elements."""
    ranges = []
    for val in (first.meta["val"], second.meta["val"]):
        numbers = (*val.shape, *val.stride(), val.storage_offset())
        if not all(isinstance(n, int) for n in numbers):
            return True
        start = val.storage_offset()
        ranges.append((start, start + sum((n - 1) * step for n, step in zip(val.shape, val.stride(), strict=True))))
    return ranges[0][0] <= ranges[1][1] and ranges[1][0] <= ranges[0][1]
