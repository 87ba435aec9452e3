"""A rewrite: one improvement of a finished graph, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

    from onnxplug.build.builder import GraphBuilder

Apply = Callable[["GraphBuilder", "ir.Node"], Any]


@dataclass(frozen=True)
class Rewrite:
    """Replaces a node, and what only it needed, by other nodes that compute the same.

    Attributes:
        name: What errors and reports call it.
        op: Operator type of the node at the root of the pattern: ``"Add"``, or ``"com.acme::Scale"`` in another domain.
        apply: ``(g, node) -> Value | Sequence[Value] | None``: emits the replacement through ``g`` and returns one value
            an output of the node, or returns ``None`` and leaves the graph alone.
        opset: Inclusive range of ai.onnx versions.
        domains: Other domains, with the least version, that the target opsets must include.
    """

    name: str
    op: str
    apply: Apply
    opset: tuple[int | None, int | None] = (None, None)
    domains: Mapping[str, int] = field(default_factory=dict)

    def applies_to(self, opsets: Mapping[str, int]) -> bool:
        """Whether the target opsets meet the rewrite's conditions."""
        since, until = self.opset
        opset = opsets[""]
        if (since is not None and opset < since) or (until is not None and opset > until):
            return False
        return all(opsets.get(name, 0) >= version for name, version in self.domains.items())
