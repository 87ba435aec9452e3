"""Who converts the calls of an FX graph, as converters see it through ``g.interpreter``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from onnxplug.errors import UsageError


class Interpreter(Protocol):
    """Whoever walks the FX graph and converts its calls (:class:`onnxplug.DynamoInterpreter`)."""

    def convert(self, call: Any) -> Any:
        """What the first rule that doesn't decline returns for a call (:class:`onnxplug.FxNode`)."""

    def has_rule(self, call: Any) -> bool:
        """Whether some rule applies to a call."""

    def inline(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
        """Converts another graph (a branch, a loop's body) in place."""

    def value_of(self, argument: Any) -> Any:
        """What an argument of an FX node of this graph became; lists element by element, numbers as they are."""

    def dims(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """The ONNX dimensions of a fake tensor."""

    def dim(self, size: int | torch.SymInt) -> Any:
        """The ONNX dimension that a size of torch's trace is, a stride or an offset too."""


class NoInterpreter:
    """The interpreter of a builder without an FX graph."""

    def __getattr__(self, name: str) -> Any:
        raise UsageError("no FX graph is under conversion: calls are converted by an interpreter")
