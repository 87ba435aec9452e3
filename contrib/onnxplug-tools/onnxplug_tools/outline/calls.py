"""The module call that each node comes from: written as the FX graph is converted, read as modules become functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxplug.build.provenance import MODULE_CALL, NO_MODULE, STRICT_ROOT


@dataclass(frozen=True, slots=True, eq=False)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: The module's path in the model; empty for the model itself.
        class_name: The module's class with its Python module: ``"my.models.Block"``.
        around: The call that contains it; ``None`` for the model's own.
    """

    path: str
    class_name: str
    around: ModuleCall | None

    @property
    def short_name(self) -> str:
        """The class's name without its Python module."""
        return self.class_name.rpartition(".")[2]


class ModuleCalls:
    """The calls of modules in a captured program."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[ModuleCall | None, str], ModuleCall] = {}
        self._by_stack: dict[tuple[str, ...], str | None] = {}
        self._chains: list[tuple[ModuleCall, ...]] = []

    def of(self, stack: Mapping[str, tuple[str, Any]] | None) -> str | None:
        """A node's metadata about its call.

        Args:
            stack: The ``nn_module_stack`` of its FX node: a key for each call of a module to the module's path and class.

        Returns:
            A text for the node's metadata; ``None`` where the FX node belongs to no module.
        """
        if not stack:
            return None
        keys = tuple(stack)
        if keys not in self._by_stack:
            self._by_stack[keys] = self._entered(stack)
        return self._by_stack[keys]

    def _entered(self, stack: Mapping[str, tuple[str, Any]]) -> str | None:
        chain: list[ModuleCall] = []
        for key, (path, cls) in stack.items():
            if path in (STRICT_ROOT, NO_MODULE):
                continue
            around = chain[-1] if chain else None
            call = self._by_key.get((around, key))
            if call is None:
                name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
                call = ModuleCall(path.removeprefix(f"{STRICT_ROOT}."), name, around)
                self._by_key[around, key] = call
            chain.append(call)
        if not chain:
            return None
        self._chains.append(tuple(chain))
        return str(len(self._chains) - 1)

    def taken_from(self, node: ir.Node) -> tuple[ModuleCall, ...]:
        """The calls that contain a node, outermost first; removes them from the node's metadata."""
        number = node.metadata_props.pop(MODULE_CALL, None)
        return self._chains[int(number)] if number is not None else ()

    def class_names(self) -> set[str]:
        """The classes of the modules that were called."""
        return {call.class_name for call in self._by_key.values()}
