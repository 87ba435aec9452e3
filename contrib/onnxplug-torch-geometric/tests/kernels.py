"""The operators of torch_scatter and pyg_lib element by element, from their documentation: slow, and simple.

``define()`` makes them operators of torch where the packages aren't installed, with the schemas that the packages have.
Like the packages' own kernels, they can't run on tensors that have no values.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from onnxplug.torch_private import FakeTensor

_REDUCTIONS = ("sum", "mul", "mean", "min", "max")


@cache
def define() -> bool:
    """Defines the operators that torch doesn't know. Returns whether torch_scatter's operators are ours."""
    ours = not _known("torch_scatter", "scatter_max")
    if ours:
        _define_scatter()
    if not _known("pyg", "segment_matmul"):
        _define_pyg()
    return ours


def _known(namespace: str, name: str) -> bool:
    if namespace == "torch_scatter":
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_scatter")
    return hasattr(getattr(torch.ops, namespace), name)


@cache
def _library(namespace: str) -> torch.library.Library:
    return torch.library.Library(namespace, "FRAGMENT")


def _define(namespace: str, name: str, schema: str, kernel: Callable[..., Any], key: str) -> None:
    def on_values(*args: Any) -> Any:
        for x in args:
            if isinstance(x, torch.Tensor) and isinstance(x, FakeTensor):
                raise RuntimeError("a kernel of C++ was given a tensor without values")
        return kernel(*args)

    _library(namespace).define(name + schema)
    _library(namespace).impl(name, on_values, key)


def _define_scatter() -> None:
    key = "CompositeImplicitAutograd"
    for name in _REDUCTIONS:
        result = "(Tensor _0, Tensor _1)" if name in ("min", "max") else "Tensor _0"
        schema = f"(Tensor _0, Tensor _1, int _2, Tensor? _3, int? _4) -> {result}"
        _define("torch_scatter", f"scatter_{name}", schema, _scatter(name), key)
        if name == "mul":
            continue
        schema = f"(Tensor _0, Tensor _1, Tensor? _2, int? _3) -> {result}"
        _define("torch_scatter", f"segment_{name}_coo", schema, _segment_coo(name), key)
        schema = f"(Tensor _0, Tensor _1, Tensor? _2) -> {result}"
        _define("torch_scatter", f"segment_{name}_csr", schema, _segment_csr(name), key)
    schema = "(Tensor _0, Tensor _1, Tensor? _2) -> Tensor _0"
    _define("torch_scatter", "gather_coo", schema, gather_coo, key)
    _define("torch_scatter", "gather_csr", schema, gather_csr, key)


def _define_pyg() -> None:
    _define("pyg", "segment_matmul", "(Tensor input, Tensor ptr, Tensor other) -> Tensor", segment_matmul, "CPU")
    _define("pyg", "grouped_matmul", "(Tensor[] input, Tensor[] other) -> Tensor[]", grouped_matmul, "CPU")
    _define("pyg", "index_sort", "(Tensor indices, int? max=None) -> (Tensor, Tensor)", index_sort, "CPU")
    _define("pyg", "softmax_csr", "(Tensor src, Tensor ptr, int dim=0) -> Tensor", softmax_csr, "CPU")
    schema = "(Tensor left, Tensor right, Tensor? left_index, Tensor? right_index, str op) -> Tensor"
    _define("pyg", "sampled_op", schema, sampled_op, "CPU")


def _limit(dtype: torch.dtype, name: str) -> float:
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return limits.min if name == "max" else limits.max


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class _Group:
    """A place of the result, which takes its elements one after the other."""

    def __init__(self, name: str, start: torch.Tensor, nowhere: int) -> None:
        self.name, self.value, self.where, self.count = name, start.clone(), nowhere, 0

    def take(self, x: torch.Tensor, place: int) -> None:
        self.count += 1
        if self.name in ("sum", "mean"):
            self.value = self.value + x
        elif self.name == "mul":
            self.value = self.value * x
        elif (x < self.value) if self.name == "min" else (x > self.value):
            self.value, self.where = x.clone(), place


def _reduce(
    src: torch.Tensor, index: torch.Tensor, dim: int, sizes: list[int], name: str, out: torch.Tensor | None, mode: str
) -> Any:
    """``index`` has the shape of ``src``; a negative index has no place. ``mode``: the rounding of integer means."""
    dtype = _wide(src.dtype)
    # Pointers start in the dtype of the computation, and give 0 for an empty segment, not where no element was better.
    kind = dtype if mode == "pointers" else src.dtype
    first = {"mul": 1, "min": _limit(kind, "min"), "max": _limit(kind, "max")}.get(name, 0)
    start = torch.full(sizes, first, dtype=kind) if out is None else out
    if src.numel() == 0 and out is None:
        start = torch.zeros(sizes, dtype=kind)
    groups = {
        at: _Group(name, start[at].to(dtype), src.shape[dim])
        for at in itertools.product(*(range(s) for s in start.shape))
    }
    for at in itertools.product(*(range(s) for s in src.shape)):
        place = int(index[at])
        if place >= 0:
            groups[(*at[:dim], place, *at[dim + 1 :])].take(src[at].to(dtype), at[dim])
    value, where = start.clone(), torch.full(start.shape, src.shape[dim])
    for at, group in groups.items():
        value[at] = group.value
        where[at] = group.where
        if name == "mean" and group.count:
            rounding = None if dtype.is_floating_point else "floor" if mode == "floor" else "trunc"
            value[at] = torch.div(group.value, torch.tensor(group.count, dtype=dtype), rounding_mode=rounding)
        if name in ("min", "max") and out is None and (not group.count if mode == "pointers" else value[at] == first):
            value[at] = 0
    value = value.to(src.dtype)
    if out is not None:
        value = out.copy_(value)
    return (value, where) if name in ("min", "max") else value


def _size(index: torch.Tensor, given: int | None) -> int:
    return given if given is not None else int(index.max()) + 1 if index.numel() else 0


def _scatter(name: str) -> Callable[..., Any]:
    def kernel(src: Any, index: Any, dim: int, out: Any = None, size: int | None = None) -> Any:
        dim = dim + src.dim() if dim < 0 else dim
        if index.dim() == 1:
            index = index[(None,) * dim]
        while index.dim() < src.dim():
            index = index[..., None]
        index = index.expand(src.shape)
        sizes = [*src.shape[:dim], _size(index, size), *src.shape[dim + 1 :]]
        return _reduce(src, index, dim, sizes, name, out, "floor")

    return kernel


def _segment_coo(name: str) -> Callable[..., Any]:
    def kernel(src: Any, index: Any, out: Any = None, size: int | None = None) -> Any:
        assert (index[..., 1:] >= index[..., :-1]).all(), "segments must be sorted"
        dim = index.dim() - 1
        index = index.expand(src.shape[: dim + 1])
        sizes = [*src.shape[:dim], _size(index, size), *src.shape[dim + 1 :]]
        while index.dim() < src.dim():
            index = index[..., None]
        return _reduce(src, index.expand(src.shape), dim, sizes, name, out, "trunc")

    return kernel


def _segment_csr(name: str) -> Callable[..., Any]:
    def kernel(src: Any, ptr: Any, out: Any = None) -> Any:
        assert (ptr[..., 1:] >= ptr[..., :-1]).all(), "pointers must be sorted"
        dim, count = ptr.dim() - 1, ptr.shape[-1] - 1
        ptr = ptr.expand((*src.shape[:dim], count + 1))
        index = torch.full(src.shape, -1)
        for at in itertools.product(*(range(s) for s in src.shape[:dim])):
            for segment in range(count):
                index[at][int(ptr[at][segment]) : int(ptr[at][segment + 1])] = segment
        sizes = [*src.shape[:dim], count, *src.shape[dim + 1 :]]
        return _reduce(src, index, dim, sizes, name, None, "pointers")

    return kernel


def gather_coo(src: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``src[..., index[..., e], :]`` for each element e."""
    dim = index.dim() - 1
    result = src.new_zeros((*src.shape[:dim], index.shape[dim], *src.shape[dim + 1 :]))
    for at in itertools.product(*(range(s) for s in index.shape)):
        result[at] = src[(*at[:-1], int(index[at]))]
    return result


def gather_csr(src: torch.Tensor, ptr: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Row i as often as pointers i and i + 1 are apart."""
    dim = ptr.dim() - 1
    result = src.new_zeros((*src.shape[:dim], int(ptr.reshape(-1)[-1]), *src.shape[dim + 1 :]))
    for at in itertools.product(*(range(s) for s in src.shape[: dim + 1])):
        own = ptr.expand((*src.shape[:dim], ptr.shape[-1]))[at[:-1]]
        result[at[:-1]][int(own[at[-1]]) : int(own[at[-1] + 1])] = src[at]
    return result


def segment_matmul(x: torch.Tensor, ptr: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Each run of rows by its own matrix."""
    bounds = ptr.tolist()
    return torch.cat([x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], other, strict=False)])


def grouped_matmul(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    """Matrix by matrix."""
    return [x @ y for x, y in zip(left, right, strict=True)]


def index_sort(x: torch.Tensor, largest: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Stable, as radix sort is."""
    order = sorted(range(len(x)), key=lambda i: int(x[i]))
    places = torch.tensor(order, dtype=torch.int64)
    return x[places], places


def softmax_csr(src: torch.Tensor, ptr: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Run by run."""
    bounds = ptr.tolist()
    parts = [src.narrow(dim, a, b - a).softmax(dim) for a, b in itertools.pairwise(bounds)]
    return torch.cat(parts, dim)


def sampled_op(left: Any, right: Any, left_index: Any, right_index: Any, op: str) -> torch.Tensor:
    """Rows picked by index, then the operator."""
    a = left if left_index is None else left[left_index]
    b = right if right_index is None else right[right_index]
    return getattr(torch, op)(a, b)
