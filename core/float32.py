"""PyTorch's own float32, whatever shortcuts the user's settings allow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


@contextlib.contextmanager
def full_float32() -> Iterator[None]:
    """While it holds, PyTorch computes products of float32 in float32, not in TF32 or bfloat16.

    ``torch.set_float32_matmul_precision("medium")`` allows bfloat16 on the CPU, and cuDNN takes TF32 by default: numbers that are
    computed for the exported model, and results that it is compared with, would be a thousandth off.
    """
    backends: Any = torch.backends
    # An operator without a setting of its own shows that of its library.
    libraries = (backends, backends.cudnn, backends.mkldnn)
    cuda = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    operators = (*cuda, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn)
    shown = [(place, place.fp32_precision) for place in (*libraries, *operators)]
    # torch.export reads the older settings of the same, and refuses to go on where they say something else.
    products, cudnn = (
        _unless_mixed(torch.get_float32_matmul_precision),
        _unless_mixed(lambda: backends.cudnn.allow_tf32),
    )
    try:
        for place in libraries:
            place.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        backends.mkldnn.conv.fp32_precision = backends.mkldnn.rnn.fp32_precision = "ieee"
        yield
    finally:
        if products is not None:
            torch.set_float32_matmul_precision(products)
        if cudnn is not None:
            backends.cudnn.allow_tf32 = cudnn
        for place, precision in shown:
            place.fp32_precision = "none"
            if place.fp32_precision != precision:
                place.fp32_precision = precision


def _unless_mixed(setting: Callable[[], _T]) -> _T | None:
    """A setting that PyTorch does not give where the user has made it in the newer way alone."""
    try:
        return setting()
    except RuntimeError:
        return None
