"""Functions of torch that ask for sizes, or take them as plain numbers only, while a model is captured with dynamic ones."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

from onnxplug.capture import factories
from onnxplug.capture.mentions import Mentions
from onnxplug.capture.patching import patched, patched_kernel
from onnxplug.torch_private import DispatchKey

Function = Callable[..., Any]


def _istft(original: Function) -> Function:
    def istft(
        input: torch.Tensor,
        n_fft: int,
        hop_length: int | None = None,
        win_length: int | None = None,
        window: torch.Tensor | None = None,
        center: bool = True,
        normalized: bool = False,
        onesided: bool | None = None,
        length: Any = None,
        return_complex: bool = False,
    ) -> torch.Tensor:
        """As torch's own, also for a length that is a dynamic size: a part of the whole signal, or the signal and zeros."""
        options = (normalized, onesided)
        if not isinstance(length, torch.SymInt):
            return original(
                input, n_fft, hop_length, win_length, window, center, *options, length, return_complex=return_complex
            )
        whole = original(
            input, n_fft, hop_length, win_length, window, False, *options, None, return_complex=return_complex
        )
        start = n_fft // 2 if center else 0
        parts = [start, length, whole.shape[-1] - start]
        zeros = whole.new_zeros((*whole.shape[:-1], length))
        return torch.cat([whole, zeros], -1).split(parts, -1)[1]

    return istft


def _linspace(original: Function) -> Function:
    def linspace(start: Any, end: Any, steps: Any, **options: Any) -> torch.Tensor:
        """As torch's own, also for a dynamic number of steps in the strict mode."""
        dynamic = isinstance(steps, torch.SymInt) and factories.is_known(factories.linspace, options)
        return (factories.linspace if dynamic else original)(start, end, steps, **options)

    return linspace


def _verify_spatial_size(size: Sequence[Any]) -> None:
    """As torch's own; a size that follows from data is not asked for."""
    number = 1
    for length in size[2:]:
        number *= length
    if guard_or_false(number == 1):
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {size}")


def _normalization(original: Function) -> Function:
    def kernel(
        x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
    ) -> torch.Tensor:
        """The result's shape where the number of elements follows from data: torch's kernel asks whether there is any."""
        if not free_unbacked_symbols(x) or (training and mean is not None):
            return original(x, weight, bias, mean, var, training, *rest)
        return torch.empty_like(x)

    return kernel


def _linear_or_window(name: str) -> bool:
    return name in ("linspace", "istft")


def _normalizes(name: str) -> bool:
    return any(part in name.lower() for part in ("instancenorm", "instance_norm", "batchnorm", "batch_norm"))


@contextlib.contextmanager
def sizes_of_any_kind(mentions: Mentions) -> Iterator[None]:
    """While it holds, these functions take dynamic sizes, and don't ask for sizes that follow from data.

    Only what the model may use is patched.
    """
    composite, functional = DispatchKey.CompositeImplicitAutograd, torch.nn.functional
    with contextlib.ExitStack() as stack:
        if mentions(_linear_or_window):
            stack.enter_context(patched(torch, "linspace", _linspace(torch.linspace)))
            istft = _istft(torch.istft)
            for owner in (torch, torch.functional, torch.Tensor):
                stack.enter_context(patched(owner, "istft", istft))
        if mentions(_normalizes):
            stack.enter_context(patched(functional, "_verify_spatial_size", _verify_spatial_size))
            for op in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
                original = op.py_kernels.get(composite) or functools.partial(op._op_dk, composite)
                stack.enter_context(patched_kernel(op, composite, _normalization(original)))
        yield
