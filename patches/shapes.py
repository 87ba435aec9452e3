"""Shapes of results during capture, for operators whose own kernels in torch prevent dynamic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxplug.capture.composites import RECURRENT, Kernel, composite_kernels, pooled_sizes, recurrent_kernels
from onnxplug.capture.kernels import patched_kernel, without_decomposition
from onnxplug.plugin_api import Mentions
from onnxplug.registry.names import find_overload
from onnxplug.torch_private import DispatchKey, decomposition_table

_RECURRENT_NAMES = frozenset((*RECURRENT, "RNNBase", "LSTM", "GRU", "RNN"))
_FAKE_QUANTIZE = (
    "fake_quantize_per_tensor_affine_cachemask.default",
    "fake_quantize_per_channel_affine_cachemask.default",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default",
)
#: Names of the operators of ``interpolate``.
INTERPOLATIONS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)  # fmt: skip


def _result_and_mask(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _fractional_pool(
    x: torch.Tensor, kernel_size: Any, output_size: Sequence[int], random_samples: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[: x.dim() - 3], *(list(output_size) * 3)[:3])
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


def _affine_grid(theta: torch.Tensor, size: Sequence[int], align_corners: bool) -> torch.Tensor:
    spatial = len(size) - 2
    torch._check(spatial in (2, 3), lambda: f"expected an output size of 4 or 5 dimensions, not {len(size)}")
    _check_shape("matrices", theta, (size[0], spatial, spatial + 1))
    return theta.new_empty((*size[:1], *size[2:], spatial))


def _interpolation_backward(
    grad: torch.Tensor, output_size: Any, input_size: Sequence[int], *rest: Any, **options: Any
) -> torch.Tensor:
    _check_shape("a gradient", grad, (*input_size[:2], *output_size))
    return grad.new_empty(tuple(input_size))


def _check_shape(words: str, tensor: torch.Tensor, wanted: tuple[int, ...]) -> None:
    torch._check(
        tensor.dim() == len(wanted), lambda: f"expected {words} of {len(wanted)} dimensions, not {tensor.dim()}"
    )
    for size, expected in zip(tensor.shape, wanted, strict=True):
        torch._check(size == expected, lambda: f"expected {words} of the shape {wanted}, not {tuple(tensor.shape)}")


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
    (None, [f"{name}_backward.default" for name in INTERPOLATIONS], _interpolation_backward),
    (
        lambda name: "fractional_max_pool3d" in name or name == "FractionalMaxPool3d",
        ("fractional_max_pool3d.default",),
        _fractional_pool,
    ),
    (lambda name: name == "affine_grid", ("affine_grid_generator.default",), _affine_grid),
    (None, ("_sample_dirichlet.default", "binomial.default"), _like_the_first),
)


def _has_none(operator: Any) -> bool:
    """Whether torch has an operator, and computes its shapes by a decomposition or not at all."""
    return operator is not None and (operator in decomposition_table or DispatchKey.Meta not in operator.py_kernels)


@contextlib.contextmanager
def shape_kernels(mentions: Mentions) -> Iterator[None]:
    """While it holds, tracing these operators computes only the shapes of their results.

    torch traces a recurrent layer step by step, which makes a dynamic number of steps static and takes time for each step. It
    has no kernel at all for fake quantisation and dequantisation, for most gradients of interpolations of dynamic sizes (the C++
    kernel takes no symbolic sizes in a list) and for two draws, and kernels that make sizes static for fractional pools of
    volumes, for affine grids, for max pools of one axis and for norms of matrices. Operators that names tell of are patched only
    where the model's code has such a name.
    """
    with pooled_sizes(), contextlib.ExitStack() as stack:
        if mentions(lambda name: name in _RECURRENT_NAMES):
            for op, key, kernel_of in recurrent_kernels():
                stack.enter_context(patched_kernel(op, key, kernel_of))
        for op, key, kernel_of in composite_kernels():
            stack.enter_context(patched_kernel(op, key, kernel_of))
        for concerns, names, kernel in _KERNELS:
            if concerns is None or mentions(concerns):
                for operator in filter(_has_none, (find_overload(f"aten::{name}") for name in names)):
                    stack.enter_context(patched_kernel(operator, DispatchKey.Meta, lambda _, kernel=kernel: kernel))
                    stack.enter_context(without_decomposition(operator))
        yield
