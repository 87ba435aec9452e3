"""Hiera's windows that masking keeps, the same number for each image, while a model is captured.

transformers takes the kept windows' tokens by a mask, so that torch doesn't know their number. It follows from the
configuration, whatever the noise is: here the windows' places are sorted, and this number of them is taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from onnxplug_transformers.exchanged import exchanged


@contextlib.contextmanager
def windows_that_are_kept() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged({"HieraModel.forward": (forward, _masks_nothing)}):
        yield


def _masks_nothing(self: Any, *_: Any, **__: Any) -> bool:
    return not self.embeddings.patch_embeddings.is_mae


def forward(
    self: Any,
    pixel_values: Tensor | None = None,
    noise: Tensor | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    interpolate_pos_encoding: bool | None = None,
    return_dict: bool | None = None,
    **_: Any,
) -> Any:
    """Hiera's states of the windows that are kept, with the mask and the order of all windows.

    Args:
        pixel_values: Images, [batch, channels, height, width].
        noise: A number for each window, [batch, windows]; the windows with the smallest numbers are kept.
        output_attentions: As transformers' own.
        output_hidden_states: As transformers' own.
        interpolate_pos_encoding: As transformers' own.
        return_dict: As transformers' own.
    """
    if pixel_values is None:
        raise ValueError("HieraModel takes pixel_values, and got none.")
    config = self.config
    return_dict = config.return_dict if return_dict is None else return_dict
    modeling = import_module("transformers.models.hiera.modeling_hiera")
    embeddings, mask, order = self.embeddings(
        pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, noise=noise
    )
    tokens = modeling.unroll(
        embeddings,
        image_shape=tuple(pixel_values.shape[-2:]),
        patch_stride=config.patch_stride,
        schedule=self.unroll_schedule,
    )
    results = self.encoder(
        _of_windows(tokens, mask, *_numbers(self)),
        bool_masked_pos=mask,
        output_attentions=config.output_attentions if output_attentions is None else output_attentions,
        output_hidden_states=config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        return_dict=return_dict,
    )
    pooled = None if self.pooler is None else self.pooler(results[0])
    if not return_dict:
        return (results[0], *(() if pooled is None else (pooled,)), mask, order, *results[1:])
    return modeling.HieraModelOutput(
        last_hidden_state=results[0],
        pooler_output=pooled,
        bool_masked_pos=mask,
        ids_restore=order,
        hidden_states=results.hidden_states,
        attentions=results.attentions,
        reshaped_hidden_states=results.reshaped_hidden_states,
    )


def _numbers(self: Any) -> tuple[int, int]:
    """How many tokens a window has, and how many windows are kept."""
    patches = self.embeddings.patch_embeddings
    return math.prod(self.config.masked_unit_size), int(
        math.prod(patches.mask_spatial_shape) * (1 - patches.mask_ratio)
    )


def _of_windows(tokens: Tensor, mask: Tensor, area: int, count: int) -> Tensor:
    """The tokens of the windows that are kept.

    Args:
        tokens: The first token of each window, then the second token of each, [batch, area * windows, width].
        mask: True for ``count`` windows of each image, [batch, windows].
        area: How many tokens a window has.
        count: How many windows are kept.

    Returns:
        In the same order, [batch, area * count, width].
    """
    windows = mask.shape[1]
    places = torch.arange(windows, device=mask.device).where(mask, windows).sort(dim=1).values[:, :count]
    tokens = tokens.unflatten(1, (area, windows))
    chosen = places[:, None, :, None].expand(-1, area, -1, tokens.shape[-1])
    return tokens.gather(2, chosen).flatten(1, 2)
