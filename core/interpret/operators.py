"""The facts about a target that the interpreter needs at each of its nodes, collected once."""

from __future__ import annotations

from typing import Any, NamedTuple

from onnxplug.capture.quantised import QUANTIZERS
from onnxplug.functionalize.effects import effects_of
from onnxplug.interpret.node import Parameter, schema_parameters
from onnxplug.registry.names import qualified_name
from onnxplug.torch_private import OpOverload


class Operator(NamedTuple):
    """An FX target.

    Attributes:
        target: The operator or function.
        name: Its qualified name.
        parameters: The parameters of its schema; none for a Python function.
        defaults: Their defaults.
        is_overload: Whether it has a schema.
        writes: Whether it writes an argument.
        quantizes: Whether it makes a quantised tensor.
    """

    target: Any
    name: str
    parameters: tuple[Parameter, ...]
    defaults: tuple[Any, ...]
    is_overload: bool
    writes: bool
    quantizes: bool


class Operators:
    """The targets met so far, looked up by identity: the hash of a torch operator is computed in Python."""

    def __init__(self) -> None:
        # Each keeps its target alive, so that no id is used again.
        self._by_id: dict[int, Operator] = {}

    def of(self, target: Any) -> Operator:
        """Collects the facts about a target."""
        return self._by_id.get(id(target)) or self._look_at(target)

    def _look_at(self, target: Any) -> Operator:
        is_overload = isinstance(target, OpOverload)
        parameters = schema_parameters(target) if is_overload else ()
        operator = self._by_id[id(target)] = Operator(
            target,
            qualified_name(target),
            parameters,
            tuple(p.default for p in parameters),
            is_overload,
            bool(effects_of(target).written),
            target in QUANTIZERS,
        )
        return operator
