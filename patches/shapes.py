"""Shapes of results during capture, for operators whose own kernels in torch prevent dynamic sizes."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxplug.patches.kernels import patched_kernel
from onnxplug.plugin_api import Mentions
from onnxplug.torch_private import DispatchKey, OpOverload, detect_fake_mode

Kernel = Callable[..., Any]

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_RECURRENT_NAMES = frozenset((*_RECURRENT, "RNNBase", "LSTM", "GRU", "RNN"))
_FAKE_QUANTIZE = (
    "fake_quantize_per_tensor_affine_cachemask.default",
    "fake_quantize_per_channel_affine_cachemask.default",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
)
_INTERPOLATIONS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)  # fmt: skip


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


def _result_and_mask(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _fractional_pool(
    x: torch.Tensor, kernel_size: Any, output_size: Sequence[int], random_samples: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[: x.dim() - 3], *(list(output_size) * 3)[:3])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _interpolation_backward(
    grad: torch.Tensor, output_size: Any, input_size: Sequence[int], *rest: Any, **options: Any
) -> torch.Tensor:
    wanted = (*input_size[:2], *output_size)
    torch._check(
        grad.dim() == len(wanted), lambda: f"expected a gradient of {len(wanted)} dimensions, not {grad.dim()}"
    )
    for size, expected in zip(grad.shape, wanted, strict=True):
        torch._check(size == expected, lambda: f"expected a gradient of the shape {wanted}, not {tuple(grad.shape)}")
    return grad.new_empty(tuple(input_size))


def _like_the_first(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _as_float(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _all_as_float(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [_as_float(x) for x in tensors]


#: Test of a name in the model's code, the operators that it stands for, and the kernel of each for which torch has none. ``None``
#: instead of a test: names don't tell; gradients are reached from autograd.
_KERNELS: tuple[tuple[Callable[[str], bool] | None, Sequence[str], Kernel], ...] = (
    (lambda name: "fake_quant" in name or "FakeQuant" in name, _FAKE_QUANTIZE, _result_and_mask),
    (lambda name: name == "dequantize", ("dequantize.self",), _as_float),
    (lambda name: name == "dequantize", ("dequantize.tensors",), _all_as_float),
    (None, [f"{name}_backward.default" for name in _INTERPOLATIONS], _interpolation_backward),
    (
        lambda name: "fractional_max_pool3d" in name or name == "FractionalMaxPool3d",
        ("fractional_max_pool3d.default",),
        _fractional_pool,
    ),
    (None, ("_sample_dirichlet.default", "binomial.default"), _like_the_first),
)


#: Composite operators whose own kernels make sizes static.
_COMPOSITES = {
    torch.ops.aten.max_pool1d.default: _max_pool1d,
    torch.ops.aten.linalg_matrix_norm.default: _matrix_norm,
    torch.ops.aten.linalg_norm.default: _norm,
}


def _recurrent_kernels() -> Iterator[tuple[OpOverload, DispatchKey, Kernel]]:
    for name in _RECURRENT:
        packet = getattr(torch.ops.aten, name)
        for op, packed in ((packet.input, False), (packet.data, True)):
            for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
                if key in op.py_kernels:
                    yield op, key, functools.partial(_recurrent, packed=packed)


@contextlib.contextmanager
def shape_kernels(mentions: Mentions) -> Iterator[None]:
    """While it holds, tracing these operators computes only the shapes of their results.

    torch traces a recurrent layer step by step, which makes a dynamic number of steps static and takes time for each step. It
    has no kernel at all for fake quantisation and dequantisation, for most gradients of interpolations of dynamic sizes (the C++
    kernel takes no symbolic sizes in a list) and for two draws, and kernels that make sizes static for fractional pools of
    volumes, for max pools of one axis and for norms of matrices. Operators that names tell of are patched only where the model's
    code has such a name.
    """
    with contextlib.ExitStack() as stack:
        if mentions(lambda name: name in _RECURRENT_NAMES):
            for op, key, kernel_of in list(_recurrent_kernels()):
                stack.enter_context(patched_kernel(op, key, kernel_of))
        composite = DispatchKey.CompositeImplicitAutograd
        for composed, composite_kernel in _COMPOSITES.items():
            stack.enter_context(patched_kernel(composed, composite, composite_kernel))
        for concerns, names, kernel in _KERNELS:
            if concerns is None or mentions(concerns):
                for packet, _, overload in (name.partition(".") for name in names):
                    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)  # None: not in this torch
                    if operator is not None and DispatchKey.Meta not in operator.py_kernels:
                        stack.enter_context(patched_kernel(operator, DispatchKey.Meta, lambda _, kernel=kernel: kernel))
        yield
