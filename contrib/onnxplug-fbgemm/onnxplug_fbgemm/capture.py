"""Shapes of fbgemm's operators, and traceable modules, while torch.export captures a model."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fbgemm_gpu
import torch
from packaging.specifiers import SpecifierSet

from onnxplug import UsageError
from onnxplug.capture.kernels import patched_kernel
from onnxplug.capture.patching import patched
from onnxplug.torch_private import DispatchKey, has_kernel_for_dispatch_key, operator_registry
from onnxplug_fbgemm import FUNCTIONS, REQUIRED
from onnxplug_fbgemm.layers import traceable

_KEYS = (DispatchKey.Meta, DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd)


def function_of(name: str) -> Callable[..., Any]:
    """The function that computes an operator by ATen operators."""
    function: Callable[..., Any] = getattr(importlib.import_module(f"onnxplug_fbgemm.{FUNCTIONS[name]}"), name)
    return function


def check_version() -> None:
    """Checks that the package knows the operators of the installed fbgemm.

    Raises:
        UsageError: It is of another version.
    """
    if not SpecifierSet(REQUIRED).contains(fbgemm_gpu.__version__, prereleases=True):
        raise UsageError(
            f"onnxplug-fbgemm knows the operators of fbgemm-gpu{REQUIRED}; {fbgemm_gpu.__version__} is installed",
            hint=f"pip install 'fbgemm-gpu-cpu{REQUIRED}'",
        )


@functools.cache
def without_shapes() -> list[str]:
    """The operators whose shapes fbgemm doesn't compute."""
    return [name for name in FUNCTIONS if not any(has_kernel_for_dispatch_key(f"fbgemm::{name}", key) for key in _KEYS)]


@contextlib.contextmanager
def patches(module: Any) -> Iterator[None]:
    """A context for the capture of a module.

    The functions that compute the operators give torch the shapes of their results. Modules of fbgemm and torchrec that
    are in use can be traced.
    """
    with contextlib.ExitStack() as stack:
        library = torch.library.Library("fbgemm", "FRAGMENT")
        stack.callback(library._destroy)
        for name in without_shapes():
            # Not torch.library.register_fake: fbgemm declares that only its own module gives shapes.
            operator_registry.find(f"fbgemm::{name}").fake_impl.register(function_of(name), __name__, lib=library)
        operator_registry.find(_NOBAG).fake_impl.register(_rows_alone, __name__, lib=library)
        for name in _STATIC:
            op = getattr(torch.ops.fbgemm, name).default
            stack.enter_context(patched_kernel(op, DispatchKey.Meta, lambda _, name=name: function_of(name)))
        for name in _TRACED:
            stack.enter_context(patched(torch.ops.fbgemm, name, function_of(name)))
        stack.enter_context(traceable(module))
        if "torchrec.sparse.jagged_tensor" in sys.modules:
            from onnxplug_fbgemm.keyed import register

            register()
        yield


#: Operators whose kernel for gradients, which is called first, reads sizes from values: our function is traced instead.
_TRACED = ("jagged_slice",)
#: Operators whose shapes fbgemm computes for static sizes alone.
_STATIC = ("pack_segments_v2",)


def _rows_alone(weights: Any, weights_offsets: Any, D: int, hash_size_cumsum: Any, indices: Any, *more: Any) -> Any:
    return weights.new_empty((indices.shape[0], D), dtype=_DTYPES[more[1]])


#: fbgemm's numbers of element types.
_DTYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
_NOBAG = "fbgemm::split_embedding_nobag_codegen_forward_cpu"
