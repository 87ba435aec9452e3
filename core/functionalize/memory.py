"""Memory during functionalization: storages, the aliases of them, and the tensors that are aliases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from onnxplug.functionalize.effects import aliased_arguments, effects_of, hides_writes, written_arguments
from onnxplug.functionalize.views import Inverse

#: A key of an input's metadata: the example is a part of a larger memory, but the capture copied only the example.
#: ``True`` where the example has gaps, ``False`` where it only begins later in the memory.
PART_OF_MEMORY = "onnxplug.part_of_memory"


def part_of_memory(tensors: Iterable[torch.Tensor]) -> bool | None:
    """The value of :data:`PART_OF_MEMORY` for examples; ``None`` where each begins its memory and has no gaps."""
    part: bool | None = None
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            continue
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel() and extent != tensor.numel():
            return True
        if tensor.storage_offset():
            part = False
    return part


class Storage:
    """A piece of memory.

    Attributes:
        source: The node that made it.
        version: How often it was written.
        last_unknown_read: Index of the last node that reads a tensor which may alias the storage in an unknown way; -1 where
            there is none.
        shared: Whether another tensor aliases it, or may.
        last_read: Index of the last node that reads an alias or possible alias of the storage, as far as is known yet.
        resized: Whether a resize_ gave it another size.
    """

    __slots__ = ("last_read", "last_unknown_read", "resized", "shared", "source", "version")

    def __init__(self, source: torch.fx.Node, last_read: int) -> None:
        self.source = source
        self.last_read = last_read
        self.version = 0
        self.last_unknown_read = -1
        self.shared = False
        self.resized = False


class View(NamedTuple):
    """A view operator's call, to be repeated on another value of its base.

    Attributes:
        args: The arguments after the first.
        inverse: Carries a write to the base; ``None`` where none can.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inverse: Inverse | None


class Alias:
    """A storage as one tensor sees it: whole, or through a view of another alias (``base``).

    Attributes:
        base: The alias that it is a view of; ``None`` for the whole storage.
        view: The call that makes it of its base.
        meta: Metadata of the node that made it first.
        value: The node of the new graph with its value at the storage's ``version``.
    """

    __slots__ = ("base", "meta", "storage", "value", "version", "view")

    def __init__(
        self,
        storage: Storage,
        value: torch.fx.Node,
        meta: dict[str, Any],
        base: Alias | None = None,
        view: View | None = None,
    ) -> None:
        self.storage = storage
        self.value = value
        self.meta = meta
        self.base = base
        self.view = view
        self.version = storage.version


class TensorState:
    """A tensor object of the program: every in-place operator returns its argument, the same object.

    Attributes:
        alias: Its present alias; an operator such as ``t_`` gives it another.
    """

    __slots__ = ("alias",)

    def __init__(self, alias: Alias) -> None:
        self.alias = alias


class Families:
    """The tensors of a graph in families that may share memory, with the last write to each family."""

    def __init__(self, nodes: Iterable[torch.fx.Node]) -> None:
        self._parents: dict[torch.fx.Node, torch.fx.Node] = {}
        writes: list[tuple[int, torch.fx.Node]] = []
        for index, node in enumerate(nodes):
            if node.op != "call_function":
                continue
            effects = effects_of(node.target)
            related = aliased_arguments(node) if effects.aliases else []
            if effects.written or hides_writes(node):
                written = written_arguments(node)
                writes += [(index, tensor) for tensor in written]
                if effects.aliases:
                    related = [*related, *written]
                if node.target is torch.ops.aten.set_.source_Tensor:
                    related = node.all_input_nodes
            for other in related:
                self._parents[self._root(node)] = self._root(other)
        self._last = {self._root(tensor): index for index, tensor in writes}

    def _root(self, node: torch.fx.Node) -> torch.fx.Node:
        path = []
        while (parent := self._parents.get(node)) is not None and parent is not node:
            path.append(node)
            node = parent
        for passed in path:
            self._parents[passed] = node
        return node

    def last_write(self, node: torch.fx.Node) -> int:
        """Index of the last node that writes a tensor which may share memory with a node's results; -1 where there is none."""
        return self._last.get(self._root(node), -1)
