"""Loops over tokens or chunks in the stand-ins for a library's functions, as scans that torch.export captures."""

from __future__ import annotations

from collections.abc import Callable
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
        return scan(step, state, tuple(laid_out(x) for x in sequences))
    results = []
    for slices in zip(*sequences, strict=True):
        state, result = step(state, slices)
        results.append(result)
    return state, pytree.tree_map(lambda *steps: torch.stack(steps), *results)


def laid_out(x: Tensor) -> Tensor:
    """A tensor with the strides of its sizes.

    torch takes strides that are equal in the example for equal, if they are not those of sizes; ``contiguous()`` asks whether
    they are, which they may be for some sizes.
    """
    return x.clone(memory_format=torch.contiguous_format)
