"""The builder's side of interpretation: the call under conversion, and what a converter asks of the interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Protocol

import onnx_ir as ir
import torch

from onnxplug.build.provenance import NOWHERE, Further, Provenance
from onnxplug.errors import UsageError


class Interpretation(Protocol):
    """Whoever walks the FX graph and converts its calls (``onnxplug.FxNode`` objects)."""

    def convert(self, call: Any) -> Any:
        """What the first rule that doesn't decline returns for a call."""

    def has_rule(self, call: Any) -> bool:
        """Whether some rule applies to a call."""

    def inline(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Converts a subgraph in place."""

    def value_of(self, argument: Any) -> Any:
        """What an FX argument became."""

    def dims(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The ONNX dimensions of a fake tensor."""

    def dim(self, size: int | torch.SymInt) -> Any:
        """The ONNX dimension of a size of torch's."""


class Converting:
    """While it holds, a call is the builder's current one: errors name it, and nodes come from it."""

    __slots__ = ("_after", "_before", "_builder")

    def __init__(self, builder: CallMixin, current: Any, provenance: Provenance) -> None:
        self._builder = builder
        self._after = current, provenance

    def __enter__(self) -> None:
        builder = self._builder
        self._before = builder.current, builder.provenance
        builder.current, builder.provenance = self._after

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._builder.current, self._builder.provenance = self._before


class CallMixin:
    """What :class:`GraphBuilder` knows of the call under conversion.

    Attributes:
        current: The call under conversion, ``None`` between calls.
        provenance: Where every node comes from that is emitted.
        provenance_of: Node to where it comes from.
        package: The distribution whose rule converts it; ``None`` for the builtin ones.
        made_by: Node to the distribution whose rule made it, without those of builtin rules.
    """

    def __init__(self) -> None:
        self.current: Any = None
        self.provenance: Provenance = NOWHERE
        self.provenance_of: dict[ir.Node, Provenance] = {}
        self.package: str | None = None
        self.made_by: dict[ir.Node, str] = {}
        self._interpretation: Interpretation | None = None
        super().__init__()

    def converting(self, call: Any, provenance: Provenance) -> Converting:
        """A context in which a call is the current one; afterwards the one before it is again.

        Args:
            call: The call under conversion.
            provenance: Where every node comes from that is emitted meanwhile.
        """
        return Converting(self, call, provenance)

    @contextmanager
    def annotated(self, properties: Mapping[str, str]) -> Iterator[None]:
        """A context in which nodes bear further metadata."""
        with Converting(self, self.current, Further(self.provenance, properties)):
            yield

    def attach(self, interpretation: Interpretation) -> None:
        """Says who converts calls."""
        self._interpretation = interpretation

    def _interpreter(self) -> Interpretation:
        if self._interpretation is None:
            raise UsageError("no FX graph is under conversion: calls are converted by an interpreter")
        return self._interpretation

    # -- what converters use -------------------------------------------------------------------------------------------

    def convert(self, call: Any) -> Any:
        """Converts a call that was made of the current one: ``g.convert(node.part("real"))``.

        Args:
            call: The call (:class:`onnxplug.FxNode`).

        Returns:
            What the first rule returns that does not decline.

        Raises:
            Decline: No rule translates it; the converter that asks for it declines too unless it handles that.
        """
        return self._interpreter().convert(call)

    def call_next(self, node: Any) -> Any:
        """Converts the current call by the next rule, or by its decomposition when no rule is left.

        Args:
            node: The converter's own ``node``.

        Returns:
            What that rule or decomposition returns.
        """
        return self._interpreter().convert(node)

    def has_rule(self, call: Any) -> bool:
        """Whether some rule applies to a call."""
        return self._interpreter().has_rule(call)

    def inline(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Converts another graph (a branch, a loop's body) in place.

        Args:
            module: The graph.
            inputs: What its placeholders are bound to, in order.

        Returns:
            What it returns, one item for each result.

        Raises:
            ConversionError: It writes its inputs in place, or has no functional form.
        """
        return self._interpreter().inline(module, inputs)

    def value_of(self, argument: Any) -> Any:
        """What an argument of an FX node of this graph became; lists element by element, numbers as they are."""
        return self._interpreter().value_of(argument)

    def symbolic_shape(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The ONNX dimensions of a tensor of torch's trace: ints, and named dimensions where the size is dynamic."""
        return self._interpreter().dims(tensor)

    def symbolic_size(self, size: int | torch.SymInt) -> Any:
        """The ONNX dimension that a size of torch's trace is, a stride or an offset too, as ``g.size`` takes it."""
        return self._interpreter().dim(size)
