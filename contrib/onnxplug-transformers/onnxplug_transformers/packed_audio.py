"""Sounds packed in one row (Qwen3-ASR's encoder), of any number and lengths, while a model is captured.

transformers loops over the sounds to find the windows in which attention is computed, one after another. Here the
windows are computed from the sounds' lengths, and attention has a mask. Windows that don't cover the whole row, which
transformers refuses, end in an index out of range.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import exchanged, parameters
from onnxplug_transformers.packed_images import PACKED, is_not_packed, is_packed_or

_FLASH = "is_flash_attention_requested"
_WINDOWS = "get_audio_cu_seqlens"
_FORWARD = ["self", "input_features", "input_features_mask"]


@contextlib.contextmanager
def audio_of_any_length() -> Iterator[None]:
    """Holds while a model is captured."""
    with contextlib.ExitStack() as stack:
        for path, module in list(sys.modules.items()):
            if not path.startswith("transformers.models.") or not hasattr(module, _WINDOWS):
                continue
            if before := getattr(module, _FLASH, None):
                stack.enter_context(patched(module, _FLASH, is_packed_or(before)))
            for owner in list(vars(module).values()):
                own = vars(owner).get("forward") if isinstance(owner, type) and issubclass(owner, nn.Module) else None
                if own is not None and parameters(own) == _FORWARD and owner.__module__ == path:
                    stack.enter_context(patched(owner, "forward", _packed(own)))
        stack.enter_context(exchanged({_WINDOWS: (windows, _are_given)}))
        yield


def _packed(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation not in ("eager", "sdpa"):
            return forward(self, *args, **kwargs)
        token = PACKED.set((None, {}))
        try:
            return forward(self, *args, **kwargs)
        finally:
            PACKED.reset(token)

    return called


def _are_given(*args: Any, kwargs: Mapping[str, Any] | None = None, **_: Any) -> bool:
    return is_not_packed() or (kwargs or {}).get("cu_seqlens") is not None


def _after_convolutions(lengths: Tensor, chunk: int) -> Tensor:
    """The numbers of states of sounds by their lengths: 13 for each whole chunk, and an eighth of the rest's frames."""
    rest = lengths % chunk
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return rest + lengths // chunk * 13


def windows(
    chunk_lengths: Tensor, feature_lens: Tensor, n_window_infer: int, n_window: int, kwargs: Any = None
) -> Tensor:
    """The bounds of the windows of all sounds, [windows + 1].

    A window is as long as ``n_window_infer // (2 * n_window)`` times the longest chunk, or as the rest of a sound.

    Args:
        chunk_lengths: The frames of each chunk of all sounds, [chunks].
        feature_lens: The frames of each sound, [sounds].
        n_window_infer: The frames of a window.
        n_window: Half of the frames of a chunk.
    """
    chunk = n_window * 2
    states = _after_convolutions(feature_lens, chunk)
    window = _after_convolutions(chunk_lengths, chunk).max() * (n_window_infer // chunk)
    counts = -(-states // window)
    ends = counts.cumsum(0)
    number = torch.arange(ends[-1].item(), device=states.device)
    sound = (number[:, None] >= ends).sum(-1)
    place = number - (ends - counts)[sound]
    starts = states.cumsum(0) - states
    bounds = starts[sound] + torch.minimum((place + 1) * window, states[sound])
    return torch.cat([bounds.new_zeros(1), bounds]).to(torch.int32)
