"""Inputs for flash_attn's operators; making the first inputs defines the operators in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnxplug import OpSample

_DENSE, _PACKED = "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"
_ROWS, _OFFSETS = {0: "rows"}, {0: "offsets"}


def samples() -> list[OpSample]:
    """The samples of all operators."""
    sizes = ({0: "batch", 1: "queries"}, *[{0: "batch", 1: "keys"}] * 2)
    return (
        [
            OpSample(
                _DENSE,
                _dense(2, 5, 7, *rest),
                dynamic_shapes=(*sizes, *[None] * 8),
                others=[_dense(1, 1, 4, *rest), _dense(3, 6, 2, *rest)],
                results=(0, 1),
            )
            for rest in ((False, -1, -1, 0.0), (True, -1, -1, 0.0), (False, 2, 1, 0.0), (True, 3, 0, 5.0))
        ]
        + [
            OpSample(
                _PACKED,
                _packed([3, 1], [4, 2], *rest),
                dynamic_shapes=(_ROWS, {0: "keys"}, {0: "keys"}, _OFFSETS, _OFFSETS, *[None] * 8),
                others=[_packed([2], [5], *rest), _packed([1, 0, 4], [3, 2, 0], *rest)],
                results=(0, 1),
            )
            for rest in ((False, -1, -1, 0.0), (True, -1, -1, 0.0), (False, 2, 1, 5.0))
        ]
        + [
            OpSample(
                "onnxplug_flash_attn::written",
                _written([3, 5], *rest),
                dynamic_shapes=(*[{0: "batch"}] * 3, *[{0: "batch", 1: "size"}] * 2, {0: "batch"}, *[None] * 3),
                others=[_written([1], *rest), _written([1, 7, 2], *rest)],
            )
            for rest in ((-1, 0.0), (2, 5.0))
        ]
    )


def _dense(
    batch: int, queries: int, keys: int, causal: bool, left: int, right: int, softcap: float
) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        q = torch.randn(batch, queries, 4, 8)
        k, v = torch.randn(2, batch, keys, 2, 8).unbind(0)
        return q, k, v, 0.0, 0.3, causal, left, right, softcap, None, False

    return args


def _packed(
    queries: list[int], keys: list[int], causal: bool, left: int, right: int, softcap: float
) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        q = torch.randn(sum(queries), 4, 8)
        k, v = torch.randn(2, sum(keys), 2, 8).unbind(0)
        offsets = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (queries, keys)]
        return q, k, v, *offsets, 8, 8, 0.0, 0.3, causal, left, right, softcap

    return args


def _written(used: list[int], left: int, softcap: float) -> Callable[[], Sequence[Any]]:
    def args() -> Sequence[Any]:
        torch = _torch()
        import onnxplug_flash_attn.grouped  # noqa: F401  (defines the operator)

        q, caches = torch.randn(len(used), 1, 4, 8), torch.randn(2, len(used), max(used) + 2, 2, 8)
        new = caches[:, torch.arange(len(used)), torch.tensor(used) - 1].unsqueeze(2)
        return q, *new.unbind(0), *caches.unbind(0), torch.tensor(used), 0.3, left, softcap

    return args


def _torch() -> Any:
    """torch, with the operators defined."""
    import torch

    from onnxplug_flash_attn.functions import define

    define()
    return torch
