"""torchaudio's compiled functions in ONNX: the plugin. Importing it imports neither torch nor torchaudio."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import PluginInfo, hookimpl


@hookimpl
def onnxplug_patches() -> list[Callable[[], Any]]:
    """What torch.export needs of torchaudio."""
    return [_patches]


def _patches() -> Any:
    """Nothing to patch, and nothing to import, where torchaudio isn't in use."""
    import sys
    from contextlib import nullcontext

    if "torchaudio.functional" not in sys.modules:
        return nullcontext()
    from onnxplug_torchaudio.library import exchanged

    return exchanged()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, libraries=("torchaudio",))
