"""natten's neighbourhood attention in ONNX: the plugin. Importing it imports neither torch nor natten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import PluginInfo, hookimpl


@hookimpl
def onnxplug_patches() -> list[Callable[[], Any]]:
    """What torch.export needs of natten."""
    return [_patches]


def _patches() -> Any:
    """Nothing to patch, and nothing to import, where natten isn't in use."""
    import sys
    from contextlib import nullcontext

    if "natten.functional" not in sys.modules:
        return nullcontext()
    from onnxplug_natten.library import exchanged

    return exchanged()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, libraries=("natten",))
