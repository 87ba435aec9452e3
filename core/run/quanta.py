"""How far the results of a quantised model are uncertain: numbers near the middle between two quanta go either way.

PyTorch's kernels and ONNX Runtime's round the same sums in other orders and a bias to other integers. Where that flips one
number by a quantum, later layers flip more, and a deep network ends some quanta off. Neither result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from onnxplug.run.inputs import clone_leaves
from onnxplug.torch_private import TorchDispatchMode

#: How far numbers are moved before they are rounded, in quanta, and how often.
_STEP, _RUNS = 1 / 256, 4
#: The step that surely flips some, for results too small for the other one to.
_LARGE_STEP = 1 / 4
#: By how much the difference of one element may exceed the largest measured, and its root mean square that of all.
_MOST, _MOST_ON_AVERAGE = 1.5, 2.0

_QUANTISERS = frozenset(
    {
        "quantized_decomposed::quantize_per_tensor",
        "aten::quantize_per_tensor",
        "quantized_decomposed::quantize_per_channel",
    }
)
Run = Callable[[Any, list[Any]], list[tuple[str, Any]]]


def quantises(program: torch.export.ExportedProgram | None) -> bool:
    """Whether a captured program rounds to quanta."""
    return program is not None and any(_name(node.target) in _QUANTISERS for node in program.graph.nodes)


def _name(operator: Any) -> str:
    schema = getattr(operator, "_schema", None)
    return schema.name if schema is not None else ""


class _Moved(TorchDispatchMode):
    """Moves every number that is quantised a little, up or down at random."""

    def __init__(self, step: float, seed: int) -> None:
        super().__init__()
        self._step = step
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _name(func) in _QUANTISERS:
            x, scale, *others = args
            signs = torch.randint(0, 2, x.shape, generator=self._generator).to(x.device, x.dtype) * 2 - 1
            scales = scale
            if isinstance(scale, torch.Tensor):
                by_axis = [-1 if a == others[1] % x.dim() else 1 for a in range(x.dim())]
                scales = scale.reshape(by_axis if scale.numel() > 1 else ()).to(x.dtype)
            args = (x + signs * scales * self._step, scale, *others)
        return func(*args, **kwargs or {})


def quantum_slack(
    run: Run,
    program: torch.export.ExportedProgram,
    leaves: Sequence[Any],
    got: Mapping[str, torch.Tensor],
    expected: Sequence[tuple[str, Any]],
) -> list[torch.Tensor | None]:
    """How far each element of each result may be from PyTorch's, measured on the captured program.

    It runs again with all numbers moved a little before they are quantised. A result whose differences are, on average, larger
    than what that changes gets no slack: an offset of one quantum everywhere, say, is no rounding.

    Args:
        run: Runs a model on flattened inputs, which it may write, and gives its results by name.
        program: The captured program.
        leaves: The flattened inputs.
        got: ONNX's outputs, by name.
        expected: What PyTorch has for each, in the same order.

    Returns:
        A tensor of doubles of each result's shape; ``None`` where it gets none.
    """
    model = program.module(check_guards=False)
    plain = run(model, clone_leaves(leaves))
    moved = [_run_moved(run, model, leaves, _STEP, seed) for seed in range(_RUNS)]
    large = _run_moved(run, model, leaves, _LARGE_STEP, _RUNS)
    slack: list[torch.Tensor | None] = []
    for index, (actual, (_, wanted)) in enumerate(zip(got.values(), expected, strict=True)):
        found = [_difference(results[index][1], plain[index][1]) for results in moved]
        measured = [x for x in found if x is not None]
        if not any(bool(x.any()) for x in measured):
            measured = [x for x in [_difference(large[index][1], plain[index][1])] if x is not None]
            spread = 0.0
        else:
            spread = max(_average(x) for x in measured)
        difference = _difference(actual, wanted)
        if difference is None or not measured or not difference.numel():
            slack.append(None)
            continue
        largest = max(float(x.max()) for x in measured)
        limit = _MOST_ON_AVERAGE * max(spread, largest / difference.numel() ** 0.5)
        slack.append(torch.full_like(difference, largest * _MOST) if _average(difference) <= limit else None)
    return slack


def _run_moved(run: Run, model: Any, leaves: Sequence[Any], step: float, seed: int) -> list[tuple[str, Any]]:
    with _Moved(step, seed):
        return run(model, clone_leaves(leaves))


def _difference(a: Any, b: Any) -> torch.Tensor | None:
    """How far two results are apart, in doubles; ``None`` where they are no numbers of one shape."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape != b.shape or a.is_complex():
        return None
    return torch.nan_to_num((a.detach().cpu().double() - b.detach().cpu().double()).abs(), nan=0.0, posinf=0.0)


def _average(x: torch.Tensor) -> float:
    """The root of the mean square."""
    return float(x.square().mean().sqrt())
