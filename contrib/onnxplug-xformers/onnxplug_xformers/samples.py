"""Inputs for xformers' operator; making the first inputs defines the operator in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxplug import OpSample

_OPERATOR = "xformers_flash::flash_fwd"
_ROWS, _OFFSETS = {0: "rows"}, {0: "offsets"}


def samples() -> list[OpSample]:
    """The samples: dense and packed."""
    keys, queries = {0: "batch", 1: "keys"}, {0: "batch", 1: "queries"}
    dense = [
        OpSample(
            _OPERATOR,
            _dense(2, 5, 7, *rest),
            dynamic_shapes=(queries, keys, keys, *[None] * 12),
            others=[_dense(1, 1, 4, *rest), _dense(3, 6, 2, *rest)],
            results=(0, 1),
        )
        for rest in ((False, -1, -1), (True, -1, -1), (False, 2, 1))
    ]
    packed = [
        OpSample(
            _OPERATOR,
            _packed([3, 1], [4, 2], causal),
            dynamic_shapes=(_ROWS, {0: "keys"}, {0: "keys"}, _OFFSETS, _OFFSETS, *[None] * 10),
            others=[_packed([2], [5], causal), _packed([1, 0, 4], [3, 2, 0], causal)],
            results=(0, 1),
        )
        for causal in (False, True)
    ]
    return dense + packed


def _dense(batch: int, queries: int, keys: int, *rest: Any) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        q, k, v = (torch.randn(batch, n, h, 8) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
        return q, k, v, None, None, None, 8, 8, 0.0, 0.3, *rest, False, None

    return args


def _packed(queries: list[int], keys: list[int], causal: bool) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        q, k, v = (torch.randn(sum(n), h, 8) for n, h in ((queries, 4), (keys, 2), (keys, 2)))
        offsets = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (queries, keys)]
        return q, k, v, *offsets, None, 8, 8, 0.0, 0.3, causal, -1, -1, False, None

    return args


def _torch() -> Any:
    """torch, with the operator defined."""
    import torch

    from onnxplug_xformers.library import define

    define()
    return torch
