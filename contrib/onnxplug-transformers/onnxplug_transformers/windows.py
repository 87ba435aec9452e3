"""Caches and masks while a model is captured: sliding windows without branches on how many tokens were seen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import cache_utils, masking_utils

from onnxplug.capture.patching import patched
from onnxplug_transformers.caches import register


def _update(layer: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    """As transformers' own; the last tokens are taken by sizes, not by a negative index that a short cache doesn't have."""
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    seen = keys.shape[-2]
    if layer.keys.dim() == keys.dim():
        keys = torch.cat([layer.keys, keys], dim=-2)
        values = torch.cat([layer.values, values], dim=-2)
    layer.cumulative_length = layer.cumulative_length + seen
    kept = torch.sym_min(keys.shape[-2], layer.sliding_window - 1)
    left = keys.shape[-2] - kept
    layer.keys, layer.values = (x.split([left, kept], dim=-2)[1] for x in (keys, values))
    return keys, values


def _mask_sizes(layer: Any, query_length: int) -> tuple[Any, Any]:
    """Length and offset: the tokens kept are the last tokens seen, whether the window is full or not."""
    kept = layer.keys.shape[-2] if layer.is_initialized else 0
    return kept + query_length, layer.cumulative_length - kept


def _update_static(layer: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    """As transformers' own, for a window of a fixed size, filled in part or full; it is not written in place.

    The result has the tokens that the new tokens may see, and the new tokens; transformers also returns the places
    behind them, which its mask hides.
    """
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    size, seen, new = layer.max_cache_len, layer.cumulative_length_int, keys.shape[-2]
    filled, kept = torch.sym_min(seen, size), torch.sym_min(seen, size - 1)
    after = torch.sym_min(seen + new, size)
    returned, states = [], []
    for before, fresh in ((layer.keys, keys), (layer.values, values)):
        whole = torch.cat([before.split([filled, size - filled], dim=-2)[0], fresh], dim=-2)
        returned.append(whole.split([filled - kept, kept + new], dim=-2)[1])
        last = whole.split([filled + new - after, after], dim=-2)[1]
        states.append(torch.cat([last, before.split([after, size - after], dim=-2)[1]], dim=-2))
    layer.keys, layer.values = states
    layer.cumulative_length_int = seen + new
    return tuple(returned)


def _static_mask_sizes(layer: Any, query_length: int) -> tuple[Any, Any]:
    kept = torch.sym_min(layer.cumulative_length_int, layer.max_cache_len - 1)
    return kept + query_length, layer.cumulative_length_int - kept


def _update_conv(layer: Any, states: torch.Tensor, state_idx: int = 0, **options: Any) -> torch.Tensor:
    """As transformers' own; the new state replaces the old state, which transformers may write over."""
    before = layer.conv_states[state_idx] if layer.has_previous_state[state_idx] else None
    size = layer.conv_kernel_size[state_idx] if layer.is_conv_states_initialized[state_idx] else None
    size = size or options.get("conv_kernel_size") or states.shape[-1]
    full = states if before is None else torch.cat([before, states], dim=-1)
    if before is None:  # without a branch on the number of tokens
        full = torch.nn.functional.pad(full, (torch.sym_max(size - full.shape[-1], 0), 0))
    layer.device, layer.dtype = states.device, states.dtype
    layer.conv_kernel_size[state_idx] = size
    layer.conv_states[state_idx] = full.split([full.shape[-1] - size, size], dim=-1)[1]
    layer.is_conv_states_initialized[state_idx] = layer.has_previous_state[state_idx] = True
    return full


def _update_recurrent(layer: Any, states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
    layer.recurrent_states[state_idx] = states
    layer.is_recurrent_states_initialized[state_idx] = True
    return states


def _is_causal_alone(*_: Any, **__: Any) -> bool:
    """False while a model is captured, as from transformers' own function, which branches on sizes first."""
    return False


def _hides_nothing(padding_mask: Any, kv_length: Any, local_attention_size: Any = None) -> bool:
    """Whether attention to an encoder needs no mask: a mask of its length would not fit a cache that is continued."""
    return padding_mask is None and local_attention_size is None


@contextlib.contextmanager
def capturable_caches() -> Iterator[None]:
    """Holds while a model is captured.

    Caches are pytree nodes. A window's length and contents are computed from sizes; states of linear attention are
    results, not inputs that are written over.
    """
    register()
    linear = cache_utils.LinearAttentionLayer
    with contextlib.ExitStack() as stack:
        for owner, name, function in (
            (cache_utils.DynamicSlidingWindowLayer, "update", _update),
            (cache_utils.DynamicSlidingWindowLayer, "get_mask_sizes", _mask_sizes),
            (cache_utils.StaticSlidingWindowLayer, "update", _update_static),
            (cache_utils.StaticSlidingWindowLayer, "get_mask_sizes", _static_mask_sizes),
            (linear, "update_conv_state", _update_conv),
            (linear, "update_recurrent_state", _update_recurrent),
            (masking_utils, "_ignore_causal_mask_sdpa", _is_causal_alone),
            (masking_utils, "_ignore_bidirectional_mask_sdpa", _hides_nothing),
        ):
            stack.enter_context(patched(owner, name, function))
        yield


@contextlib.contextmanager
def windows_by_position(attention_mask: torch.Tensor) -> Iterator[None]:
    """Holds while a model is called: its windows count tokens that the mask shows, not places in the cache.

    The two differ where prompts of unequal length are padded on the right, and the text goes on behind the padding.

    Args:
        attention_mask: [batch, past + sequence], 1 for a token and 0 for padding.
    """
    positions = attention_mask.cumsum(-1)

    def overlay(sliding_window: int) -> Any:
        def inner(batch_idx: Any, head_idx: Any, q_idx: Any, kv_idx: Any) -> Any:
            return positions[batch_idx, kv_idx] > positions[batch_idx, q_idx] - sliding_window

        return inner

    with patched(masking_utils, "sliding_window_overlay", overlay):
        yield
