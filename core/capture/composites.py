"""Composite operators whose own kernels make sizes static, and kernels of theirs for any sizes.

They hold while a model is captured (:mod:`onnxplug.patches.shapes`), and while torch decomposes a program that has such operators.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from onnxplug.capture.kernels import patched_kernel, without_decomposition
from onnxplug.capture.patching import patched
from onnxplug.torch_private import DispatchKey, OpOverload, detect_fake_mode, meta_registrations

Kernel = Callable[..., Any]
#: An operator, the dispatch key of a kernel, and what makes another one from that.
Exchange = tuple[OpOverload, DispatchKey, Callable[[Kernel], Kernel]]

#: Names of the recurrent layers.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _recurrent(original: Kernel, packed: bool) -> Kernel:
    """A recurrent layer's fake results without its steps; real tensors are still computed."""

    def kernel(x: torch.Tensor, *rest: Any) -> Any:
        hx, options = (rest[1], rest[3:]) if packed else (rest[0], rest[2:])
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        if detect_fake_mode((x, *states)) is None:
            return original(x, *rest)
        directions = 2 if options[4] else 1
        result = x.new_empty((*x.shape[:-1], directions * states[0].shape[-1]))
        return (result, *(s.new_empty(s.shape) for s in states))

    return kernel


def _max_pool1d(original: Kernel) -> Kernel:
    """By the operator that gives the places too: without a gradient, torch's kernel takes a path that knows plain sizes alone."""

    def kernel(*args: Any, **options: Any) -> torch.Tensor:
        values: torch.Tensor = torch.ops.aten.max_pool1d_with_indices.default(*args, **options)[0]
        return values

    return kernel


def _matrix_norm(original: Kernel) -> Kernel:
    """The largest or smallest sum along an axis, where the norm is one."""

    def kernel(
        x: torch.Tensor, order: Any, dim: Sequence[int] = (-2, -1), keepdim: bool = False, *, dtype: Any = None
    ) -> Any:
        is_of_sums = order in (1, -1, math.inf, -math.inf) and x.dim() > 1 and len(dim) == 2
        # Norms of complex matrices are decomposed later, by torch's own kernel.
        if not is_of_sums or x.is_complex() or (dim[0] - dim[1]) % x.dim() == 0:
            return original(x, order, dim, keepdim, dtype=dtype)
        summed, compared = dim if abs(order) == 1 else reversed(dim)
        sums = torch.linalg.vector_norm(x, 1, summed, keepdim=True, dtype=dtype)
        norm = (sums.amax if order > 0 else sums.amin)(compared, keepdim=True)
        return norm if keepdim else norm.squeeze(tuple(dim))

    return kernel


def _norm(original: Kernel) -> Kernel:
    """That of matrices, where the norm is one."""

    def kernel(x: torch.Tensor, order: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        axes = (0, 1) if dim is None and x.dim() == 2 else dim or ()
        if order is None or len(axes) != 2:
            return original(x, order, dim, keepdim, dtype=dtype)
        return torch.ops.aten.linalg_matrix_norm.default(x, order, axes, keepdim, dtype=dtype)

    return kernel


def _cond(original: Kernel) -> Kernel:
    """A condition number's fake result: torch's kernel asks for a plain number of elements, for the norms that have names."""

    def kernel(x: torch.Tensor, order: str) -> torch.Tensor:
        is_matrix = x.dtype in (torch.float32, torch.float64) and x.dim() > 1 and x.shape[-2] == x.shape[-1]
        if detect_fake_mode((x,)) is None or order not in ("fro", "nuc") or not is_matrix:
            return original(x, order)
        return x.new_empty(x.shape[:-2])

    return kernel


def _fill_diagonal(original: Kernel) -> Kernel:
    """By the diagonal of a matrix: torch's kernel asks for the shorter side. With ``wrap`` a tall matrix has several."""

    def kernel(x: torch.Tensor, value: Any, wrap: bool = False) -> torch.Tensor:
        if x.dim() != 2 or wrap:
            return original(x, value, wrap)
        x.diagonal().fill_(value)
        return x

    return kernel


def _tensor_split(original: Kernel) -> Kernel:
    """The parts of an axis, of which the first ones have an element more: torch's kernel asks how many these are."""

    def kernel(x: torch.Tensor, sections: int, dim: int = 0) -> Any:
        is_known = type(sections) is not int or sections < 1 or not x.dim() or isinstance(x.shape[dim], int)
        if is_known or detect_fake_mode((x,)) is None:
            return NotImplemented
        sizes, strides, start, parts = list(x.shape), x.stride(), 0, []
        for part in range(sections):
            sizes[dim] = (x.shape[dim] + sections - 1 - part) // sections
            parts.append(x.as_strided(sizes, strides, x.storage_offset() + start * strides[dim]))
            start = start + sizes[dim]
        return parts

    return kernel


def _pooled_size(size: Any, kernel: Any, before: Any, after: Any, stride: Any, dilation: Any, ceil_mode: bool) -> Any:
    """The number of windows of a pool. In ``ceil_mode`` none begins in the padding at the end; torch asks whether one does."""
    span = size + before + after - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return span // stride + 1
    windows = (span + stride - 1) // stride + 1
    if after + stride - 2 < dilation * (kernel - 1):  # the last one begins before the padding at any size
        return windows
    return torch.sym_min(windows, (size + before + stride - 1) // stride)


_COMPOSITES = {
    torch.ops.aten.fill_diagonal_.default: _fill_diagonal,
    torch.ops.aten.max_pool1d.default: _max_pool1d,
    torch.ops.aten.linalg_matrix_norm.default: _matrix_norm,
    torch.ops.aten.linalg_norm.default: _norm,
    torch.ops.aten.linalg_cond.p_str: _cond,
}


#: Kernels of fake results alone.
_FAKES = {torch.ops.aten.tensor_split.sections: _tensor_split}


def composite_kernel(op: OpOverload) -> Kernel:
    """The kernel of a composite operator: one for any sizes, where torch's own makes them static."""
    kernel_of = _COMPOSITES.get(op)
    return op.decompose if kernel_of is None else kernel_of(op.decompose)


def composite_kernels() -> list[Exchange]:
    """The kernels of max pools of one axis, of norms and condition numbers of matrices, of splits, and of writes to a diagonal."""
    kernels = {**_COMPOSITES, **_FAKES}
    return [(op, DispatchKey.CompositeImplicitAutograd, kernel_of) for op, kernel_of in kernels.items()]


def recurrent_kernels() -> list[Exchange]:
    """The kernels of recurrent layers, of which torch takes one or the other."""
    return [
        (op, key, functools.partial(_recurrent, packed=packed))
        for packet in (getattr(torch.ops.aten, name) for name in RECURRENT)
        for op, packed in ((packet.input, False), (packet.data, True))
        for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
        if key in op.py_kernels
    ]


def pooled_sizes() -> AbstractContextManager[None]:
    """While it holds, results of pools in ``ceil_mode`` have sizes that are right for all sizes of the operand."""
    return patched(meta_registrations, "pooling_output_shape_pad_lr", _pooled_size)


@contextlib.contextmanager
def composites_kept(operators: Collection[Any]) -> Iterator[None]:
    """While it holds, ``run_decompositions`` leaves the sizes of these operators dynamic, where its table doesn't have them.

    torch keeps composite operators that the table doesn't have, but computes the shapes of their results by its own decomposition
    or kernel, which make sizes static for the operators of this module.

    Args:
        operators: Overloads of operators.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(pooled_sizes())
        for op, key, kernel_of in (*composite_kernels(), *recurrent_kernels()):
            if op in operators and key == DispatchKey.CompositeImplicitAutograd:
                stack.enter_context(patched_kernel(op, key, kernel_of))
                stack.enter_context(without_decomposition(op))
        yield
