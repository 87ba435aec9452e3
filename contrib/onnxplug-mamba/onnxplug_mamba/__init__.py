"""mamba_ssm and causal_conv1d in ONNX: the plugin, and ``stand_in``. Importing it imports neither torch nor the libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import LibraryFunctions, LibraryPatch, OpSample, PluginInfo, hookimpl

__all__ = ["stand_in"]

#: causal_conv1d's operators, with the functions in ``convolution.py`` that compute the values that they write.
OPERATORS = {"_causal_conv1d_fwd_cpp": "forward", "_causal_conv1d_update_cpp": "update"}

_TRITON, _HERE = "mamba_ssm.ops.triton", "onnxplug_mamba"
#: Functions of mamba_ssm that launch kernels, exchanged for ATen operators.
FUNCTIONS = LibraryFunctions(
    {
        "selective_scan_cuda:fwd": f"{_HERE}.scans:selective",
        f"{_TRITON}.ssd_combined:_mamba_chunk_scan_combined_fwd": f"{_HERE}.scans:chunked",
        f"{_TRITON}.selective_state_update:selective_state_update": f"{_HERE}.scans:state_update",
        f"{_TRITON}.layernorm_gated:_layer_norm_fwd": f"{_HERE}.norms:gated",
        f"{_TRITON}.layer_norm:_layer_norm_fwd": f"{_HERE}.norms:layer",
        f"{_TRITON}.k_activations:_swiglu_fwd": f"{_HERE}.norms:swiglu",
    },
    "mamba_ssm>=2.2.6,<2.4",
)
#: causal_conv1d has operators, and no functions to exchange.
OF_CONVOLUTIONS = LibraryFunctions({}, "causal_conv1d>=1.6,<1.8")


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operators by PyTorch's convolutions."""
    return {f"DaoAILab::{name}.default": _later(function) for name, function in OPERATORS.items()}


def _later(name: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from onnxplug_mamba import convolution

        OF_CONVOLUTIONS.check()
        return getattr(convolution, name)(*args, **kwargs)

    decomposed.__qualname__, decomposed.__module__ = name, f"{__name__}.convolution"
    return decomposed


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions | LibraryPatch]:
    """The exchanges of the libraries' functions while torch.export captures a model."""
    steps = "onnxplug_mamba.library:steps_of_static_sizes"
    return [FUNCTIONS, OF_CONVOLUTIONS, LibraryPatch(("mamba_ssm", "selective_scan_cuda"), steps)]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_mamba.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespace, and the libraries."""
    return PluginInfo(api=1, namespaces=("DaoAILab",), libraries=("causal_conv1d", "mamba_ssm"))


def stand_in() -> None:
    """Makes ``import mamba_ssm`` and ``import causal_conv1d`` work on a machine without a GPU, for exports.

    Both are installed without being compiled. From then on PyTorch's operators compute the kernels that they launch on
    a GPU.
    """
    from onnxplug_mamba.library import define, put_modules

    put_modules()
    define()
