"""Inputs for verification: other sizes along dynamic dimensions, 1 among them, and other values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: Sizes that dynamic dimensions take in turn, as offsets from the exported size; ``None`` is the size 1.
_OFFSETS: tuple[int | None, ...] = (None, 1, 3, -1, 5)


def generated_inputs(
    leaves: Sequence[Any], values: Sequence[Any], ranges: Mapping[Any, Any], seed: int
) -> tuple[list[Any], dict[str, int]]:
    """New leaves for the flattened inputs.

    Args:
        leaves: The example inputs.
        values: What torch recorded for each (FakeTensor or symbolic number); static leaves are kept as they are.
        ranges: ``range_constraints`` of the program.
        seed: Decides sizes and values; the same seed gives the same inputs.

    Returns:
        The leaves, and the size that each symbol took.
    """
    sizes = _choose_sizes(leaves, values, ranges, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    fresh: list[Any] = []
    for leaf, value in zip(leaves, values, strict=True):
        if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
            shape = [_evaluate(size, sizes) for size in value.shape]
            fresh.append(_tensor_like(leaf, shape, generator))
        elif isinstance(value, torch.SymInt):
            fresh.append(_evaluate(value, sizes))
        else:
            fresh.append(leaf)
    return fresh, {str(symbol): size for symbol, size in sizes.items()}


def _choose_sizes(leaves: Sequence[Any], values: Sequence[Any], ranges: Mapping[Any, Any], seed: int) -> dict[Any, int]:
    exported: dict[Any, int] = {}
    for leaf, value in zip(leaves, values, strict=True):
        pairs: Any = ()
        if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
            pairs = zip(leaf.shape, value.shape, strict=True)
        elif isinstance(value, torch.SymInt):
            pairs = [(leaf, value)]
        for size, wanted in pairs:
            if isinstance(wanted, torch.SymInt):
                for symbol in wanted.node.expr.free_symbols:
                    exported.setdefault(symbol, int(size) if wanted.node.expr.is_Symbol else 0)
                if wanted.node.expr.is_Symbol:
                    exported[wanted.node.expr] = int(size)
    sizes: dict[Any, int] = {}
    for position, symbol in enumerate(sorted(exported, key=str)):
        offset = _OFFSETS[(seed + (position if seed else 0)) % len(_OFFSETS)]
        size = 1 if offset is None else exported[symbol] + offset
        sizes[symbol] = _clamp(size, ranges.get(symbol))
    return sizes


def resized_inputs(
    leaves: Sequence[Any], axes: Mapping[int, Mapping[int, str]], seed: int
) -> tuple[list[Any], dict[str, int]]:
    """As :func:`generated_inputs`, where only the names of dynamic axes are known: leaf to axis to name."""
    sizes: dict[str, int] = {}
    for leaf, named in axes.items():
        for axis, name in named.items():
            offset = _OFFSETS[(seed + (len(sizes) if seed else 0)) % len(_OFFSETS)]
            size = leaves[leaf].shape[axis]
            sizes.setdefault(name, max(1, 1 if offset is None else size + offset))
    generator = torch.Generator().manual_seed(seed + 1)
    fresh: list[Any] = []
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            fresh.append(leaf)
            continue
        shape = list(leaf.shape)
        for axis, name in axes.get(position, {}).items():
            shape[axis] = sizes[name]
        fresh.append(_tensor_like(leaf, shape, generator))
    return fresh, sizes


def _clamp(size: int, allowed: Any) -> int:
    low, high = 1, 1 << 30
    if allowed is not None:
        # torch's own lower bound of 2 comes of its treatment of 0 and 1, not from the model.
        low = int(allowed.lower) if allowed.lower.is_Integer and int(allowed.lower) > 2 else 1
        high = int(allowed.upper) if allowed.upper.is_Integer else high
    return max(low, min(size, high))


def _evaluate(size: Any, sizes: Mapping[Any, int]) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.expr.xreplace({s: _integer(v) for s, v in sizes.items()}))


def _integer(value: int) -> Any:
    from sympy import Integer

    return Integer(value)


def _tensor_like(example: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random values of the example's kind: floats normal at its scale, integers drawn from its own range."""
    dtype = example.dtype
    if dtype is torch.bool:
        if example.numel() and bool(example.all()):
            return torch.ones(list(shape), dtype=dtype)  # a mask that hides nothing stays one
        return torch.randint(0, 2, list(shape), generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        finite = example[torch.isfinite(example)] if example.numel() else example
        if finite.numel() and set(finite.flatten()[:64].tolist()) <= {0.0, 1.0}:
            return torch.randint(0, 2, list(shape), generator=generator).to(dtype)
        scale = float(finite.abs().double().mean()) if finite.numel() and not dtype.is_complex else 1.0
        fresh = torch.randn(
            list(shape), generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32
        )
        return (fresh * (scale or 1.0)).to(dtype)
    low, high = (int(example.min()), int(example.max())) if example.numel() else (0, 1)
    return torch.randint(low, high + 1, list(shape), generator=generator).to(dtype)


def clone_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Copies, so that a model that writes its inputs writes the copies."""
    return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
