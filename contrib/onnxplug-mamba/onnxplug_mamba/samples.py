"""Inputs for causal_conv1d's operators; making the first inputs defines the operators in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxplug import OpSample

_FORWARD, _UPDATE = "DaoAILab::_causal_conv1d_fwd_cpp", "DaoAILab::_causal_conv1d_update_cpp"
_ROWS, _BATCH = {0: "batch", 2: "length"}, {0: "batch"}


def samples() -> list[OpSample]:
    """The samples of all operators."""
    forward, update = [], []
    for sequences, initial, final in (
        (False, False, False),
        (False, True, True),
        (True, False, False),
        (True, True, False),
    ):
        rows = ({0: "batch", 1: "length"} if sequences else None, _BATCH if initial else None, _ROWS)
        forward.append(
            OpSample(
                _FORWARD,
                _forward(2, 5, sequences, initial, final),
                dynamic_shapes=(_ROWS, None, None, *rows, _BATCH if final else None, None),
                others=[_forward(*size, sequences, initial, final) for size in ((1, 1), (3, 8))],
            )
        )
    for ring, chosen in ((False, False), (True, False), (False, True)):
        state = {0: "states"} if chosen else _BATCH
        optional = (_BATCH if ring else None, _BATCH if chosen else None)
        update.append(
            OpSample(
                _UPDATE,
                _update(2, 1, ring, chosen),
                dynamic_shapes=(_ROWS, state, None, None, _ROWS, None, *optional),
                others=[_update(*size, ring, chosen) for size in ((1, 2), (3, 4))],
            )
        )
    return forward + update


def _forward(batch: int, length: int, sequences: bool, initial: bool, final: bool) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        x, weight, bias = torch.randn(batch, 8, length), torch.randn(8, 4), torch.randn(8)
        states = torch.randn(batch, 8, 3), torch.zeros(batch, 8, 3)
        ids = torch.arange(length, dtype=torch.int32).expand(batch, -1) // 3 - 1
        return (
            *(x, weight, bias, ids.contiguous() if sequences else None, states[0] if initial else None),
            *(torch.zeros_like(x), states[1] if final else None, True),
        )

    return args


def _update(batch: int, length: int, ring: bool, chosen: bool) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        x, weight, bias = torch.randn(batch, 8, length), torch.randn(8, 3), torch.randn(8)
        state = torch.randn(batch + chosen, 8, 5)
        used = torch.arange(batch, dtype=torch.int32) * 3 + 1
        places = torch.arange(batch, 0, -1, dtype=torch.int32)
        places[1:2] = -1
        return x, state, weight, bias, torch.zeros_like(x), False, used if ring else None, places if chosen else None

    return args


def _torch() -> Any:
    """torch, with the operators defined."""
    import torch

    from onnxplug_mamba.library import define

    define()
    return torch
