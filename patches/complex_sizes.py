"""Sizes beside complex tensors while torch.export traces them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.torch_private import prims_common


@contextlib.contextmanager
def sizes_beside_complex_numbers() -> Iterator[None]:
    """While it holds, a dynamic size that torch brings to a complex dtype, as a mean does, stays dynamic as a float."""
    original = prims_common.dtype_to_type_ctor

    def dtype_to_type_ctor(dtype: torch.dtype) -> Callable[[Any], Any]:
        constructor: Callable[[Any], Any] = original(dtype)
        if not dtype.is_complex:
            return constructor
        return lambda x: torch.sym_float(x) if isinstance(x, torch.SymInt | torch.SymFloat) else constructor(x)

    with patched(prims_common, "dtype_to_type_ctor", dtype_to_type_ctor):
        yield
