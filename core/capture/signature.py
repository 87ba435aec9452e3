"""Inputs, state and outputs of a captured program: the records that capture makes and every later stage reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from onnxplug.capture.dimensions import Multiple
from onnxplug.capture.size_guards import Condition


class InputKind(Enum):
    """The kind of a placeholder of the captured graph."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    """A tensor that the model's code captured or made (``lifted_tensor``)."""
    USER = "user"
    """A tensor, or a number that stays dynamic: becomes an ONNX graph input."""
    NONE = "none"
    """The user's ``None``: not an ONNX input."""
    STATIC = "static"
    """A Python number, string or bool that torch.export baked in: not an ONNX input."""


class OutputKind(Enum):
    """The kind of an output of the captured graph."""

    USER = "user"
    BUFFER_MUTATION = "buffer_mutation"
    INPUT_MUTATION = "input_mutation"


@dataclass
class InputSlot:
    """One placeholder of the graph, in graph order.

    Attributes:
        name: ONNX name: the fully qualified name of a parameter or buffer (``"encoder.weight"``), for a user input the name in
            ``input_names`` or else the placeholder's.
        tensor: The tensor of a parameter, buffer or constant.
        value: The Python value of a STATIC slot.
        position: Index among the leaves of the flattened ``(args, kwargs)``; ``None`` for state.
        target: Name of a parameter, buffer or constant in the PyTorch model, whatever its ONNX name is.
        persistent: Whether the model's ``state_dict`` has it.
    """

    node: torch.fx.Node
    kind: InputKind
    name: str
    tensor: torch.Tensor | None = None
    value: Any = None
    position: int | None = None
    target: str = ""
    persistent: bool = True


@dataclass
class OutputSlot:
    """An output of the graph. User outputs come first, in the order of the flattened result; mutations follow.

    Attributes:
        value: An fx Node, or a constant (number, ``None``).
        name: ONNX name; for a mutation the buffer's or input's name with ``"_out"`` after it.
        target: Name of the mutated buffer or input.
    """

    value: Any
    kind: OutputKind
    name: str
    target: str | None = None


@dataclass
class FunctionalGraph:
    """A functional FX graph with its signature, the interpreter's input.

    Attributes:
        graph: No node of it mutates a value that another node sees.
        inputs: One slot a placeholder, in graph order.
        outputs: The graph's outputs, mutated state included.
        strategy: ``"unchanged"``, ``"linear"`` (our own pass) or ``"functionalized"`` (torch's).
    """

    graph: torch.fx.Graph
    inputs: list[InputSlot]
    outputs: list[OutputSlot]
    strategy: str = "unchanged"


@dataclass
class Captured:
    """A captured program with everything needed to name and verify it.

    Attributes:
        dim_names: Symbol of a dynamic dimension (``"s77"``) to the user's name for it (``"batch"``).
        multiples: Symbol of a dimension to its size in terms of a ``Dim`` that is no size of an input (``8 * Dim("h")``).
        reference: The eager callable with which verification compares.
        args, kwargs: The inputs that the program was captured with.
        examples: The positional and keyword inputs of the user's other calls.
        strategy: ``"given"``, ``"non-strict"``, ``"strict"`` …
        seconds: Time that capture took.
        conditions: The conditions of the model's code on the sizes; the program is right where all hold.
        assumptions: Its conditions that only the size 1 does not fulfil; often the program is right there too.
        bounds: The largest sizes that the model's operators and checks accept; they are in the ranges of the program too.
        repeated: How many operator calls repeated the nodes of an equal call.
        numbers: The buffers from which the model's code read numbers, which are constants of the program, by their names.
    """

    program: torch.export.ExportedProgram
    dim_names: dict[str, str] = field(default_factory=dict)
    multiples: dict[str, Multiple] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    examples: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    strategy: str = "given"
    seconds: float = 0.0
    conditions: list[Condition] = field(default_factory=list)
    assumptions: list[Condition] = field(default_factory=list)
    bounds: list[Condition] = field(default_factory=list)
    repeated: int = 0
    numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def size_names(self) -> dict[str, str]:
        """Symbol of a dynamic dimension to its name in messages: the user's, or ``x.shape[1]`` where there is none."""
        names: dict[str, str] = {}
        for node in self.program.graph.nodes:
            value = node.meta.get("val") if node.op == "placeholder" else None
            for axis, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else ():
                names.setdefault(str(size), f"{node.name}.shape[{axis}]")
        return {**names, **self.dim_names}


#: Names of arguments that hold the past.
_PAST = re.compile(r"(past_key_values|past_key_value|cache_params|past)(?=[._]|\d|$)")


def present_name(past: str) -> str:
    """The name of an input's new value: ``past_key_values.0.key`` becomes ``present.0.key``, ``state`` ``present_state``."""
    match = _PAST.match(past)
    return f"present{past[match.end() :]}" if match is not None else f"present_{past}"
