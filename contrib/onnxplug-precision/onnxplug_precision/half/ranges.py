"""The ranges of a model's values on samples: PyTorch runs the model node by node, subgraphs and functions included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxplug_reference import TorchReferenceEvaluator
from onnxplug_reference.engine import Step

from onnxplug import OnnxplugError
from onnxplug.errors import ConversionError
from onnxplug_precision.half.types import FLOAT, all_nodes

#: Numbers below this count as fills of a mask, where the value is a mask.
FILL = -32752.0


#: Operators in which fills give 0, with the places of their logits or masks.
SOFTMAX: Mapping[tuple[str, str], frozenset[int]] = {
    ("", "Softmax"): frozenset({0}),
    ("", "LogSoftmax"): frozenset({0}),
    ("", "Attention"): frozenset({3}),
    ("com.microsoft", "MultiHeadAttention"): frozenset({5}),
    ("com.microsoft", "GroupQueryAttention"): frozenset({10}),
}


@dataclass
class Range:
    """The range of a value's elements, in all runs.

    Attributes:
        largest: The largest magnitude of a finite element.
        ordinary: The largest magnitude without the fills of masks.
        is_binary: Whether all elements were 0 or 1.
        is_integral: Whether all finite elements were integers.
        is_exact: Whether float16 represents all integers, except for the fills of masks.
        has_filled_rows: Whether the value is an operand of a Softmax with a row of fills alone.
    """

    largest: float = 0.0
    ordinary: float = 0.0
    is_binary: bool = True
    is_integral: bool = True
    is_exact: bool = True
    has_filled_rows: bool = False

    def add(self, tensor: torch.Tensor) -> None:
        """Widens the range by the elements of a tensor."""
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
        """Widens the range by another range."""
        self.largest = max(self.largest, other.largest)
        self.ordinary = max(self.ordinary, other.ordinary)
        self.is_binary = self.is_binary and other.is_binary
        self.is_integral = self.is_integral and other.is_integral
        self.is_exact = self.is_exact and other.is_exact

    def holds_integers(self) -> bool:
        """Whether the elements are integers, some of which float16 would round."""
        return self.is_integral and not self.is_exact


def range_of(array: np.ndarray) -> Range:
    """The range of a constant."""
    known = Range()
    known.add(torch.from_numpy(np.array(array, np.float32)))
    return known


def _is_binary(x: torch.Tensor) -> torch.Tensor:
    return (x == 0) | (x == 1)


def _is_integral(x: torch.Tensor) -> torch.Tensor:
    return x == x.round()


def _all_among(tensor: torch.Tensor, holds: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a condition holds for all elements; the first elements are checked first."""
    flat = tensor.reshape(-1)
    return bool(holds(flat[:_FIRST]).all()) and bool(holds(flat).all())


#: The number of first elements, among which a condition mostly fails if it does.
_FIRST = 64
Ranges = dict[ir.Value, Range]
Samples = Sequence[Mapping[str, torch.Tensor]]


def measure(model: ir.Model, samples: Iterable[Mapping[str, Any]], plugins: Sequence[str] | None = None) -> Ranges:
    """The ranges of all values of float32 that nodes compute, and of the model's inputs.

    Args:
        plugins: The plugins whose kernels run custom operators; all installed plugins when ``None``.
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
    # Files of old list their weights as inputs; a call need not give these.
    usual = {
        value.name: torch.from_numpy(np.array(value.const_value.numpy()))
        for value in model.graph.inputs
        if value.const_value is not None and value.dtype == FLOAT
    }
    for sample in samples:
        for value in model.graph.inputs:
            _record(ranges, value, sample.get(str(value.name), usual.get(value.name)))
        try:
            evaluator.run(None, dict(sample))
        except OnnxplugError as error:
            raise ConversionError(f"the model does not run on the samples: {error.message}", hint=error.hint) from error
    return ranges


def _look_at_rows(ranges: Ranges, node: ir.Node, operands: Sequence[Any]) -> None:
    """Records operands of a Softmax that have a row of fills alone."""
    for index in SOFTMAX.get((node.domain, node.op_type), ()):
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None or value not in ranges or not operands[index].numel() or not operands[index].dim():
            continue
        rows = operands[index].amax(node.attributes.get_int("axis", -1))
        ranges[value].has_filled_rows |= bool((rows < FILL).any())


def _record(ranges: Ranges, value: ir.Value, tensor: Any) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and value.dtype == FLOAT:
        ranges.setdefault(value, Range()).add(tensor)
