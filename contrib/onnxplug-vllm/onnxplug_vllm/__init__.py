"""Operators of vLLM and sgl_kernel in ONNX: the plugin, and ``stand_in``. Importing it imports neither torch nor the libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import LibraryFunctions, OpSample, PluginInfo, hookimpl

__all__ = ["stand_in"]

#: Operators, with the functions in ``operators.py`` that compute the tensors that the operators write.
OPERATORS = {
    "_C::rms_norm": "rms_norm",
    "_C::fused_add_rms_norm": "fused_add_rms_norm",
    "_C::rotary_embedding": "rotary_embedding",
    "_C::silu_and_mul": "silu_and_mul",
    "_C::mul_and_silu": "mul_and_silu",
    "_C::gelu_and_mul": "gelu_and_mul",
    "_C::gelu_tanh_and_mul": "gelu_tanh_and_mul",
    "_C::fatrelu_and_mul": "fatrelu_and_mul",
    "_C::swigluoai_and_mul": "swigluoai_and_mul",
    "_C::gelu_new": "gelu_tanh",
    "_C::gelu_fast": "gelu_tanh",
    "_C::gelu_quick": "gelu_quick",
    "_C::relu_squared": "relu_squared",
    "sgl_kernel::rmsnorm": "rms_norm",
    "sgl_kernel::fused_add_rmsnorm": "fused_add_rms_norm",
    "sgl_kernel::gemma_rmsnorm": "gemma_rms_norm",
    "sgl_kernel::gemma_fused_add_rmsnorm": "gemma_fused_add_rms_norm",
    "sgl_kernel::silu_and_mul": "silu_and_mul",
    "sgl_kernel::gelu_and_mul": "gelu_and_mul",
    "sgl_kernel::gelu_tanh_and_mul": "gelu_tanh_and_mul",
    "sgl_kernel::apply_rope_pos_ids_cos_sin_cache": "rotary_embedding_of_pairs",
}
#: The versions of the libraries, by namespace; no function of them is exchanged.
LIBRARIES = {
    "_C": LibraryFunctions({}, "vllm>=0.33,<0.34"),
    "sgl_kernel": LibraryFunctions({}, "sgl_kernel>=0.3,<0.5"),
}


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operators, computed by PyTorch's operators."""
    return {f"{op}.default": _later(op, function) for op, function in OPERATORS.items()}


def _later(op: str, name: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from onnxplug_vllm import operators

        LIBRARIES[op.partition("::")[0]].check()
        return getattr(operators, name)(*args, **kwargs)

    decomposed.__qualname__, decomposed.__module__ = name, f"{__name__}.operators"
    return decomposed


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """The versions of the libraries that are translated."""
    return list(LIBRARIES.values())


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_vllm.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespaces, and the library."""
    return PluginInfo(api=1, namespaces=("_C", "sgl_kernel"), libraries=("vllm",))


def stand_in() -> None:
    """Makes the operators run on a machine without a GPU, for exports; defines those that torch doesn't know."""
    from onnxplug_vllm.library import define

    define()
