"""Result shapes of operators that move, repeat, insert or leave out elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxplug.build.inference.dims import Attributes, Dim, Inputs, Result, axes_of, broadcast, dims_of, known, product


def transpose(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    perm = attributes.get("perm")
    return [(None, tuple(dims[p] for p in perm) if perm is not None else dims[::-1])]


def reshape(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    target = known(inputs[1])
    if target is None:
        shape = dims_of(inputs[1])
        rank = shape[0] if shape else None
        return [(None, (None,) * rank if isinstance(rank, int) else None)]
    source = dims_of(inputs[0])
    copies = not attributes.get("allowzero")
    result: list[Dim] = []
    for axis, size in enumerate(target):
        if size == 0 and copies:
            result.append(source[axis] if source is not None and axis < len(source) else None)
        else:
            result.append(None if size == -1 else size)
    if -1 in target and source is not None and all(isinstance(d, int) for d in source):
        others = [d for axis, d in enumerate(result) if target[axis] != -1]
        if all(isinstance(d, int) for d in others):
            rest = product(others)
            if rest:
                result[target.index(-1)] = product(source) // rest
    return [(None, tuple(result))]


def flatten(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, (None, None))]
    axis = attributes.get("axis", 1)
    axis += len(dims) if axis < 0 else 0
    halves = dims[:axis], dims[axis:]
    return [(None, tuple(product(h) if all(isinstance(d, int) for d in h) else _only(h) for h in halves))]


def _only(dims: Sequence[Dim]) -> Dim:
    """The one dimension that is not 1."""
    others = [d for d in dims if d != 1]
    return others[0] if len(others) == 1 else None


def unsqueeze(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    axes = attributes.get("axes")
    if axes is None:
        axes = known(inputs[1])
    if dims is None or axes is None:
        return [(None, None)]
    rank = len(dims) + len(axes)
    new = {a % rank for a in axes}
    rest = iter(dims)
    return [(None, tuple(1 if i in new else next(rest) for i in range(rank)))]


def squeeze(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    axes = axes_of(inputs, attributes, len(dims))
    if axes is None:
        return [(None, None)]
    if not axes:
        if any(not isinstance(d, int) for d in dims):
            return [(None, None)]
        return [(None, tuple(d for d in dims if d != 1))]
    return [(None, tuple(d for i, d in enumerate(dims) if i not in axes))]


def concat(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    shapes = [dims_of(v) for v in inputs]
    if any(s is None for s in shapes):
        return [(None, None)]
    first = list(shapes[0] or ())
    axis = attributes["axis"] % max(len(first), 1)
    sizes = [s[axis] for s in shapes if s is not None and axis < len(s)]
    first[axis] = sum(s for s in sizes if isinstance(s, int)) if all(isinstance(s, int) for s in sizes) else None
    return [(None, tuple(first))]


def split(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    sizes = attributes.get("split")
    if sizes is None and len(inputs) > 1:
        sizes = known(inputs[1])
    if dims is None:
        return []
    axis = attributes.get("axis", 0) % len(dims)
    count = attributes.get("num_outputs")
    if sizes is None and count is not None and isinstance(dims[axis], int):
        total = dims[axis]
        assert isinstance(total, int)
        chunk = -(-total // count)
        sizes = [chunk] * (total // chunk) + ([total % chunk] if total % chunk else [])
    if sizes is None:
        return [(None, (*dims[:axis], None, *dims[axis + 1 :]))] * (count or 0)
    return [(None, (*dims[:axis], size, *dims[axis + 1 :])) for size in sizes]


def expand(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    target = known(inputs[1])
    if target is None:
        shape = dims_of(inputs[1])
        source = dims_of(inputs[0])
        if shape and isinstance(shape[0], int) and source is not None:
            return [(None, (None,) * max(shape[0], len(source)))]
        return [(None, None)]
    return [(None, broadcast([dims_of(inputs[0]), tuple(target)]))]


def tile(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims, repeats = dims_of(inputs[0]), known(inputs[1])
    if dims is None or repeats is None:
        return [(None, (None,) * len(dims) if dims is not None else None)]
    return [(None, tuple(_times(d, r) for d, r in zip(dims, repeats, strict=True)))]


def pad(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    pads = known(inputs[1])
    if dims is None:
        return [(None, None)]
    axes = known(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else list(range(len(dims)))
    if pads is None or axes is None:
        return [(None, (None,) * len(dims))]
    result = list(dims)
    for position, axis in enumerate(axes):
        size, total = dims[axis], pads[position] + pads[position + len(axes)]
        result[axis] = size + total if isinstance(size, int) else (size if total == 0 else None)
    return [(None, tuple(result))]


def depth_to_space(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None or len(dims) != 4:
        return [(None, None)]
    block = attributes["blocksize"]
    batch, channels, *sizes = dims
    if spec.op_type == "SpaceToDepth":
        down = (s // block if isinstance(s, int) else None for s in sizes)
        return [(None, (batch, _times(channels, block * block), *down))]
    fewer = channels // (block * block) if isinstance(channels, int) else None
    return [(None, (batch, fewer, *(_times(s, block) for s in sizes)))]


def _times(dim: Dim, factor: int) -> Dim:
    return dim * factor if isinstance(dim, int) else dim if factor == 1 else None


def slice_(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    dims = dims_of(inputs[0])
    if dims is None:
        return [(None, None)]
    starts, ends = known(inputs[1]), known(inputs[2])
    axes = known(inputs[3]) if len(inputs) > 3 and inputs[3] is not None else None
    steps = known(inputs[4]) if len(inputs) > 4 and inputs[4] is not None else None
    result = list(dims)
    if axes is None and len(inputs) > 3 and inputs[3] is not None:
        return [(None, (None,) * len(dims))]
    touched = axes if axes is not None else list(range(len(starts) if starts is not None else len(dims)))
    for position, axis in enumerate(touched):
        size = dims[axis]
        exact = starts is not None and ends is not None and (len(inputs) < 5 or inputs[4] is None or steps is not None)
        if not exact or not isinstance(size, int):
            result[axis] = None
            continue
        assert starts is not None and ends is not None
        step = steps[position] if steps is not None else 1
        result[axis] = len(range(*slice(starts[position], ends[position], step).indices(size)))
        if step < 0 and ends[position] <= -(1 << 31):
            result[axis] = len(range(*slice(starts[position], None, step).indices(size)))
    return [(None, tuple(result))]


def gather(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    data, indices = dims_of(inputs[0]), dims_of(inputs[1])
    if data is None or indices is None or not data:
        return [(None, None)]
    axis = attributes.get("axis", 0) % len(data)
    return [(None, (*data[:axis], *indices, *data[axis + 1 :]))]


def gather_elements(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    return [(None, dims_of(inputs[1]))]


def gather_nd(inputs: Inputs, attributes: Attributes, spec: Any) -> Result:
    data, indices = dims_of(inputs[0]), dims_of(inputs[1])
    if data is None or indices is None or not indices or not isinstance(indices[-1], int):
        return [(None, None)]
    return [(None, (*indices[:-1], *data[attributes.get("batch_dims", 0) + indices[-1] :]))]
