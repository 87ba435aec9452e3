"""Shapes of results during capture, of operators for which torch's own kernels get in the way of dynamic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey

Kernel = Callable[..., Any]

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_FAKE_QUANTIZE = (
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)


def _recurrent(original: Kernel, packed: bool) -> Kernel:
    """A recurrent layer's results without its steps; real tensors are still computed with."""

    def kernel(x: torch.Tensor, *rest: Any) -> Any:
        hx, options = (rest[1], rest[3:]) if packed else (rest[0], rest[2:])
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        if torch._guards.detect_fake_mode((x, *states)) is None:
            return original(x, *rest)
        directions = 2 if options[4] else 1
        result = x.new_empty((*x.shape[:-1], directions * states[0].shape[-1]))
        return (result, *(s.new_empty(s.shape) for s in states))

    return kernel


def _result_and_mask(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _kernels() -> Iterator[tuple[Any, DispatchKey, Kernel]]:
    aten = torch.ops.aten
    for name in _RECURRENT:
        for op, packed in ((getattr(aten, name).input, False), (getattr(aten, name).data, True)):
            for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
                if key in op.py_kernels:
                    yield op, key, _recurrent(op.py_kernels[key], packed)
    for name in _FAKE_QUANTIZE:
        op = getattr(aten, name).default
        if DispatchKey.Meta not in op.py_kernels:
            yield op, DispatchKey.Meta, _result_and_mask


@contextlib.contextmanager
def shape_kernels() -> Iterator[None]:
    """While it holds, tracing these operators computes the shapes of their results and nothing else.

    torch traces a recurrent layer step by step, which makes a dynamic number of steps static and takes as long as there
    are steps; and it has no kernel at all for fake quantisation of dynamic sizes.
    """
    replaced: list[tuple[Any, DispatchKey, Kernel | None]] = []
    try:
        for op, key, kernel in list(_kernels()):
            replaced.append((op, key, op.py_kernels.get(key)))
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, original in replaced:
            if original is None:
                del op.py_kernels[key]
            else:
                op.py_kernels[key] = original
            op._dispatch_cache.clear()
