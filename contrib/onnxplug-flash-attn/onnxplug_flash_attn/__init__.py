"""flash_attn's operators in ONNX: the plugin, and ``stand_in``. Importing it imports neither torch nor flash_attn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import Domain, LibraryFunctions, OpSample, PluginInfo, Rule, hookimpl

__all__ = ["stand_in"]

#: Operator to the function in ``operators.py`` that computes it by ATen operators.
OPERATORS = {"_flash_attn_forward": "dense", "_flash_attn_varlen_forward": "packed"}

#: The function of flash_attn's extension that writes to a cache, exchanged for ATen operators; also asked for its version.
FUNCTIONS = LibraryFunctions(
    {"flash_attn_2_cuda:fwd_kvcache": "onnxplug_flash_attn.cache:with_cache"}, "flash_attn>=2.8,<2.9"
)


#: Attention to a cache, where ONNX Runtime has an operator for it: an operator of this package, in exported programs alone.
_WRITTEN = "onnxplug_flash_attn::written.default"


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The rule of ONNX Runtime's own form of attention to a cache."""
    reason = "ONNX Runtime attends to the used part of a cache alone"
    return [Rule(_WRITTEN, "onnxplug_flash_attn.grouped:convert", target="onnxruntime", reason=reason)]


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operators by PyTorch's attention, whose rules choose the form for the opset and the target."""
    of_library = {f"flash_attn::{name}.default": _later("operators", function) for name, function in OPERATORS.items()}
    return {**of_library, _WRITTEN: _later("grouped", "decomposed")}


def _later(module: str, name: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from importlib import import_module

        FUNCTIONS.check()
        return getattr(import_module(f"{__name__}.{module}"), name)(*args, **kwargs)

    decomposed.__qualname__, decomposed.__module__ = name, f"{__name__}.{module}"
    return decomposed


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """The domain of ONNX Runtime's own operators."""
    return [Domain("com.microsoft", 1)]


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """The exchange of flash_attn's extension function while torch.export captures a model."""
    return [FUNCTIONS]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_flash_attn.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespaces."""
    return PluginInfo(api=1, namespaces=("flash_attn", "onnxplug_flash_attn"))


def stand_in() -> None:
    """Makes ``import flash_attn`` work on a machine without a GPU, for exports.

    Operators that torch doesn't know are defined with flash_attn's schemas, and operators without a kernel for the CPU
    get a kernel of PyTorch's operators; where flash_attn isn't installed, a module of its functions for inference is
    put under its name.
    """
    from onnxplug_flash_attn.functions import define, put_module

    define()
    put_module()
