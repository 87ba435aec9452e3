"""How far each output is from PyTorch's, element by element, for observers that want to know: reports of exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from onnxplug.observers import Observer, events
from onnxplug.verification.compare import Comparison

#: Makes a summary of ``|ONNX - PyTorch|``, the tolerance and the equality of each element.
Measure = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class ComparedOutput(NamedTuple):
    """An output that was compared; no tensor is kept.

    Attributes:
        name: The output.
        dtype: Its dtype in PyTorch; ``"string"`` for text.
        elements: The number of its elements.
        comparison: The result, whose ``histogram`` is the observer's summary.
    """

    name: str
    dtype: str
    elements: int
    comparison: Comparison


@dataclass
class ComparedInputs:
    """A set of inputs that both models ran on.

    Attributes:
        sizes: Size of each dynamic dimension.
        seed: Seed of the generated inputs; ``None`` for given inputs.
        runtime: The runtime or evaluator that ran the model.
        observer: The observer that receives it; ``None``: nobody does.
        outputs: The outputs, up to the first that differs.
    """

    sizes: Mapping[str, int]
    seed: int | None
    runtime: str
    observer: DifferenceObserver | None = None
    outputs: list[ComparedOutput] = field(default_factory=list)

    @classmethod
    def begun(cls, sizes: Mapping[str, int], seed: int | None, runtime: str) -> ComparedInputs:
        """A set of inputs whose outputs are compared now."""
        observers = (o for o in reversed(events().observers) if isinstance(o, DifferenceObserver) and o.measures)
        return cls(dict(sizes), seed, runtime, next(observers, None))

    @property
    def measure(self) -> Measure | None:
        """The function that summarises the differences of an output; ``None`` where nobody wants them."""
        return self.observer.measure if self.observer is not None else None

    def anew(self) -> ComparedInputs:
        """The same set of inputs without any output."""
        return replace(self, outputs=[])

    def add(self, name: str, actual: Any, comparison: Comparison) -> None:
        """Adds the comparison of an output."""
        if self.observer is None:
            return
        dtype, elements = "string", actual.size if not isinstance(actual, torch.Tensor) else actual.numel()
        if isinstance(actual, torch.Tensor):
            dtype = str(comparison.dtype if comparison.dtype is not None else actual.dtype).removeprefix("torch.")
        self.outputs.append(ComparedOutput(name, dtype, elements, comparison))

    def finish(self) -> None:
        """Sends the set of inputs to the observer: it is in the report of verification, or is why verification fails."""
        if self.observer is not None:
            self.observer.compared(self)


class DifferenceObserver(Observer):
    """An observer that receives each set of inputs that verification compares, too.

    Attributes:
        measures: Whether it wants those of the verification that runs now.
    """

    measures: bool = False

    def measure(self, difference: torch.Tensor, allowed: torch.Tensor, same: torch.Tensor) -> Any:
        """A summary of the differences of an output, given for each element: its difference, its tolerance, whether it is equal."""

    def compared(self, inputs: ComparedInputs) -> None:
        """A set of inputs was compared, with or without a difference."""
