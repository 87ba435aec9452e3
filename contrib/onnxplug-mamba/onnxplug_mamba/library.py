"""The libraries without compilation: their operators with kernels for the CPU, and stand-ins for their extensions."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.torch_private import DispatchKey, dynamo_config, has_kernel_for_dispatch_key, higher_order_utilities
from onnxplug_mamba import FUNCTIONS, OPERATORS, convolution, scans

#: The schemas of causal_conv1d 1.7.0.
SCHEMAS = {
    "_causal_conv1d_fwd_cpp": "(Tensor x, Tensor weight, Tensor? bias, Tensor? seq_idx, Tensor? initial_states, "
    "Tensor(a!) out, Tensor(b!)? final_states_out, bool silu_activation) -> ()",
    "_causal_conv1d_update_cpp": "(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor(b!) out, "
    "bool silu_activation, Tensor? cache_seqlens, Tensor? conv_state_indices) -> ()",
}


@contextlib.contextmanager
def steps_of_static_sizes() -> Iterator[None]:
    """A context in which sizes that are static outside of a scan's step are static inside, too.

    In torch.export Dynamo takes every size in the step for dynamic, broadcast sizes of 1 included, which it then
    refuses.
    """
    original = higher_order_utilities._set_compilation_env

    @contextlib.contextmanager
    def environment() -> Iterator[None]:
        with original(), dynamo_config.patch(assume_static_by_default=True):
            yield

    with patched(higher_order_utilities, "_set_compilation_env", environment):
        yield


def define() -> None:
    """Defines causal_conv1d's operators where torch doesn't know them, and kernels for the CPU where they have none."""
    for name, schema in SCHEMAS.items():
        op, kernel = f"DaoAILab::{name}", _kernel(getattr(convolution, OPERATORS[name]), schema)
        if not hasattr(torch.ops.DaoAILab, name):
            written = tuple(p.split(" ")[1] for p in schema[1:-7].split(", ") if "!" in p)
            torch.library.custom_op(op, kernel, mutates_args=written, device_types="cpu", schema=schema)
        elif not has_kernel_for_dispatch_key(op, DispatchKey.CPU):
            torch.library.register_kernel(op, "cpu", kernel)


def _kernel(function: Callable[..., Any], schema: str) -> Callable[..., None]:
    """A kernel that writes a function's results into the arguments that the schema marks as written."""
    written = [n for n, parameter in enumerate(schema.split(", ")) if "!" in parameter]

    def kernel(*args: Any) -> None:
        results = function(*args)
        for place, result in zip([n for n in written if args[n] is not None], results, strict=True):
            args[place].copy_(result)

    return kernel


def put_extensions() -> None:
    """Puts stand-ins under the names of the libraries' extensions, where they weren't compiled."""
    of_conv1d = {
        f"causal_conv1d_{n}": _kernel(getattr(convolution, OPERATORS[op]), SCHEMAS[op])
        for n, op in (("fwd", "_causal_conv1d_fwd_cpp"), ("update", "_causal_conv1d_update_cpp"))
    }
    for name, functions in (("selective_scan_cuda", {"fwd": scans.selective}), ("causal_conv1d_cuda", of_conv1d)):
        if name not in sys.modules and find_spec(name) is None:
            sys.modules[name] = _module(name, functions)


def put_modules() -> None:
    """Makes mamba_ssm and causal_conv1d importable where they weren't compiled, and exchanges their kernels."""
    put_extensions()
    with contextlib.suppress(ImportError):  # these modules look for triton as they are imported
        from transformers.generation import (  # type: ignore[attr-defined]  # noqa: F401
            GenerateDecoderOnlyOutput,
            TextStreamer,
        )
    with _without_triton():
        for library in ("causal_conv1d", "mamba_ssm"):
            if find_spec(library) is not None:
                import_module(library)
    FUNCTIONS.put()


def _module(name: str, attributes: dict[str, Any]) -> ModuleType:
    module = ModuleType(name, "From onnxplug_mamba, for exports without a GPU.")
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(attributes)
    return module


@contextlib.contextmanager
def _without_triton() -> Iterator[None]:
    """A context for the import of modules with kernels of triton: a stand-in for triton where it isn't installed."""
    if "triton" in sys.modules or find_spec("triton") is not None:
        yield
        return
    triton = _Anything("triton")
    vars(triton).update(__version__="3.0.0", __path__=[], autotune=_autotune, Config=_Config)
    modules = {"triton": triton}
    for name in ("language", "testing"):
        modules[f"triton.{name}"] = vars(triton)[name] = _Anything(f"triton.{name}")
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class _Anything(ModuleType):
    """A module whose names are decorators that return the function, or constants that nothing reads."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and inspect.isfunction(args[0]) else self


class _Config:
    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **_: Any) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


def _autotune(configs: list[_Config], **_: Any) -> Callable[..., Any]:
    def decorate(kernel: Any) -> Any:
        kernel.configs = configs
        return kernel

    return decorate
