"""xformers' attention and norms in ONNX: the plugin, and ``stand_in``. Importing it imports neither torch nor xformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import LibraryFunctions, OpSample, PluginInfo, hookimpl

__all__ = ["stand_in"]

_FMHA, _ATTENTION = "xformers.ops.fmha", "onnxplug_xformers.attention"
#: The functions of xformers that launch kernels on a GPU, exchanged for ATen operators.
FUNCTIONS = LibraryFunctions(
    {
        f"{_FMHA}:_memory_efficient_attention": f"{_ATTENTION}:forward",
        f"{_FMHA}:_memory_efficient_attention_forward": f"{_ATTENTION}:forward",
        f"{_FMHA}:_memory_efficient_attention_forward_requires_grad": f"{_ATTENTION}:forward_with_logarithms",
        "xformers.ops.rmsnorm:rms_norm": f"{_ATTENTION}:rms_norm",
        "xformers.ops.rmsnorm:rms_norm_add": f"{_ATTENTION}:rms_norm_add",
    },
    "xformers>=0.0.34,<0.0.36",
)


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operator of xformers' attention on a GPU, in a program that was captured there."""

    def flash(*args: Any, **kwargs: Any) -> Any:
        from onnxplug_xformers import attention

        return attention.flash(*args, **kwargs)

    flash.__module__ = f"{__name__}.attention"
    return {"xformers_flash::flash_fwd.default": flash}


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """The exchange of xformers' functions while torch.export captures a model."""
    return [FUNCTIONS]


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operator with."""
    from onnxplug_xformers.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operator's namespace, and the library."""
    return PluginInfo(api=1, namespaces=("xformers_flash",), libraries=("xformers",))


def stand_in() -> None:
    """Makes xformers' attention and norms run on a machine without a GPU, for exports, by PyTorch's operators from then on."""
    import xformers.ops.fmha
    import xformers.ops.rmsnorm  # noqa: F401

    from onnxplug_xformers.library import define

    define()
    FUNCTIONS.put()
