"""CANINE's local attention within chunks of a text of any length, while a model is captured.

transformers loops over the chunks of the example's text. Here the chunks are rows of one batch; the last chunk is
filled up with places that no other place sees. A text shorter than a chunk is a chunk of its own length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug_transformers.exchanged import exchanged


@contextlib.contextmanager
def chunks_of_any_text() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged({"CanineAttention.forward": (attention_in_chunks, _is_another)}):
        yield


def _is_another(self: Any, hidden_states: Tensor, attention_mask: Any = None, output_attentions: Any = False) -> bool:
    """Whether attention isn't local, or its chunks overlap or see a first position, as in no model of transformers."""
    sizes = {self.attend_from_chunk_width, self.attend_from_chunk_stride}
    sizes |= {self.attend_to_chunk_width, self.attend_to_chunk_stride}
    sees_first = self.always_attend_to_first_position or self.first_position_attends_to_all
    return not self.local or len(sizes) > 1 or sees_first or attention_mask is None or attention_mask.ndim != 3


def attention_in_chunks(
    self: Any, hidden_states: Tensor, attention_mask: Any = None, output_attentions: Any = False
) -> tuple[Tensor, ...]:
    """Each character attends to the characters of its own chunk.

    Args:
        hidden_states: [batch, characters, width].
        attention_mask: 1 where a character (the second last axis) sees another, [batch, characters, characters].
        output_attentions: Whether the first chunk's weights are a result too; the weights of the other chunks, which
            transformers returns behind them, are in no result of a model.

    Returns:
        New states [batch, characters, width], and the weights [batch, heads, first chunk, first chunk].
    """
    batch, count, _ = hidden_states.shape
    size = torch.sym_min(self.attend_from_chunk_width, count)
    chunks = (count + size - 1) // size
    added = chunks * size - count
    states = functional.pad(hidden_states, (0, 0, 0, added)).unflatten(1, (chunks, size))
    places = torch.arange(chunks * size, device=hidden_states.device).unflatten(0, (chunks, size))
    held = places.clamp(max=count - 1)
    mask = attention_mask.float()[:, held[:, :, None], held[:, None, :]]
    # In a text of padding all places of a chunk are seen alike: added places are hidden by -inf, not by the smallest
    # number.
    mask = mask.masked_fill((places >= count)[:, None, :], -torch.inf).flatten(0, 1)
    rows = states.flatten(0, 1)
    results = self.self(rows, rows, mask, output_attentions)
    context = results[0].unflatten(0, (batch, chunks)).flatten(1, 2).split([count, added], dim=1)[0]
    output = self.output(context, hidden_states)
    if not output_attentions:
        return (output,)
    first = torch.zeros((), dtype=torch.long, device=output.device)  # a number would ask for a chunk
    return output, results[1].unflatten(0, (batch, chunks))[:, first]
