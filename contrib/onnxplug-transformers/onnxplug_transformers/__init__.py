"""transformers' key/value caches as inputs and outputs of exported models: the plugin, and ``cache_shapes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import PluginInfo, hookimpl

__all__ = ["cache_shapes"]


@hookimpl
def onnxplug_patches() -> list[Callable[[], Any]]:
    """The caches become pytree nodes: torch.export takes them apart into tensors, and puts them together.

    Mixtures of experts are computed by products of groups, not by a loop over the experts that happen to be chosen.
    """
    return [_caches, _experts]


def _caches() -> Any:
    """Nothing to do, and nothing to import, where transformers isn't in use."""
    import sys
    from contextlib import nullcontext

    if "transformers.cache_utils" in sys.modules:
        from onnxplug_transformers.caches import register

        register()
    return nullcontext()


def _experts() -> Any:
    import sys
    from contextlib import nullcontext

    if "transformers.integrations.moe" not in sys.modules:
        return nullcontext()
    from onnxplug_transformers.experts import exportable_experts

    return exportable_experts()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, requires=["transformers>=5"])


def cache_shapes(cache: Any, batch: str = "batch", past: str = "past", source: str = "source") -> Any:
    """The part of ``dynamic_shapes`` that belongs to a cache.

    Args:
        cache: A ``DynamicCache``, ``StaticCache`` or ``EncoderDecoderCache``.
        batch: Name of the batch dimension.
        past: Name of the number of tokens in a dynamic cache.
        source: Name of the encoder's length, in the cross-attention half of an encoder-decoder cache.

    Returns:
        An entry for each tensor of the cache, in the order in which it is taken apart.

    Raises:
        TypeError: It is another object, or a cache with layers of another kind.
    """
    from onnxplug_transformers.caches import shapes

    return shapes(cache, batch, past, source)
