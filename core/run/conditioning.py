"""How far rounding alone changes PyTorch's own results: it decides about elements that cancellation leaves uncertain.

It is seen from two sides: the same model on inputs and weights that differ in the last place, and in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnxplug.run.inputs import clone_leaves

#: How often inputs and weights are changed by one unit of rounding.
_RUNS = 3

#: A network rounds at each layer, not only its inputs: the factor by which results may differ more.
_FACTOR = 16

Run = Callable[[Any, list[Any]], list[tuple[str, Any]]]


def rounding_slack(run: Run, model: Any, leaves: Sequence[Any]) -> list[torch.Tensor | None]:
    """How far rounding may change each element of each result, measured on the eager model itself.

    The model runs again with each floating-point input and weight changed by one unit of rounding, up or down at random. The
    change of an element is its uncertainty: large for a sum of large numbers that nearly cancel, small for an ordinary element,
    and too small to excuse a model that computes something else altogether.

    Args:
        run: Runs a model on flattened inputs, which it may write, and gives its results by name.
        model: The eager model; weights are moved where it is a module, in a copy.
        leaves: The flattened inputs.

    Returns:
        A tensor of doubles of each result's shape; ``None`` where the result is not a floating-point tensor, or where
        nothing can be said because two runs on the same inputs differ, or one fails.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            first = _results(run, model, clone_leaves(leaves))
            again = _results(run, model, clone_leaves(leaves))
            slack = [None if x is None else torch.zeros(x.shape, dtype=torch.float64) for x in first]
            for seed in range(_RUNS):
                generator = torch.Generator().manual_seed(seed)
                moved = _results(run, _moved_model(model, generator), [_moved(x, generator) for x in leaves])
                for index, (x, y) in enumerate(zip(first, moved, strict=True)):
                    found = slack[index]
                    if found is not None and x is not None and y is not None and x.shape == y.shape:
                        slack[index] = found.maximum(torch.nan_to_num((x - y).abs(), nan=0.0, posinf=0.0) * _FACTOR)
    except Exception:
        return []
    return [
        s if x is not None and y is not None and _same(x, y) else None
        for s, x, y in zip(slack, first, again, strict=True)
    ]


def in_double(run: Run, model: Any, leaves: Sequence[Any]) -> list[torch.Tensor | None]:
    """The results of the eager model in float64: weights, inputs and what its code makes without a dtype.

    Args:
        run, model, leaves: As :func:`rounding_slack` takes them. What the code casts to a narrower dtype is cast to float64.

    Returns:
        A tensor of doubles for each result, ``None`` for one that is no floating-point tensor; nothing where the model does not
        run in float64.
    """
    default = torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]):
            wide = copy.deepcopy(model).double() if isinstance(model, torch.nn.Module) else model
            torch.set_default_dtype(torch.float64)
            with _Wide():
                return _results(run, wide, [_doubled(leaf) for leaf in leaves])
    except Exception:
        return []
    finally:
        torch.set_default_dtype(default)


_TO_WIDE = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    torch.complex64: torch.complex128,
}
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


class _Wide(TorchFunctionMode):
    """Calls that name a dtype narrower than float64 mean float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = [_TO_WIDE.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        named = {k: _TO_WIDE.get(a, a) if isinstance(a, torch.dtype) else a for k, a in (kwargs or {}).items()}
        called: Any = torch.Tensor.double if func in _CASTS else func
        return called(*wide, **named)


def _doubled(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    return leaf.to(torch.complex128 if leaf.is_complex() else torch.float64, copy=True)


def _results(run: Run, model: Any, leaves: list[Any]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for _, value in run(model, leaves):
        if isinstance(value, torch.Tensor) and value.is_complex():
            value = torch.view_as_real(value.resolve_conj())
        real = isinstance(value, torch.Tensor) and value.is_floating_point()
        found.append(value.detach().cpu().double().clone() if real else None)
    return found


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def _moved_model(model: Any, generator: torch.Generator) -> Any:
    if not isinstance(model, torch.nn.Module):
        return model
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*copied.parameters(), *copied.buffers()):
            tensor.copy_(_moved(tensor, generator))
    return copied


def _moved(value: Any, generator: torch.Generator) -> Any:
    """Each element moved by one unit of rounding."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_complex():
        return torch.view_as_complex(_moved(torch.view_as_real(value.resolve_conj()), generator))
    if not value.is_floating_point():
        return value.clone()
    signs = torch.randint(0, 2, value.shape, generator=generator).to(value.device, torch.float64) * 2 - 1
    return (value.double() * (1 + signs * torch.finfo(value.dtype).eps)).to(value.dtype)
