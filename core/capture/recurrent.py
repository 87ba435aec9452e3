"""Recurrent layers during capture: torch's fake kernels unroll them, which makes the number of steps static."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DispatchKey

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _over_input(original: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(x: torch.Tensor, hx: Any, params: Any, *options: Any) -> Any:
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        if torch._guards.detect_fake_mode((x, *states)) is None:
            return original(x, hx, params, *options)
        directions = 2 if options[4] else 1
        result = x.new_empty((*x.shape[:2], directions * states[0].shape[-1]))
        return (result, *(s.new_empty(s.shape) for s in states))

    return kernel


def _over_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Any, *options: Any) -> Any:
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        if torch._guards.detect_fake_mode((data, *states)) is None:
            return original(data, batch_sizes, hx, params, *options)
        directions = 2 if options[4] else 1
        result = data.new_empty((data.shape[0], directions * states[0].shape[-1]))
        return (result, *(s.new_empty(s.shape) for s in states))

    return kernel


@contextlib.contextmanager
def whole_recurrent_layers() -> Iterator[None]:
    """While it holds, tracing a recurrent layer computes the shapes of its results and nothing else.

    torch's own kernels for tracing run the layer step by step: a dynamic number of steps becomes static, and tracing
    takes as long as there are steps.
    """
    replaced = []
    try:
        for name in _NAMES:
            packet = getattr(torch.ops.aten, name)
            for op, shapes in ((packet.input, _over_input), (packet.data, _over_packed)):
                for key in _KEYS:
                    original = op.py_kernels.get(key)
                    if original is not None:
                        replaced.append((op, key, original))
                        op.py_kernels[key] = shapes(original)
                op._dispatch_cache.clear()
        yield
    finally:
        for op, key, original in replaced:
            op.py_kernels[key] = original
            op._dispatch_cache.clear()
