"""Swin's shifted windows while a model is captured with a dynamic height or width.

transformers pads images and maps only where their size is no multiple of a patch, of two or of a window, and leaves shifts and
masks away where a map is one window: each is a branch on a size, and the exported model would be right on one side of it alone.
Here the padding is always there, as long as it has to be, and the shift is a number computed from the sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.patches.scans import laid_out
from onnxplug_transformers.exchanged import exchanged


def _padded(x: Tensor, axis: int, size: Any, multiple: int) -> Tensor:
    """Zeros behind an axis of ``size`` elements, up to a multiple.

    The result's size is written as a multiple, so that torch knows its quotient when it is divided again.
    """
    return functional.pad(x, [0, 0] * (x.dim() - 1 - axis) + [0, (size + multiple - 1) // multiple * multiple - size])


def pad_patches(self: Any, pixel_values: Tensor, height: Any, width: Any) -> Tensor:
    """Whole patches of an image [batch, channels, height, width]."""
    return _padded(_padded(pixel_values, 2, height, self.patch_size[0]), 3, width, self.patch_size[1])


def pad_pairs(self: Any, input_feature: Tensor, height: Any, width: Any) -> Tensor:
    """Even sizes of a map [batch, height, width, channels]."""
    return _padded(_padded(input_feature, 1, height, 2), 2, width, 2)


def pad_windows(self: Any, hidden_states: Tensor, height: Any, width: Any) -> tuple[Tensor, tuple[int, ...]]:
    """Whole windows of a map [batch, height, width, channels]; the second result makes the caller cut the padding off."""
    padded = _padded(_padded(hidden_states, 1, height, self.window_size), 2, width, self.window_size)
    return padded, (0, 0, 0, 1, 0, 1)


def window_partition(input_feature: Tensor, window_size: int) -> Tensor:
    """As transformers' own; every size is given, so that torch need not divide products of sizes."""
    batch, height, width, channels = input_feature.shape
    rows, columns = height // window_size, width // window_size
    windows = input_feature.view(batch, rows, window_size, columns, window_size, channels)
    return laid_out(windows.transpose(2, 3)).view(batch * rows * columns, window_size, window_size, channels)


def window_reverse(windows: Tensor, window_size: int, height: Any, width: Any) -> Tensor:
    """As transformers' own; every size is given, so that torch need not divide products of sizes."""
    rows, columns, channels = height // window_size, width // window_size, windows.shape[-1]
    batch = windows.shape[0] // (rows * columns)
    windows = windows.view(batch, rows, columns, window_size, window_size, channels)
    return laid_out(windows.transpose(2, 3)).view(batch, height, width, channels)


def shift_of(self: Any, input_resolution: tuple[Any, Any]) -> None:
    """No shift where a map is one window high or wide, by a number: transformers' own branches, and keeps the result.

    A smaller map does not fit the position biases, in transformers neither.
    """
    if not isinstance(self.shift_size, torch.SymInt):
        beyond = torch.sym_min(*input_resolution) - self.window_size
        self.shift_size = self.shift_size and self.shift_size * torch.sym_min(beyond, 1)


def mask_of_regions(self: Any, height: Any, width: Any, dtype: torch.dtype, device: Any = None) -> Tensor | None:
    """As transformers' own, also for a shift that is a number computed from sizes: all zeros without a shift."""
    if isinstance(self.shift_size, int) and self.shift_size <= 0:
        return None
    rows, columns = (torch.arange(size, device=device) for size in (height, width))
    regions = [
        (places >= size - self.window_size).long() + (places >= size - self.shift_size).long()
        for places, size in ((rows, height), (columns, width))
    ]
    regions_of = (regions[0][:, None] * 3 + regions[1])[None, :, :, None]
    windows = window_partition(regions_of, self.window_size).flatten(1)
    return (windows.unsqueeze(1) != windows.unsqueeze(2)).to(dtype) * -100.0


def mask_of_resolution(
    self: Any, input_resolution: tuple[Any, Any], device: Any = None, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """MaskFormer's form of :func:`mask_of_regions`."""
    return mask_of_regions(self, *input_resolution, dtype=dtype, device=device)


def cyclic_shift(self: Any, hidden_states: Tensor, reverse: bool = False) -> Tensor:
    """As transformers' own, also for a shift that is a number computed from sizes."""
    if isinstance(self.shift_size, int) and self.shift_size <= 0:
        return hidden_states
    shift = self.shift_size if reverse else -self.shift_size
    return torch.roll(hidden_states, shifts=(shift, shift), dims=(1, 2))


def donut_layer(
    self: Any,
    hidden_states: Tensor,
    input_dimensions: tuple[Any, Any],
    output_attentions: bool | None = False,
    always_partition: bool | None = False,
) -> tuple[Tensor, ...]:
    """As Donut's own layer, which branches on the sign of the shift."""
    if not always_partition:
        self.set_shift_and_window_size(input_dimensions)
    (height, width), (batch, length, channels) = input_dimensions, hidden_states.shape
    maps, _ = self.maybe_pad(self.layernorm_before(hidden_states).view(batch, height, width, channels), height, width)
    size, (_, rows, columns, _) = self.window_size, maps.shape
    windows = window_partition(cyclic_shift(self, maps), size).flatten(1, 2)
    mask = self.get_attn_mask(rows, columns, dtype=maps.dtype, device=maps.device)
    attended, *weights = self.attention(windows, mask, output_attentions=output_attentions)
    maps = cyclic_shift(self, window_reverse(attended.unflatten(1, (size, size)), size, rows, columns), reverse=True)
    hidden_states = hidden_states + self.drop_path(maps[:, :height, :width].reshape(batch, length, channels))
    return hidden_states + self.output(self.intermediate(self.layernorm_after(hidden_states))), *weights


def _is_known(*arguments: Any, **_: Any) -> bool:
    """Whether height and width are plain numbers: transformers' own functions are then right, and pad less."""
    sizes = [size for one in arguments for size in (one if isinstance(one, tuple) else (one,))]
    sizes += [size for one in arguments if isinstance(one, Tensor) for size in one.shape[1:3]]
    return not any(isinstance(size, torch.SymInt) for size in sizes)


def _has_known_shift(self: Any, *_: Any, **__: Any) -> bool:
    return not isinstance(self.shift_size, torch.SymInt)


_Exchanged = dict[str, tuple[Callable[..., Any], Callable[..., bool]]]
_EXCHANGED: _Exchanged = {
    "window_partition": (window_partition, _is_known),
    "window_reverse": (window_reverse, _is_known),
    "SwinLayer.cyclic_shift": (cyclic_shift, _has_known_shift),
    "DonutSwinLayer.forward": (donut_layer, _is_known),
    "MaskFormerSwinLayer.get_attn_mask": (mask_of_resolution, _is_known),
    "FocalNetPatchEmbeddings.maybe_pad": (pad_patches, _is_known),
}
for _name in ("Swin", "Swinv2", "DonutSwin", "MaskFormerSwin", "Swin2SR"):
    _layers: _Exchanged = {
        f"{_name}PatchEmbeddings.maybe_pad": (pad_patches, _is_known),
        f"{_name}PatchMerging.maybe_pad": (pad_pairs, _is_known),
        f"{_name}Layer.maybe_pad": (pad_windows, _is_known),
        f"{_name}Layer.set_shift_and_window_size": (shift_of, _is_known),
        f"{_name}Layer.get_attn_mask": (mask_of_regions, _is_known),
    }
    _EXCHANGED = _layers | _EXCHANGED


@contextlib.contextmanager
def windows_of_any_size() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged(_EXCHANGED):
        yield
