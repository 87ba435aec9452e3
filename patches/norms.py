"""Batch, instance and local response norms of sizes that follow from data: torch asks whether there are elements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false

from onnxplug.capture.kernels import patched_kernel
from onnxplug.capture.patching import patched
from onnxplug.plugin_api import Mentions
from onnxplug.torch_private import DispatchKey

Function = Callable[..., Any]


def _verify_spatial_size(size: Sequence[Any]) -> None:
    """As torch's own, without the branch on a size that depends on data."""
    number = 1
    for length in size[2:]:
        number *= length
    if guard_or_false(number == 1):
        raise ValueError(f"Expected more than 1 spatial element when training, got input size {size}")


def _normalization(original: Function) -> Function:
    def kernel(
        x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *rest: Any
    ) -> torch.Tensor:
        """The result's shape where the number of elements depends on data: torch's kernel branches on whether there are any."""
        if not free_unbacked_symbols(x) or (training and mean is not None):
            return original(x, weight, bias, mean, var, training, *rest)
        return torch.empty_like(x)

    return kernel


def _local_response_norm(original: Function) -> Function:
    def local_response_norm(
        input: torch.Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
    ) -> torch.Tensor:
        """As torch's own, which asks for elements; pools, as it has, run without any in no runtime."""
        if input.dim() < 3 or not free_unbacked_symbols(input):
            return original(input, size, alpha, beta, k)
        around = (0, 0) * (input.dim() - 2) + (size // 2, (size - 1) // 2)
        mean = torch.nn.functional.pad(input * input, around).unfold(1, size, 1).mean(-1)
        return input / (mean * alpha + k) ** beta

    return local_response_norm


def _normalizes(name: str) -> bool:
    return any(part in name.lower() for part in ("instancenorm", "instance_norm", "batchnorm", "batch_norm"))


@contextlib.contextmanager
def norms_of_any_size(mentions: Mentions) -> Iterator[None]:
    """While it holds, norms don't branch on sizes that depend on data; nothing is patched for a model without norms."""
    composite = DispatchKey.CompositeImplicitAutograd
    with contextlib.ExitStack() as stack:
        if mentions(_normalizes):
            stack.enter_context(patched(torch.nn.functional, "_verify_spatial_size", _verify_spatial_size))
            for op in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
                stack.enter_context(patched_kernel(op, composite, _normalization))
        if mentions(lambda name: name in ("local_response_norm", "LocalResponseNorm")):
            functional = torch.nn.functional
            replaced = _local_response_norm(functional.local_response_norm)
            stack.enter_context(patched(functional, "local_response_norm", replaced))
        yield
