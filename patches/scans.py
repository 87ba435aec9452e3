"""Loops over tokens or chunks in the stand-ins for a library's functions, as scans that torch.export captures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor

from onnxplug.torch_private import pytree, scan


def scanned(step: Callable[..., Any], state: Any, sequences: tuple[Tensor, ...]) -> Any:
    """A scan over the first axis while a model is captured, and a loop otherwise.

    Args:
        step: From the state and a tuple of slices to the next state and the step's results.
        state: The first state.
        sequences: The tensors whose slices the steps take.

    Returns:
        The last state, and the results of all steps, one behind the other along a new first axis.
    """
    if torch.compiler.is_compiling():
        sequences = tuple(laid_out(x) for x in sequences)
        if torch.compiler.is_dynamo_compiling() or not isinstance(step, FunctionType) or not _is_closed(step):
            return scan(step, state, sequences)
        return _scan(step, state, sequences)
    results = []
    for slices in zip(*sequences, strict=True):
        state, result = step(state, slices)
        results.append(result)
    return state, pytree.tree_map(lambda *steps: torch.stack(steps), *results)


#: Values that the graph of a step has as they are.
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))


def _is_closed(step: FunctionType) -> bool:
    """Whether all that a step reads from around it are tensors, which become operands of the scan, and plain values."""
    cells = step.__closure__ or ()
    return not step.__kwdefaults__ and all(isinstance(cell.cell_contents, (Tensor, *_PLAIN)) for cell in cells)


def _scan(step: FunctionType, state: Any, sequences: tuple[Tensor, ...]) -> Any:
    """torch's operator: torch's function for it compiles each step by Dynamo first, which takes ten times as long."""
    cells = step.__closure__ or ()
    around = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]
    states, kind = pytree.tree_flatten(state)
    kinds: list[Any] = []

    def flat(*operands: Tensor) -> list[Tensor]:
        first, rest = operands[: len(states)], operands[len(states) :]
        function = _reading(step, rest[len(sequences) :])
        last, results = function(pytree.tree_unflatten(first, kind), tuple(rest[: len(sequences)]))
        leaves, kind_of_results = pytree.tree_flatten(results)
        kinds.append(kind_of_results)
        return [*pytree.tree_leaves(last), *leaves]

    made = list(torch.ops.higher_order.scan(flat, states, list(sequences), tuple(around)))
    split = len(states)
    return pytree.tree_unflatten(made[:split], kind), pytree.tree_unflatten(made[split:], kinds[-1])


def _reading(step: FunctionType, tensors: Sequence[Tensor]) -> Callable[..., Any]:
    """A step that reads other tensors from around it."""
    others = iter(tensors)
    cells = (
        CellType(next(others)) if isinstance(cell.cell_contents, Tensor) else cell for cell in step.__closure__ or ()
    )
    return FunctionType(step.__code__, step.__globals__, step.__name__, step.__defaults__, tuple(cells))


def laid_out(x: Tensor) -> Tensor:
    """A tensor with the strides of its sizes.

    torch takes strides that are equal in the example for equal, if they are not those of sizes; ``contiguous()`` asks whether
    they are, which they may be for some sizes.
    """
    return x.clone(memory_format=torch.contiguous_format)
