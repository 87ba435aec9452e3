"""Memory during functionalization: storages, the aliases of them, and the tensors that are aliases."""

from __future__ import annotations

from typing import Any

import torch


class Storage:
    """A piece of memory.

    Attributes:
        source: The node that made it.
        version: How often it was written.
        last_unknown_read: Index of the last node that reads something of which it isn't known whether it aliases the
            storage; -1 where there is none.
        shared: Whether something else aliases it, or may.
    """

    __slots__ = ("last_unknown_read", "shared", "source", "version")

    def __init__(self, source: torch.fx.Node) -> None:
        self.source = source
        self.version = 0
        self.last_unknown_read = -1
        self.shared = False


class Alias:
    """A storage as one tensor sees it: whole, or through a view of another alias (``base``).

    Attributes:
        storage: The storage.
        base: The alias that it is a view of; ``None`` for the whole storage.
        view: The call that makes it of its base: operator, arguments after the first one, keywords.
        meta: Metadata of the node that made it first.
        value: The node of the new graph that holds it, as the storage was at ``version``.
    """

    __slots__ = ("base", "meta", "storage", "value", "version", "view")

    def __init__(
        self,
        storage: Storage,
        value: torch.fx.Node,
        meta: dict[str, Any],
        base: Alias | None = None,
        view: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None,
    ) -> None:
        self.storage = storage
        self.value = value
        self.meta = meta
        self.base = base
        self.view = view
        self.version = storage.version


class TensorState:
    """A tensor object of the program: every in-place operator returns the object that it is given.

    Attributes:
        alias: What it sees at present; an operator such as ``t_`` gives it another one.
    """

    __slots__ = ("alias",)

    def __init__(self, alias: Alias) -> None:
        self.alias = alias
