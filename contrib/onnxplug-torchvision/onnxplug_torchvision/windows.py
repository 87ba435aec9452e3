"""Swin's shifted windows while a model is captured with a dynamic height or width.

torchvision leaves out the shift, and the mask that goes with it, where a map is one window high or wide: branches on sizes, and the
exported model would be right in one branch alone. Here the shift is a number computed from the sizes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.capture.patching import patched


@contextlib.contextmanager
def windows_of_any_size() -> Iterator[None]:
    """A context for a capture in which shifted windows take maps of any size."""
    module, name = import_module("torchvision.models.swin_transformer"), "shifted_window_attention"
    before = getattr(module, name)

    @functools.wraps(before)
    def attention(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_known = not any(isinstance(size, torch.SymInt) for size in x.shape[1:3])
        chosen: Callable[..., Any] = before if is_known else shifted_window_attention
        return chosen(x, *args, **kwargs)

    with patched(module, name, attention):
        yield


def shifted_window_attention(
    x: Tensor,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    relative_position_bias: Tensor,
    window_size: list[int],
    num_heads: int,
    shift_size: list[int],
    attention_dropout: float = 0.0,
    dropout: float = 0.0,
    qkv_bias: Tensor | None = None,
    proj_bias: Tensor | None = None,
    logit_scale: Tensor | None = None,
    training: bool = True,
) -> Tensor:
    """torchvision's ``shifted_window_attention`` for maps [batch, height, width, channels] of any size.

    Args:
        x: The maps.
        qkv_weight: [3 * channels, channels].
        proj_weight: [channels, channels].
        relative_position_bias: [1, heads, places of a window, places of a window].
        window_size: Height and width of a window.
        num_heads: The number of heads.
        shift_size: The shift of the windows, rows and columns, where there are several windows.
        attention_dropout: Probability of dropping a weight.
        dropout: Probability of dropping an element of the result.
        qkv_bias: [3 * channels].
        proj_bias: [channels].
        logit_scale: The logarithms of the scales of Swin V2's cosine attention, [heads, 1, 1].
        training: Whether there is dropout.
    """
    batch, height, width, channels = x.shape
    high, wide = window_size
    rows, columns = (height + high - 1) // high, (width + wide - 1) // wide
    maps = functional.pad(x, (0, 0, 0, columns * wide - width, 0, rows * high - height))
    shifts = [shift and shift * torch.sym_min(n - 1, 1) for shift, n in zip(shift_size, (rows, columns), strict=True)]
    is_shifted = any(shift_size)
    if is_shifted:
        maps = torch.roll(maps, (-shifts[0], -shifts[1]), (1, 2))
    windows = _windows(maps, rows, columns, high, wide)
    if logit_scale is not None and qkv_bias is not None:
        keys = torch.arange(3 * channels, device=x.device) // channels == 1
        qkv_bias = qkv_bias.masked_fill(keys, 0)
    qkv = functional.linear(windows, qkv_weight, qkv_bias).unflatten(2, (3, num_heads, channels // num_heads))
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    if logit_scale is not None:
        scores = functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).mT
        scores = scores * logit_scale.clamp(max=math.log(100.0)).exp()
    else:
        scores = (query * (channels // num_heads) ** -0.5) @ key.mT
    scores = scores + relative_position_bias
    if is_shifted:
        mask = _mask(rows, columns, high, wide, shifts, scores)
        scores = (scores.unflatten(0, (batch, rows * columns)) + mask[None, :, None]).flatten(0, 1)
    weights = functional.dropout(functional.softmax(scores, -1), attention_dropout, training)
    windows = functional.linear((weights @ value).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    windows = functional.dropout(windows, dropout, training)
    maps = windows.view(batch, rows, columns, high, wide, channels).transpose(2, 3).contiguous()
    maps = maps.view(batch, rows * high, columns * wide, channels)
    if is_shifted:
        maps = torch.roll(maps, (shifts[0], shifts[1]), (1, 2))
    return maps[:, :height, :width].contiguous()


def _windows(maps: Tensor, rows: Any, columns: Any, high: int, wide: int) -> Tensor:
    """The windows of maps [batch, height, width, channels], [batch * windows, places, channels]."""
    batch, channels = maps.shape[0], maps.shape[3]
    windows = maps.view(batch, rows, high, columns, wide, channels).transpose(2, 3).contiguous()
    return windows.view(batch * rows * columns, high * wide, channels)


def _mask(rows: Any, columns: Any, high: int, wide: int, shifts: list[Any], like: Tensor) -> Tensor:
    """-100 where places of a window come from opposite sides of the map, [windows, places, places]; zeros without a shift."""
    regions = []
    for number, size, shift in ((rows, high, shifts[0]), (columns, wide, shifts[1])):
        places = torch.arange(number * size, device=like.device)
        regions.append((places >= (number - 1) * size).long() + (places >= number * size - shift).long())
    maps = regions[0][:, None] * 3 + regions[1]
    of_windows = _windows(maps[None, :, :, None], rows, columns, high, wide).flatten(1)
    return (of_windows.unsqueeze(1) != of_windows.unsqueeze(2)).to(like.dtype) * -100.0
