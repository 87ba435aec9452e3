"""natten's neighbourhood attention in ONNX: the plugin. Importing it imports neither torch nor natten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import LibraryFunctions, PluginInfo, hookimpl

_NAMES = ("neighborhood_attention_generic", "attention", "merge_attentions")
#: natten's functions, exchanged for ATen operators that compute them.
FUNCTIONS = LibraryFunctions(
    {f"natten.functional:{name}": f"onnxplug_natten.attention:{name}" for name in _NAMES}, "natten>=0.21.5,<0.22"
)


#: Operators, with the functions in ``operators.py`` that compute them.
OPERATORS = {
    **dict.fromkeys(("na1d_forward", "na2d_forward", "na3d_forward"), "neighborhood"),
    **dict.fromkeys(("fmha_forward", "hopper_fmha_forward", "blackwell_fmha_forward"), "dense"),
}


@hookimpl
def onnxplug_decompositions() -> dict[str, Callable[..., Any] | None]:
    """The operators of programs that were captured without this package, by PyTorch's operators."""
    return {f"natten::{op}.default": _later(function) for op, function in OPERATORS.items()}


def _later(name: str) -> Callable[..., Any]:
    """The function that computes an operator, imported when it is called."""

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        from onnxplug_natten import operators

        FUNCTIONS.check()
        return getattr(operators, name)(*args, **kwargs)

    decomposed.__qualname__, decomposed.__module__ = name, f"{__name__}.operators"
    return decomposed


@hookimpl
def onnxplug_patches() -> list[LibraryFunctions]:
    """The exchange of natten's functions while torch.export captures a model."""
    return [FUNCTIONS]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespace, and the library."""
    return PluginInfo(api=1, namespaces=("natten",), libraries=("natten",))
