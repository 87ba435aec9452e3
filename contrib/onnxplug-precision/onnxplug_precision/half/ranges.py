"""The ranges of a model's values on samples: the model runs node by node in PyTorch, its branches, loops and functions too."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from onnxplug_reference import TorchReferenceEvaluator
from onnxplug_reference.engine import Step

from onnxplug import OnnxplugError
from onnxplug.errors import ConversionError
from onnxplug_precision.half.types import FLOAT, all_nodes

#: What is below counts as the fill of a mask, where the value is one.
FILL = -32752.0


#: Operators of which fills give 0, with the places of the operands that are logits or masks.
SOFTMAX: Mapping[tuple[str, str], frozenset[int]] = {
    ("", "Softmax"): frozenset({0}),
    ("", "LogSoftmax"): frozenset({0}),
    ("", "Attention"): frozenset({3}),
    ("com.microsoft", "MultiHeadAttention"): frozenset({5}),
    ("com.microsoft", "GroupQueryAttention"): frozenset({10}),
}


@dataclass
class Range:
    """What the elements of a value were, in all runs.

    Attributes:
        largest: The largest finite element by size.
        ordinary: The same without the fills of masks.
        is_binary: Whether all were 0 or 1.
        is_exact: Whether float16 has all of these, but for the fills of masks.
        has_filled_rows: Whether it is the operand of a Softmax with nothing but fills in a row.
    """

    largest: float = 0.0
    ordinary: float = 0.0
    is_binary: bool = True
    is_integral: bool = True
    is_exact: bool = True
    has_filled_rows: bool = False

    def add(self, tensor: torch.Tensor) -> None:
        """Takes in the elements of a tensor."""
        if not tensor.numel():
            return
        low, high = (float(x) for x in tensor.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            tensor = tensor[tensor.isfinite()]
            if not tensor.numel():
                return
            low, high = (float(x) for x in tensor.aminmax())
        self.largest = max(self.largest, abs(low), abs(high))
        self.is_binary = self.is_binary and low >= 0 and high <= 1 and _all_among(tensor, _is_binary)
        self.is_integral = self.is_integral and _all_among(tensor, _is_integral)
        if self.is_integral:
            self.is_exact = self.is_exact and bool(((tensor.half() == tensor) | (tensor < FILL)).all())
        if low < FILL:
            ordinary = tensor[tensor > FILL]
            low = float(ordinary.min()) if ordinary.numel() else 0.0
        self.ordinary = max(self.ordinary, abs(low), abs(high) if high > FILL else 0.0)

    def merge(self, other: Range) -> None:
        """Takes in what another one knows."""
        self.largest = max(self.largest, other.largest)
        self.ordinary = max(self.ordinary, other.ordinary)
        self.is_binary = self.is_binary and other.is_binary
        self.is_integral = self.is_integral and other.is_integral
        self.is_exact = self.is_exact and other.is_exact

    def holds_integers(self) -> bool:
        """Whether it has integers that float16 would round."""
        return self.is_integral and not self.is_exact


def _is_binary(x: torch.Tensor) -> torch.Tensor:
    return (x == 0) | (x == 1)


def _is_integral(x: torch.Tensor) -> torch.Tensor:
    return x == x.round()


def _all_among(tensor: torch.Tensor, holds: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether something holds of all elements; the first few are looked at first."""
    flat = tensor.reshape(-1)
    return bool(holds(flat[:_FIRST]).all()) and bool(holds(flat).all())


#: Elements that mostly tell that something does not hold.
_FIRST = 64
Ranges = dict[ir.Value, Range]
Samples = Sequence[Mapping[str, torch.Tensor]]


def measure(model: ir.Model, samples: Iterable[Mapping[str, Any]], plugins: Sequence[str] | None = None) -> Ranges:
    """The ranges of all values of float32 that nodes compute, and of the model's inputs.

    Args:
        plugins: Whose kernels run custom operators; all that are installed when ``None``.
    """
    nodes = all_nodes(model)
    names = [node.name for node in nodes]
    ranges: Ranges = {}

    def after(step: Step) -> None:
        node = nodes[int(step.node.name)]
        for value, tensor in zip(node.outputs, step.outputs, strict=False):
            _record(ranges, value, tensor)
        _look_at_rows(ranges, node, step.inputs)

    try:
        for number, node in enumerate(nodes):
            node.name = str(number)
        evaluator = TorchReferenceEvaluator(model, plugins=plugins, after=after)
    except OnnxplugError as error:
        raise ConversionError(f"the ranges of the model's values can't be measured: {error.message}") from error
    finally:
        for node, name in zip(nodes, names, strict=True):
            node.name = name
    for sample in samples:
        for value in model.graph.inputs:
            _record(ranges, value, sample.get(str(value.name)))
        try:
            evaluator.run(None, dict(sample))
        except OnnxplugError as error:
            raise ConversionError(f"the model does not run on the samples: {error.message}", hint=error.hint) from error
    return ranges


def _look_at_rows(ranges: Ranges, node: ir.Node, operands: Sequence[Any]) -> None:
    """Notes where a Softmax has a row that is masked as a whole."""
    for index in SOFTMAX.get((node.domain, node.op_type), ()):
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None or value not in ranges or not operands[index].numel() or not operands[index].dim():
            continue
        rows = operands[index].amax(node.attributes.get_int("axis", -1))
        ranges[value].has_filled_rows |= bool((rows < FILL).any())


def _record(ranges: Ranges, value: ir.Value, tensor: Any) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and value.dtype == FLOAT:
        ranges.setdefault(value, Range()).add(tensor)
