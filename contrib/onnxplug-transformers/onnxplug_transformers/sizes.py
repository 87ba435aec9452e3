"""transformers' own conversions of sizes to plain numbers while a model is captured: a dynamic size stays one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug_transformers.exchanged import exchanged


def torch_int(x: Any) -> Any:
    """The size itself; a quotient or product of sizes is cut as int() does it. transformers' own makes a constant of it."""
    return x if isinstance(x, torch.SymInt) else torch.sym_int(x)


def torch_float(x: Any) -> Any:
    """The size as a float, which transformers' own makes a constant of."""
    return torch.sym_float(x)


def _is_plain(x: Any) -> bool:
    return not isinstance(x, torch.SymInt | torch.SymFloat)


def unfolding(self: Any, features: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """MobileViT's patches: rows of the pixels at each place within them.

    A map whose sides are no multiples of the patches' is resized to such sides, and any other to its own, which changes nothing.
    """
    batch, channels, height, width = features.shape
    down, across = self.patch_height, self.patch_width
    rows, columns = (height + down - 1) // down, (width + across - 1) // across
    features = functional.interpolate(
        features, size=(rows * down, columns * across), mode="bilinear", align_corners=False
    )
    patches = features.reshape(batch, channels, rows, down, columns, across).permute(0, 3, 5, 2, 4, 1)
    return patches.reshape(batch * down * across, rows * columns, channels), {
        "orig_size": (height, width),
        "batch_size": batch,
        "channels": channels,
        "interpolate": True,
        "num_patches": rows * columns,
        "num_patches_width": columns,
        "num_patches_height": rows,
    }


def _is_of_known_size(self: Any, features: Tensor) -> bool:
    return all(isinstance(size, int) for size in features.shape[-2:])


def _padded(self: Any, sound: Tensor) -> Tensor:
    """Sound padded for a convolution, to a multiple of its stride, with the numbers of the convolution.

    transformers has them in buffers, whose values are known only when the model runs, and computes what the length lacks in
    float32.
    """
    (stride,), (kernel,), (dilation,) = self.conv.stride, self.conv.kernel_size, self.conv.dilation
    total, length = (kernel - 1) * dilation + 1 - stride, sound.shape[-1]
    lacking = (length + stride - 1) // stride * stride - length
    right = 0 if self.causal else total // 2
    padded: Tensor = self._pad1d(sound, (total - right, right + lacking), mode=self.pad_mode)
    return padded


def encodec_convolution(self: Any, hidden_states: Tensor) -> Any:
    """EnCodec's, of sound of any length."""
    hidden_states = self.conv(_padded(self, hidden_states))
    return self.norm(hidden_states) if self.norm_type == "time_group_norm" else hidden_states


def mimi_convolution(self: Any, hidden_states: Tensor, padding_cache: Any = None) -> Any:
    """Mimi's, of sound of any length."""
    return self.conv(_padded(self, hidden_states))


def _has_cache(self: Any, hidden_states: Tensor, padding_cache: Any = None) -> bool:
    return padding_cache is not None


@contextlib.contextmanager
def dynamic_sizes() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged(
        {
            "torch_int": (torch_int, _is_plain),
            "torch_float": (torch_float, _is_plain),
            "MobileViTLayer.unfolding": (unfolding, _is_of_known_size),
            "EncodecConv1d.forward": (encodec_convolution, _has_cache),
            "MimiConv1d.forward": (mimi_convolution, _has_cache),
            "PocketTTSAudioTokenizerConv1d.forward": (mimi_convolution, _has_cache),
        }
    ):
        yield
