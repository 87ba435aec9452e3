"""Inputs to test the operators with. Importing it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from onnxplug import OpSample

_ROWS = {0: "tokens"}
_SIZES = (5, 1, 8)
#: Further arguments of activations.
_MORE = {"fatrelu_and_mul": (0.3,), "swigluoai_and_mul": (1.5, 0.8)}


def samples() -> list[OpSample]:
    """The samples of all operators, in all their forms."""
    from onnxplug_vllm import OPERATORS

    made: list[OpSample] = []
    for op, function in OPERATORS.items():
        if function in ("rms_norm", "gemma_rms_norm", "fused_add_rms_norm", "gemma_fused_add_rms_norm"):
            pdl = (True,) if op.startswith("sgl_kernel") else ()
            made.append(_sample(op, partial(_norm, *pdl), (_ROWS, _ROWS, None, None, *(None for _ in pdl))))
            if not pdl:
                made.append(_sample(op, partial(_norm, weight=False), (_ROWS, _ROWS, None, None)))
        elif function == "rotary_embedding":
            for form in ((True, True, 0, False), (False, False, 0, False), (True, True, 2, True)):
                shapes = (_ROWS, _ROWS, _ROWS if form[1] else None, *[None] * 5)
                made.append(_sample(op, partial(_rotary, *form), shapes))
        elif function == "rotary_embedding_of_pairs":
            made += [
                _sample(op, partial(_pairs, turned), (*[_ROWS] * 4, None, _ROWS, *[None] * 7))
                for turned in (True, False)
            ]
        else:
            more = _MORE.get(function, ())
            width = 16 if function.endswith("_mul") or function == "mul_and_silu" else 8
            made.append(_sample(op, partial(_activation, width, *more), (_ROWS, _ROWS, *[None] * len(more))))
    return made


def _sample(op: str, make: Callable[..., Sequence[Any]], shapes: Any) -> OpSample:
    first, *others = (partial(make, count=count) for count in _SIZES)
    return OpSample(f"{op}.default", first, dynamic_shapes=shapes, others=others)


def _torch() -> Any:
    import torch

    return torch


def _norm(*pdl: bool, count: int, weight: bool = True) -> Sequence[Any]:
    torch = _torch()
    return torch.randn(count, 8), torch.randn(count, 8), torch.randn(8) if weight else None, 1e-5, *pdl


def _rotary(neox: bool, with_key: bool, offset: int, inverse: bool, count: int) -> Sequence[Any]:
    """Four heads of 8 elements, of which 4 are turned, and two of keys."""
    torch = _torch()
    key = torch.randn(count, 16) if with_key else None
    return torch.arange(count) * 3 % 7, torch.randn(count, 32), key, 8, torch.randn(7, 4), neox, offset, inverse


def _pairs(turned: bool, count: int) -> Sequence[Any]:
    torch = _torch()
    q, k = torch.randn(count, 4, 8), torch.randn(count, 2, 8)
    rest = (torch.randn(7, 8), torch.arange(count) * 3 % 7, turned, True, 0, None, None, None, None)
    return q, k, torch.zeros_like(q), torch.zeros_like(k), *rest


def _activation(width: int, *more: float, count: int) -> Sequence[Any]:
    torch = _torch()
    return torch.zeros(count, 8), torch.randn(count, width), *more
