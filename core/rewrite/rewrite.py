"""A rewrite: one improvement of a finished graph, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnxplug.registry.target import DEFAULT_RUNTIME, checked_names, closeness

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxplug.build.builder import GraphBuilder

Apply = Callable[["GraphBuilder", "ir.Node"], Any]


@dataclass(frozen=True)
class Rewrite:
    """Replaces a node, and the nodes that only it needed, by other nodes that compute the same.

    Attributes:
        name: Its name in errors and reports.
        op: Operator type of the node at the root of the pattern: ``"Add"``, or ``"com.acme::Scale"`` in another domain.
        apply: ``(g, node) -> Value | Sequence[Value] | Mapping[Value, Value] | None``: emits the replacement through ``g`` and
            returns one value an output of the node. To replace the results of other nodes of the same graph too, it returns
            a mapping from each old value to its new value, which must not depend on the old; ``{old: g.scope.identity(old)}`` puts
            the copy among the graph's outputs and nowhere else. ``None`` leaves the graph alone.
        opset: Inclusive range of ai.onnx versions.
        domains: Other domains, with the least version, that the target opsets must include.
        target: Names of the runtimes for which it holds (``"onnxruntime"``, ``"onnxruntime:cpu"``); ``None`` for all.
        exact: ``True``: only in exports with exact special values; ``False``: only in others; ``None``: always.
        reason: Why it is bound to these conditions.
        when: ``(node) -> bool``: a cheap test of the node and its neighbours, before ``apply`` is called at all. It must be
            true wherever ``apply`` would replace something.

    Raises:
        UsageError: A target's name is malformed.
    """

    name: str
    op: str
    apply: Apply
    opset: tuple[int | None, int | None] = (None, None)
    domains: Mapping[str, int] = field(default_factory=dict)
    target: str | Sequence[str] | None = None
    exact: bool | None = None
    reason: str = ""
    when: Callable[[ir.Node], bool] | None = None

    def __post_init__(self) -> None:
        checked_names(f"Rewrite {self.name!r}", self.target)

    @property
    def targets(self) -> tuple[str, ...]:
        """The runtimes for which it holds; none when it holds for all."""
        return checked_names(f"Rewrite {self.name!r}", self.target)

    def applies_to(self, opsets: Mapping[str, int], runtime: str | None = DEFAULT_RUNTIME, exact: bool = False) -> bool:
        """Whether an export meets the rewrite's conditions.

        Args:
            opsets: The version of each domain; ``""`` is ai.onnx.
            runtime: The runtime that the export is made for; ``None`` is portable ONNX.
            exact: Whether special values must be exact.
        """
        since, until = self.opset
        opset = opsets[""]
        if (since is not None and opset < since) or (until is not None and opset > until):
            return False
        if closeness(self.targets, runtime) is None or self.exact not in (None, exact):
            return False
        return all(opsets.get(name, 0) >= version for name, version in self.domains.items())
