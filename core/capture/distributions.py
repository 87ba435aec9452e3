"""``torch.distributions`` during capture: no branch on the values of parameters and samples, and shapes of what is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributions import Distribution

from onnxplug.capture.patching import patched, patched_kernel
from onnxplug.torch_private import DispatchKey

#: Operators without a kernel for shapes, whose result has the shape and dtype of their first argument.
_DRAWING = ("_sample_dirichlet", "binomial")


def _like_the_first(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """While it holds, distributions don't check their parameters and samples, unless they are made with ``validate_args=True``.

    The checks look at values, which are not known during capture; they raise an error and change no result.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patched(Distribution, "_validate_args", False))
        for name in _DRAWING:
            op = getattr(torch.ops.aten, name).default
            if DispatchKey.Meta not in op.py_kernels:
                stack.enter_context(patched_kernel(op, DispatchKey.Meta, _like_the_first))
        yield
