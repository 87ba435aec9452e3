"""The interpreter of an FX graph, as converters see it through ``g.interpreter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from onnxplug.errors import UsageError


class Interpreter(Protocol):
    """Walks the FX graph and converts its calls (:class:`onnxplug.DynamoInterpreter`)."""

    def convert(self, call: Any) -> Any:
        """The results of a call (:class:`onnxplug.FxNode`) by the first rule that doesn't decline."""

    def has_rule(self, call: Any) -> bool:
        """Whether some rule applies to a call."""

    def inline(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Converts another graph (a branch, a loop's body) in place."""

    def value_of(self, argument: Any) -> Any:
        """The value of an argument of an FX node of this graph; lists element by element, numbers as they are."""

    def new_call(self, fx: torch.fx.Node, name: str, args: tuple[Any, ...]) -> Any:
        """The call of an FX node that a converter made, for ``g.convert``."""

    def dims(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The ONNX dimensions of a fake tensor."""

    def dim(self, size: int | torch.SymInt) -> Any:
        """The ONNX dimension of a size, a stride or an offset in torch's trace."""


class NoInterpreter:
    """The interpreter of a builder without an FX graph."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError("no FX graph is under conversion: calls are converted by an interpreter")
