"""Inputs for a model from a file: given inputs, and others generated from the model's types and sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from onnxplug.build.dtypes import ONNX_TO_TORCH
from onnxplug.errors import UsageError
from onnxplug.strings import STRING
from onnxplug.text import did_you_mean
from onnxplug_tools.inspection.dims import check_names, size_of
from onnxplug_tools.inspection.words import type_text

#: A hint for a model that does not run on its inputs.
OTHER_INPUTS = "Give inputs that it takes: --input 'ids=int64[2,8]{0..99}' or --input mask=FILE.npy, and --sizes."
#: The size of a dynamic dimension for which none is given.
_DEFAULT_SIZE = 1


@dataclass(frozen=True)
class Feed:
    """The inputs of a run.

    Attributes:
        sizes: The sizes of dynamic dimensions by name.
        assumed: Names of the dimensions without a given size: they are 1.
    """

    values: dict[str, torch.Tensor]
    sizes: dict[str, int]
    assumed: tuple[str, ...] = ()

    @property
    def texts(self) -> dict[str, str]:
        """Dtypes and shapes of the inputs in words: ``"float32[4, 3]"``."""
        return {
            name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for name, value in self.values.items()
        }


def make_feed(
    model: ir.Model,
    feed: Sequence[tuple[str | None, Any]] = (),
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Feed:
    """Inputs for a model. Floats are normal, integers 0 or 1, bools random; the same for the same seed.

    Args:
        feed: Given inputs with their names; ``None`` stands for the next input that no other entry names. The sizes of
            their dimensions hold for the other inputs.
        sizes: Sizes of dynamic dimensions; 1 where there is none.
    """
    inputs = {str(value.name): value for value in model.graph.inputs if value.name not in model.graph.initializers}
    named = _by_name(list(inputs), feed)
    sizes_by_name = dict(sizes or {})
    dims = {dim for value in inputs.values() for dim in _dims(value) or () if isinstance(dim, str)}
    check_names(sizes_by_name, dims, "no input has")
    for name, tensor in named.items():
        _bind(name, inputs[name], tensor, sizes_by_name)
    plain = {dim: sizes_by_name.get(dim) for dim in sorted(dims) if dim.isidentifier()}
    assumed = [dim for dim, size in plain.items() if size is None]
    known = {**sizes_by_name, **dict.fromkeys(assumed, _DEFAULT_SIZE)}
    generator = torch.Generator().manual_seed(seed)
    values: dict[str, torch.Tensor] = {}
    for name, value in inputs.items():
        if name in named:
            values[name] = named[name]
            continue
        shape = []
        for dim in _dims(value, name) or ():
            size = size_of(dim, known)
            if size is None and isinstance(dim, str):
                assumed.append(dim)
            shape.append(_DEFAULT_SIZE if size is None else size)
        values[name] = _random(name, value, shape, generator)
    return Feed(
        values,
        {dim: size for dim in sorted(dims) if (size := size_of(dim, known)) is not None},
        tuple(dict.fromkeys(assumed)),
    )


def feed_of_other(model: ir.Model, feed: Feed, name: str) -> dict[str, torch.Tensor]:
    """A first model's inputs for another model, which must take inputs of the same names; ``name`` is for errors."""
    wanted = {str(value.name) for value in model.graph.inputs if value.name not in model.graph.initializers}
    if wanted != set(feed.values):
        raise UsageError(
            f"{name} takes the inputs {', '.join(sorted(wanted)) or 'none'}, the first model {', '.join(sorted(feed.values))}",
            hint="Models are measured and compared on the same inputs, so that their names must be the same.",
        )
    return make_feed(model, list(feed.values.items())).values  # checks dtypes and shapes


def _by_name(names: Sequence[str], feed: Sequence[tuple[str | None, Any]]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    taken = {name for name, _ in feed if name is not None}
    free = [name for name in names if name not in taken]
    for name, value in feed:
        if name is None:
            if not free:
                raise UsageError(f"more inputs are given than the model has: {', '.join(names) or 'none'}")
            name = free.pop(0)
        if name not in names:
            hint = did_you_mean(name, names, otherwise=f"Its inputs are {', '.join(names)}.")
            raise UsageError(f"the model has no input {name!r}", hint=hint)
        if name in tensors:
            raise UsageError(f"the input {name!r} is given twice")
        tensors[name] = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensors


def _dims(value: ir.Value, name: str | None = None) -> list[Any] | None:
    """The dimensions of an input, of which -1 is unknown; an error where the rank is unknown and a name is given."""
    if value.shape is None:
        if name is not None:
            raise UsageError(
                f"the model does not say how many axes its input {name!r} has", hint="Give it: --input NAME=FILE.npy"
            )
        return None
    return [(dim if dim >= 0 else None) if isinstance(dim, int) else dim.value for dim in value.shape]


def _bind(name: str, value: ir.Value, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    """Checks an input that is given, and takes the sizes of its dimensions."""
    expected = ONNX_TO_TORCH.get(value.dtype) if value.dtype is not None else None
    if expected is not None and tensor.dtype != expected:
        raise UsageError(f"the input {name!r} is {tensor.dtype}, the model takes {expected}")
    dims = _dims(value)
    if dims is None:
        return
    if len(dims) != tensor.dim():
        raise UsageError(f"the input {name!r} has the shape {list(tensor.shape)}, the model takes {dims}")
    for dim, size in zip(dims, tensor.shape, strict=True):
        if isinstance(dim, int) and dim != size:
            raise UsageError(f"the input {name!r} has the shape {list(tensor.shape)}, the model takes {dims}")
        if isinstance(dim, str) and dim.isidentifier() and sizes.setdefault(dim, size) != size:
            raise UsageError(f"the input {name!r} has {dim} = {size}, elsewhere it is {sizes[dim]}")


def _random(name: str, value: ir.Value, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    dtype = ONNX_TO_TORCH.get(value.type.dtype) if isinstance(value.type, ir.TensorType) else None
    if dtype is None or dtype is STRING:
        kind = type_text(value.type) or "of no known type"
        raise UsageError(f"the input {name!r} is {kind}: onnxplug can't make one up")
    try:
        return _drawn(dtype, list(shape), generator)
    except RuntimeError as error:  # there is not so much memory
        size = f"{math.prod(shape) * dtype.itemsize:,} bytes"
        raise UsageError(f"the input {name!r} of the shape {list(shape)} can't be made: it takes {size}") from error


def _drawn(dtype: torch.dtype, shape: list[int], generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex64).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
