"""What xformers launches on a GPU, exchanged for ATen operators that compute it: in a capture, or for good (``stand_in``)."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.patching import patched
from onnxplug.torch_private import DispatchKey, has_kernel_for_dispatch_key
from onnxplug_xformers import attention

_OPERATOR = "xformers_flash::flash_fwd"
#: As xformers 0.0.35 registers it.
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, SymInt window_left, "
    "SymInt window_right, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)"
)
#: Functions of xformers, by module and name, with those that take their place.
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("xformers.ops.fmha", "_memory_efficient_attention"): attention.forward,
    ("xformers.ops.fmha", "_memory_efficient_attention_forward"): attention.forward,
    ("xformers.ops.fmha", "_memory_efficient_attention_forward_requires_grad"): attention.forward_with_logarithms,
    ("xformers.ops.rmsnorm", "rms_norm"): attention.rms_norm,
    ("xformers.ops.rmsnorm", "rms_norm_add"): attention.rms_norm_add,
}


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Holds while a model is captured: the functions are exchanged wherever a module has them."""
    with contextlib.ExitStack() as stack:
        for module, name, function in _places():
            stack.enter_context(patched(module, name, function))
        yield


def put() -> None:
    """Exchanges them for good."""
    for path, _ in FUNCTIONS:
        import_module(path)
    for module, name, function in _places():
        setattr(module, name, function)


def _places() -> list[tuple[ModuleType, str, Callable[..., Any]]]:
    """Each module, of anyone, that has a function of the table. One with other parameters, of another version, stays."""
    places = []
    for (path, name), function in FUNCTIONS.items():
        theirs = getattr(sys.modules.get(path), name, None)
        if theirs is None or theirs is function or _parameters(theirs) != _parameters(function):
            continue
        holders = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType) and vars(m).get(name) is theirs]
        places += [(module, name, function) for module in holders]
    return places


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def define() -> None:
    """Gives torch xformers' operator where it doesn't know it, and a kernel for the CPU where it has none."""
    if not hasattr(torch.ops.xformers_flash, "flash_fwd"):
        definition = torch.library.custom_op(
            _OPERATOR, attention.flash, mutates_args=(), device_types="cpu", schema=SCHEMA
        )
        definition.register_fake(_shapes)
    elif not has_kernel_for_dispatch_key(_OPERATOR, DispatchKey.CPU):
        torch.library.register_kernel(_OPERATOR, "cpu", attention.flash)


def _shapes(query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (query.shape[0], query.shape[2], query.shape[1]) if query.dim() == 4 else (query.shape[1], query.shape[0])
    total = query.new_empty(sizes, dtype=torch.float32)
    return torch.empty_like(query), total, query.new_empty((2,), dtype=torch.int64)
