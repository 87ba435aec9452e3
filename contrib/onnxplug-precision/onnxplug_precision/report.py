"""The report of a conversion: nodes in float32, converted nodes, and the differences of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import torch
from onnxplug_tools.inspection.places import place_of

from onnxplug.errors import VerificationError
from onnxplug.run.session import Runner

#: The most nodes that a printed report names for each reason.
_SHOWN = 5


@dataclass(frozen=True)
class WideNode:
    """A node that stays in float32.

    Attributes:
        name, op_type: The node.
        reason: Why it stays in float32.
        place: The user's ``file:line``, or the module, from the model's metadata.
    """

    name: str
    op_type: str
    reason: str
    place: str = ""

    @classmethod
    def of(cls, node: ir.Node, reason: str) -> WideNode:
        """The entry of a node with its reason."""
        name = str(node.name or node.outputs[0].name)
        place = place_of(node.name, node.metadata_props)
        return cls(name, node.op_type, reason, place.source or place.module)

    def __str__(self) -> str:
        return f"{self.op_type} {self.name}" + (f" ({self.place})" if self.place else "")


@dataclass(frozen=True)
class Accuracy:
    """The differences of an output on the samples before and after a conversion.

    Attributes:
        name: The output.
        largest, mean: The largest and the mean absolute difference of its elements.
        cosine: The cosine of the angle between the output before and after.
        size: The largest magnitude of an element before.
    """

    name: str
    largest: float
    mean: float
    cosine: float
    size: float

    def __str__(self) -> str:
        return (
            f"{self.name}: largest difference {self.largest:.3g}, mean {self.mean:.3g}, cosine {self.cosine:.6f} "
            f"(elements up to {self.size:.3g})"
        )


@dataclass
class Precision:
    """The report of a conversion.

    Attributes:
        kind: ``"float16"``, ``"bfloat16"``, ``"dynamic"``, ``"qdq"`` or ``"int4"``.
        nodes: The number of nodes that compute in the new precision.
        operators: Operator to the number of these nodes.
        wide: The unconverted nodes that take floating-point numbers, with their reasons.
        masks: The names of constants that became smaller because they fill masks.
        casts: The number of Casts between float32 and half precision.
        bytes_before, bytes_after: The bytes of all weights.
        accuracy: The differences of each output in floating point.
    """

    kind: str
    nodes: int
    operators: Mapping[str, int] = field(default_factory=dict)
    wide: Sequence[WideNode] = ()
    masks: Sequence[str] = ()
    casts: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    accuracy: Sequence[Accuracy] = ()

    def __str__(self) -> str:
        operators = ", ".join(f"{name} {count}" for name, count in list(self.operators.items())[:6])
        lines = [
            f"{self.kind}: {self.nodes} nodes ({operators}); weights {self.bytes_before / 1e6:.2f} MB became "
            f"{self.bytes_after / 1e6:.2f} MB"
        ]
        if self.casts:
            lines[0] += f"; {self.casts} Casts"
        for reason, count in Counter(node.reason for node in self.wide).most_common():
            nodes = [str(node) for node in self.wide if node.reason == reason]
            more = f", and {count - _SHOWN} others" if count > _SHOWN else ""
            lines.append(f"stays in float32: {', '.join(nodes[:_SHOWN])}{more}: {reason}")
        lines += [f"the fill of a mask is smaller: {name}" for name in self.masks]
        lines += [f"output {item}" for item in self.accuracy]
        return "\n".join(lines)


def merged(done: Sequence[Precision]) -> Precision:
    """The report of two steps, one after the other; differences are the sums of both steps', an upper bound."""
    first, last = done
    return Precision(
        f"{first.kind}, {last.kind}",
        last.nodes,
        last.operators,
        last.wide,
        last.masks,
        last.casts,
        first.bytes_before,
        last.bytes_after,
        [
            Accuracy(a.name, a.largest + b.largest, a.mean + b.mean, min(a.cosine, b.cosine), a.size)
            for a, b in zip(first.accuracy, last.accuracy, strict=True)
        ],
    )


Results = list[dict[str, torch.Tensor]]


def results_of(model: Any, samples: Sequence[Mapping[str, Any]], host: Any = None) -> Results:
    """The outputs of a model on samples, by name.

    Args:
        samples: Tensors by the names of inputs; they are cast to the types that the model takes.
    """
    runner = Runner(model, host)
    kinds = input_dtypes(model) if isinstance(model, ir.Model) else {}
    results = []
    for sample in samples:
        feed = {name: as_input(x, kinds.get(name)) for name, x in sample.items()}
        results.append(dict(zip(runner.output_names, runner(feed), strict=True)))
    return results


def input_dtypes(model: ir.Model) -> dict[str, torch.dtype]:
    """The types of a model's inputs in half precision, by their names."""
    kinds = {ir.DataType.FLOAT16: torch.float16, ir.DataType.BFLOAT16: torch.bfloat16}
    return {str(v.name): kinds[v.dtype] for v in model.graph.inputs if v.dtype in kinds}


def as_input(value: Any, dtype: torch.dtype | None) -> Any:
    """An input in the type that the model takes."""
    return value.to(dtype) if dtype is not None and isinstance(value, torch.Tensor) else value


def differences(before: Results, after: Results) -> list[Accuracy]:
    """The differences of outputs in floating point.

    Raises:
        VerificationError: An element that was finite is NaN or infinite.
    """
    measured = []
    for name, value in before[0].items() if before else ():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            continue
        old = torch.cat([run[name].double().flatten() for run in before])
        new = torch.cat([run[name].double().flatten() for run in after])
        finite = old.isfinite()
        if not bool(new[finite].isfinite().all()):
            raise VerificationError(f"output {name!r} has NaN or infinities on the samples, and had none before")
        old, new = old[finite], new[finite]
        if not old.numel():
            continue
        norms = old.norm() * new.norm()
        cosine = float(old @ new / norms) if norms else float(bool((old == new).all()))
        gap = (old - new).abs()
        measured.append(Accuracy(name, float(gap.max()), float(gap.mean()), cosine, float(old.abs().max())))
    return measured
