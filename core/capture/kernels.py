"""Shapes of results during capture, of operators for which torch's own kernels get in the way of dynamic sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import patched_kernel
from onnxplug.torch_private import DispatchKey, OpOverload, detect_fake_mode

Kernel = Callable[..., Any]

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_RECURRENT_NAMES = frozenset((*_RECURRENT, "RNNBase", "LSTM", "GRU", "RNN"))
_FAKE_QUANTIZE = (
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask",
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
)
_INTERPOLATIONS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
    "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_lanczos2d_aa",
)  # fmt: skip


def _recurrent(original: Kernel, packed: bool) -> Kernel:
    """A recurrent layer's results without its steps; real tensors are still computed with."""

    def kernel(x: torch.Tensor, *rest: Any) -> Any:
        hx, options = (rest[1], rest[3:]) if packed else (rest[0], rest[2:])
        states = (hx,) if isinstance(hx, torch.Tensor) else tuple(hx)
        if detect_fake_mode((x, *states)) is None:
            return original(x, *rest)
        directions = 2 if options[4] else 1
        result = x.new_empty((*x.shape[:-1], directions * states[0].shape[-1]))
        return (result, *(s.new_empty(s.shape) for s in states))

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


def _as_float(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float32)


def _all_as_float(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [_as_float(x) for x in tensors]


def is_recurrent(name: str) -> bool:
    """Whether a name is that of a recurrent layer or its operator."""
    return name in _RECURRENT_NAMES


def _is_fake_quantization(name: str) -> bool:
    return "fake_quant" in name or "FakeQuant" in name


def _is_dequantization(name: str) -> bool:
    return name == "dequantize"


def _is_fractional_pool(name: str) -> bool:
    return "fractional_max_pool3d" in name or name == "FractionalMaxPool3d"


def _recurrent_kernels() -> Iterator[tuple[OpOverload, DispatchKey, Kernel]]:
    for name in _RECURRENT:
        packet = getattr(torch.ops.aten, name)
        for op, packed in ((packet.input, False), (packet.data, True)):
            for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
                if key in op.py_kernels:
                    yield op, key, _recurrent(op.py_kernels[key], packed)


def _fake_quantize_operators() -> Iterator[OpOverload]:
    """Those that torch has no kernel for shapes of."""
    for name in _FAKE_QUANTIZE:
        op = getattr(torch.ops.aten, name).default
        if DispatchKey.Meta not in op.py_kernels:
            yield op


def _interpolations_backward() -> Iterator[OpOverload]:
    """Those whose kernel for shapes is C++, which takes no symbolic sizes in a list."""
    for name in _INTERPOLATIONS:
        op = getattr(torch.ops.aten, f"{name}_backward").default
        if DispatchKey.Meta not in op.py_kernels:
            yield op


@contextlib.contextmanager
def shape_kernels(mentions: Mentions) -> Iterator[None]:
    """While it holds, tracing these operators computes the shapes of their results and nothing else.

    torch traces a recurrent layer step by step, which makes a dynamic number of steps static and takes as long as there
    are steps; it has no kernel at all for fake quantisation and dequantisation and most gradients of interpolations of
    dynamic sizes, and one that makes sizes static for fractional pools of volumes. Only what the
    model may use is patched; the gradients are, whatever its code names.
    """
    with contextlib.ExitStack() as stack:
        if mentions(is_recurrent):
            for op, key, kernel in list(_recurrent_kernels()):
                stack.enter_context(patched_kernel(op, key, kernel))
        if mentions(_is_fake_quantization):
            for op in _fake_quantize_operators():
                stack.enter_context(patched_kernel(op, DispatchKey.Meta, _result_and_mask))
        if mentions(_is_dequantization):
            packet = torch.ops.aten.dequantize
            for op, kernel in ((packet.self, _as_float), (packet.tensors, _all_as_float)):
                if DispatchKey.Meta not in op.py_kernels:
                    stack.enter_context(patched_kernel(op, DispatchKey.Meta, kernel))
        for op in _interpolations_backward():  # reached from autograd, where no code names them
            stack.enter_context(patched_kernel(op, DispatchKey.Meta, _interpolation_backward))
        fractional = torch.ops.aten.fractional_max_pool3d.default
        if mentions(_is_fractional_pool) and DispatchKey.Meta not in fractional.py_kernels:
            stack.enter_context(patched_kernel(fractional, DispatchKey.Meta, _fractional_pool))
        yield
