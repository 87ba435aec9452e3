"""Operators that move elements, by PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import sliced
from onnxplug_reference.torch_ops.arrays import to_tensor, torch_dtype


def ints(values: Tensor) -> list[int]:
    """A tensor of sizes as Python ints."""
    return [int(v) for v in values.reshape(-1).tolist()]


def reshape(x: Tensor, shape: Tensor, *, allowzero: int = 0) -> Tensor:
    """Another shape of the same elements; 0 keeps a size unless ``allowzero``, -1 is inferred."""
    sizes = ints(shape)
    if not allowzero:
        sizes = [x.shape[i] if n == 0 else n for i, n in enumerate(sizes)]
    return x.reshape(sizes)


def squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    """Removes axes of size 1."""
    places = [i for i, n in enumerate(x.shape) if n == 1] if axes is None else ints(axes)
    if any(x.shape[a] != 1 for a in places):
        raise EvaluationError(f"the axes {places} of the shape {list(x.shape)} are not all of size 1")
    return x.squeeze(tuple(places))


def unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    """Inserts axes of size 1."""
    places = ints(axes)
    for axis in sorted(a % (x.dim() + len(places)) for a in places):
        x = x.unsqueeze(axis)
    return x


def transpose(x: Tensor, *, perm: Sequence[int] | None = None) -> Tensor:
    """Axes in another order, the reverse order by default."""
    return x.permute(tuple(perm) if perm is not None else tuple(reversed(range(x.dim()))))


def concat(*inputs: Tensor, axis: int) -> Tensor:
    """Tensors joined along an axis."""
    return torch.cat(inputs, axis)


def split(
    x: Tensor, sizes: Tensor | None = None, *, axis: int = 0, num_outputs: int | None = None, outputs: int
) -> tuple[Tensor, ...]:
    """Pieces of an axis, of given sizes, or of equal sizes but for the last, which may be smaller."""
    if sizes is not None:
        return x.split(ints(sizes), axis)
    count = num_outputs or outputs
    each = -(-x.shape[axis] // count)
    full = [each] * count
    left = x.shape[axis]
    for i in range(count):
        full[i] = min(each, left)
        left -= full[i]
    return x.split(full, axis)


def slice_(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    """Every step-th element from start to end of axes."""
    begin, stop = ints(starts), ints(ends)
    places = ints(axes) if axes is not None else list(range(len(begin)))
    strides = ints(steps) if steps is not None else [1] * len(begin)
    for a, b, axis, step in zip(begin, stop, places, strides, strict=True):
        indices = sliced(a, b, step, x.shape[axis])
        x = x.index_select(axis, torch.tensor(list(indices), dtype=torch.int64, device=x.device))
    return x


def expand(x: Tensor, shape: Tensor) -> Tensor:
    """Broadcasts in both directions."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(ints(shape))))


def tile(x: Tensor, repeats: Tensor) -> Tensor:
    """Repeats along each axis."""
    return x.repeat(ints(repeats)) if x.dim() else x


def shape(x: Tensor, *, end: int | None = None, start: int = 0) -> Tensor:
    """The sizes of the axes from start to end."""
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64, device=x.device)


def gather(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """Slices at indices of an axis."""
    axis %= x.dim()
    flat = indices.reshape(-1).long()
    rows_ = x.index_select(axis, torch.where(flat < 0, flat + x.shape[axis], flat))
    return rows_.reshape((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))


def gather_elements(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    """Elements at indices of an axis."""
    places = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    return x.gather(axis, places)


def gather_nd(x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    """Slices at tuples of indices; the first axes of both may be a batch."""
    batch = x.shape[:batch_dims]
    count, slices_each = math.prod(batch), math.prod(indices.shape[batch_dims:-1])
    rows = x.reshape((count, *x.shape[batch_dims:]))
    places = indices.reshape(count, slices_each, indices.shape[-1]).long()
    number = torch.arange(count, device=x.device)[:, None].expand(places.shape[:2])
    slices = rows[(number, *places.unbind(-1))]
    return slices.reshape((*indices.shape[:-1], *x.shape[batch_dims + indices.shape[-1] :]))


_REDUCE = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none") -> Tensor:
    """Replaces elements at indices of an axis, or reduces them with the updates."""
    places = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    if reduction == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, _REDUCE[reduction])


def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none") -> Tensor:
    """Replaces slices at tuples of indices, or reduces them with the updates."""
    depth = indices.shape[-1]
    inner = x.shape[depth:]
    width = math.prod(inner)
    rows = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=x.device)
    for k, n in enumerate(x.shape[:depth]):
        part = indices[..., k].long()
        if ((part < -n) | (part >= n)).any():
            raise EvaluationError(f"an index of the axis {k} is outside of its {n} elements")
        rows = rows * n + torch.where(part < 0, part + n, part)
    flat = x.reshape(math.prod(x.shape[:depth]), width).clone()
    places = rows.reshape(-1, 1).expand(-1, width)
    values = updates.reshape(places.shape)
    if reduction == "none":
        return flat.scatter(0, places, values).reshape(x.shape)
    return flat.scatter_reduce(0, places, values, _REDUCE[reduction]).reshape(x.shape)


def constant_of_shape(sizes: Tensor, *, value: np.ndarray | None = None) -> Tensor:
    """A tensor filled with one value, float32 0 by default."""
    fill = to_tensor(np.zeros(1, np.float32) if value is None else value, sizes.device)
    return fill.reshape(()).expand(ints(sizes)).clone()


def cast(x: Tensor, *, round_mode: str = "up", saturate: int = 1, to: int) -> Tensor:
    """Casts elements to another type."""
    return _cast(x, torch_dtype(to))


def cast_like(x: Tensor, like: Tensor, *, round_mode: str = "up", saturate: int = 1) -> Tensor:
    """Casts elements to another tensor's type."""
    return _cast(x, like.dtype)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise NotImplementedError("8-bit floats are rounded in NumPy: torch does not saturate as ONNX does")
    return x.to(dtype)


KERNELS = [
    Kernel("Cast", cast, since=6),
    Kernel("CastLike", cast_like, since=15),
    Kernel("Concat", concat, since=4),
    Kernel("ConstantOfShape", constant_of_shape, since=9),
    Kernel("Expand", expand, since=8),
    Kernel("Gather", gather),
    Kernel("GatherElements", gather_elements, since=11),
    Kernel("GatherND", gather_nd, since=11),
    Kernel("Reshape", reshape, since=5),
    Kernel("ScatterElements", scatter_elements, since=11),
    Kernel("ScatterND", scatter_nd, since=11),
    Kernel("Shape", shape),
    Kernel("Squeeze", squeeze, since=13),
    Kernel("Unsqueeze", unsqueeze, since=13),
    Kernel("Slice", slice_, since=10),
    Kernel("Split", split, since=13),
    Kernel("Tile", tile, since=6),
    Kernel("Transpose", transpose),
]
