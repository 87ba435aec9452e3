"""How far a number format may move results: as far as PyTorch's own model moves when it is rounded to the format.

A file with fewer bits never has PyTorch's results, and the distance depends on the model. So PyTorch's model is the
measure: its weights, and the inputs of its layers, are rounded to the format, several times with other roundings up and
down, and its results compared with its own in float32. A file may be twice as far from these as the furthest of the
rounded runs, and a unit of rounding more.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onnxplug import VerificationError
from onnxplug.capture.eager import inference
from onnxplug.torch_private import pytree

#: The number of times that PyTorch's model is rounded, and the multiple of its distance that a file may have.
_DRAWS, _FACTOR = 4, 2.0
_BLOCK = 32
#: Rounds a tensor, after a part of a step, from -1/2 to 1/2, is added to each element.
_Round = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Results = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """Inputs of a graph, and PyTorch's results.

    Attributes:
        run: Computes PyTorch's results by the names of the graph's outputs.
    """

    feed: Mapping[str, Any]
    run: Callable[[], Results]


@dataclass(frozen=True)
class Distance:
    """How far an output of a file is from PyTorch's.

    Attributes:
        own: The norm of the difference, as a share of the norm of PyTorch's result.
        rounded: The same for PyTorch's model with rounded numbers.
        unit: The unit of rounding of the format.
    """

    name: str
    own: float
    rounded: float
    unit: float

    @property
    def allowed(self) -> float:
        """How far the output may be."""
        return _FACTOR * self.rounded + self.unit

    def __str__(self) -> str:
        return (
            f"of the outputs {self.name} is furthest from PyTorch's, by {self.own:.2g} of its size "
            f"(PyTorch's model with such numbers: {self.rounded:.2g})"
        )


def results_of(model: nn.Module, kwargs: Mapping[str, Any], names: Sequence[Any]) -> dict[str, torch.Tensor]:
    """PyTorch's results of a call by keywords, which stay as they are, by the names of a graph's outputs."""
    with inference():
        leaves = pytree.tree_leaves(model(**copy.deepcopy(dict(kwargs))))
    return dict(zip(names, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], strict=True))


def furthest(
    model: nn.Module, samples: Sequence[Sample], results: Sequence[Results], kind: str | None, half: bool
) -> Distance | None:
    """Compares a file's results with PyTorch's.

    Args:
        kind: The kind of quantisation: ``"dynamic"``, ``"int4"`` or ``None``.
        half: Whether numbers that are not quantised are in float16.

    Returns:
        The output that is furthest away; ``None`` where none is in floating point.
    """
    exact = _joined([sample.run() for sample in samples])
    own, moved = _distances(exact, _joined(results)), []
    for draw in range(_DRAWS):
        with _rounded(model, kind, half, torch.Generator().manual_seed(draw)):
            moved.append(_distances(exact, _joined([sample.run() for sample in samples])))
    unit = 2.0**-8 if kind is not None else 2.0**-10
    distances = [Distance(name, own[name], max(draw[name] for draw in moved), unit) for name in own]
    for item in distances:
        if not item.own <= item.allowed:
            raise VerificationError(
                f"output {item.name!r} is {item.own:.2g} of its size away from PyTorch's; PyTorch's model with numbers of this "
                f"format is {item.rounded:.2g} away, which explains {item.allowed:.2g}"
            )
    return max(distances, key=lambda item: item.own, default=None)


def _joined(runs: Sequence[Results]) -> dict[str, list[torch.Tensor]]:
    """The results in floating point of several calls, by name."""
    return {
        name: [run[name].double() for run in runs]
        for name, value in runs[0].items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def _distances(exact: Mapping[str, list[torch.Tensor]], moved: Mapping[str, list[torch.Tensor]]) -> dict[str, float]:
    distances = {}
    for name, values in exact.items():
        for value, other in zip(values, moved[name], strict=True):
            if value.shape != other.shape:
                raise VerificationError(f"output {name!r} has shape {list(other.shape)}, PyTorch's {list(value.shape)}")
        before, after = (torch.cat([value.flatten() for value in side]) for side in (values, moved[name]))
        finite = before.isfinite()
        if not bool(after[finite].isfinite().all()):
            raise VerificationError(f"output {name!r} has NaN or infinities where PyTorch's has none")
        size = float(before[finite].norm())
        gap = float((after[finite] - before[finite]).norm())
        distances[name] = gap / size if size else gap
    return distances


@contextlib.contextmanager
def _rounded(model: nn.Module, kind: str | None, half: bool, generator: torch.Generator) -> Iterator[None]:
    """PyTorch's model with rounded weights and inputs of layers."""
    weights: list[_Round] = [*({"dynamic": [_in_rows], "int4": [_in_blocks]}.get(str(kind), [])), *([_in_half] * half)]
    inputs: list[_Round] = [*([_in_bytes] if kind is not None else []), *([_in_half] * half)]

    def rounded(x: torch.Tensor, ways: Sequence[_Round]) -> torch.Tensor:
        for way in ways:
            x = way(x, torch.rand(x.shape, generator=generator) - 0.5)
        return x

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            rounded(x, inputs) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() else x
            for x in args
        )

    kept = [(p, p.data) for p in model.parameters() if p.is_floating_point() and p.dim() > 1]
    layers = [m for m in model.modules() if not any(True for _ in m.children())]
    if not half:  # other layers read float32
        layers = [m for m in layers if getattr(getattr(m, "weight", None), "ndim", 0) == 2]
    hooks = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        for parameter, data in kept:
            parameter.data = rounded(data, weights)
        yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        for item in hooks:
            item.remove()


def _in_half(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    moved = (x * (1 + part * 2.0**-10)).half().to(x.dtype)
    return torch.where(moved.isfinite(), moved, x)  # elements that overflow stay wide


def _in_steps(x: torch.Tensor, part: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    step = step.clamp_min(torch.finfo(x.dtype).tiny)
    return (x / step + part).round() * step


def _in_bytes(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return _in_steps(x, part, x.abs().amax() / 127)


def _in_rows(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return _in_steps(x, part, x.abs().amax(-1, keepdim=True) / 127)


def _in_blocks(x: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    steps = torch.stack([block.abs().amax(-1) for block in x.split(_BLOCK, -1)], -1) / 7
    return _in_steps(x, part, steps.repeat_interleave(_BLOCK, -1)[..., :size])
