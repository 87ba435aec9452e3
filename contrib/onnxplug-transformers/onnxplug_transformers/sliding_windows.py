"""Longformer's and LED's attention within sliding windows, and to and from global tokens, while a model is captured.

transformers pads texts to a multiple of the largest window, views the chunks by strides, and branches on whether any
token is global. Here each layer computes its blocks of half a window, each of which sees itself and the two blocks
beside it; the last block is filled up with places that no token sees. Global tokens are gathered, as many of each text
as the text with most of them has, but at least one, which no token sees where it isn't global.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import exchanged, in_use, parameters


@contextlib.contextmanager
def windows_of_any_text() -> Iterator[None]:
    """Holds while a model is captured; a model whose attention's weights are asked for is left as it is."""
    attentions = "LongformerSelfAttention", "LEDEncoderSelfAttention"
    models: dict[str, Callable[..., Any]] = {"LongformerModel": _inputs, "LEDEncoder": _inputs_of_led}
    with contextlib.ExitStack() as stack:
        stack.enter_context(exchanged({f"{name}.forward": (attention, _gives_weights) for name in attentions}))
        for name, inputs in models.items():
            for owner, method, before in in_use(f"{name}.forward"):
                padding = vars(owner).get("_pad_to_window_size")
                if padding is not None and parameters(padding) == parameters(inputs):
                    stack.enter_context(patched(owner, method, _with_inputs(before, padding, inputs)))
        yield


def _with_inputs(before: Callable[..., Any], padding: Any, inputs: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward in which the method that pads inputs to a multiple of the window is exchanged."""

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = inspect.signature(before).bind(self, *args, **kwargs).arguments.get("output_attentions")
        gives_weights = self.config.output_attentions if asked is None else asked
        if gives_weights or type(self)._pad_to_window_size is not padding:
            return before(self, *args, **kwargs)
        with patched(self, "_pad_to_window_size", functools.partial(inputs, self)):
            return before(self, *args, **kwargs)

    return forward


def _inputs(
    self: Any,
    input_ids: Any,
    attention_mask: Any,
    token_type_ids: Any,
    position_ids: Any,
    inputs_embeds: Any,
    pad_token_id: Any,
) -> tuple[Any, ...]:
    """Longformer's inputs without padding, which is 0 tokens long."""
    return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds


def _inputs_of_led(
    self: Any, input_ids: Any, attention_mask: Any, inputs_embeds: Any, pad_token_id: Any
) -> tuple[Any, ...]:
    """LED's inputs, as of :func:`_inputs`."""
    return 0, input_ids, attention_mask, inputs_embeds


def _gives_weights(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    is_index_masked: Any = None,
    is_index_global_attn: Any = None,
    is_global_attn: Any = None,
    output_attentions: Any = False,
) -> bool:
    return bool(output_attentions) or attention_mask is None or is_index_masked is None


def attention(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    is_index_masked: Tensor | None = None,
    is_index_global_attn: Tensor | None = None,
    is_global_attn: Any = None,
    output_attentions: Any = False,
) -> tuple[Tensor]:
    """Each token attends to a window around it and to global tokens, a global token to all tokens; none sees padding.

    Args:
        hidden_states: [batch, tokens, width].
        attention_mask: 0 for tokens that are seen through the window, [batch, tokens].
        is_index_masked: Whether a token is padding, [batch, tokens].
        is_index_global_attn: Whether a token is global, [batch, tokens].
        is_global_attn: Whether there is any global token; False where it is known that there is none.
        output_attentions: False.

    Returns:
        New states [batch, tokens, width].
    """
    assert attention_mask is not None and is_index_masked is not None
    query = _heads(self.query(hidden_states) / math.sqrt(self.head_dim), self.num_heads)
    keys, values = self.key(hidden_states), self.value(hidden_states)
    blocks = _Blocks(hidden_states.shape[1], self.one_sided_attn_window_size, hidden_states.device)
    rows, smallest = blocks.of(query), torch.finfo(query.dtype).min
    seen = blocks.around(attention_mask[:, None, :, None] == 0).mT & blocks.window()
    scores = (rows @ blocks.around(_heads(keys, self.num_heads)).mT).masked_fill(~seen, smallest)
    tokens = None
    if is_index_global_attn is not None and (not isinstance(is_global_attn, bool | None) or is_global_attn):
        tokens = _Tokens(is_index_global_attn)
        of_tokens = (rows.flatten(2, 3) @ _heads(tokens.of(keys), self.num_heads).mT).unflatten(2, rows.shape[2:4])
        of_tokens = of_tokens.masked_fill(~tokens.are_there[:, None, None, None], smallest)
        scores = torch.cat((of_tokens, scores), -1)
    weights = functional.softmax(scores, -1, dtype=torch.float32)
    weights = weights.masked_fill(blocks.of(is_index_masked[:, None, :, None]), 0).type_as(scores)
    weights = functional.dropout(weights, self.dropout, self.training)
    count = 0 if tokens is None else tokens.are_there.shape[1]
    result = weights[..., count:] @ blocks.around(_heads(values, self.num_heads))
    if tokens is not None:
        seen_values = _heads(tokens.of(values), self.num_heads)
        result = result + (weights[..., :count].flatten(2, 3) @ seen_values).unflatten(2, rows.shape[2:4])
    states = blocks.joined(result).transpose(1, 2).flatten(2)
    if tokens is not None:
        states = tokens.instead_of(states, _of_tokens(self, tokens.of(hidden_states), hidden_states, is_index_masked))
    return (states,)


def _of_tokens(self: Any, tokens: Tensor, hidden_states: Tensor, is_index_masked: Tensor) -> Tensor:
    """The attention of global tokens, [batch, global, width], to all tokens, [batch, tokens, width]."""
    query = _heads(self.query_global(tokens) / math.sqrt(self.head_dim), self.num_heads)
    key, value = (_heads(layer(hidden_states), self.num_heads) for layer in (self.key_global, self.value_global))
    scores = query @ key.mT
    scores = scores.masked_fill(is_index_masked[:, None, None], torch.finfo(scores.dtype).min)
    weights = functional.softmax(scores, -1, dtype=torch.float32).type_as(scores)
    return (functional.dropout(weights, self.dropout, self.training) @ value).transpose(1, 2).flatten(2)


def _heads(states: Tensor, heads: int) -> Tensor:
    """[batch, tokens, width] as [batch, heads, tokens, width of a head]."""
    return states.unflatten(2, (heads, -1)).transpose(1, 2)


class _Blocks:
    """Blocks of the tokens that are the third axis of tensors, the last block filled up with zeros or ``False``."""

    def __init__(self, tokens: Any, size: int, device: Any) -> None:
        self.tokens, self.size, self.device = tokens, size, device
        self.number = (tokens + size - 1) // size
        self.added = self.number * size - tokens

    def of(self, x: Tensor) -> Tensor:
        """[batch, heads, tokens, width] as [batch, heads, blocks, size, width]."""
        return functional.pad(x, (0, 0, 0, self.added)).unflatten(2, (self.number, self.size))

    def around(self, x: Tensor) -> Tensor:
        """Blocks with the two beside each: [batch, heads, tokens, width] as [batch, heads, blocks, 3 * size, width]."""
        padded = functional.pad(x, (0, 0, self.size, self.size + self.added))
        blocks = padded.unflatten(2, (self.number + 2, self.size))
        return torch.cat([blocks.narrow(2, place, self.number) for place in range(3)], 3)

    def joined(self, x: Tensor) -> Tensor:
        """[batch, heads, blocks, size, width] as [batch, heads, tokens, width]."""
        return x.flatten(2, 3).split([self.tokens, self.added], dim=2)[0]

    def window(self) -> Tensor:
        """Which tokens around a token's block lie in the token's window, [size, 3 * size]."""
        places = torch.arange(3 * self.size, device=self.device)
        distance = places - places[: self.size, None]
        return (distance >= 0) & (distance <= 2 * self.size)


class _Tokens:
    """The global tokens of each text.

    Attributes:
        is_global: [batch, tokens].
        places: The places of global tokens, [batch, global]; any places where a text has fewer of them than another.
        are_there: Which of these places are global tokens, [batch, global].
    """

    def __init__(self, is_global: Tensor) -> None:
        self.is_global, length = is_global, is_global.shape[1]
        counts = is_global.sum(1)
        # ONNX Runtime's fusions don't run a layer of no tokens: there is always at least one place.
        numbers = torch.arange(counts.max().clamp(min=1).item(), device=is_global.device)
        places = torch.arange(length, device=is_global.device).where(is_global, length).sort(1).values
        self.places = places[:, numbers].clamp(max=length - 1)
        self.are_there = numbers < counts[:, None]

    def of(self, states: Tensor) -> Tensor:
        """The global tokens' states, [batch, global, width], of all states [batch, tokens, width]."""
        return states.gather(1, self.places[:, :, None].expand(-1, -1, states.shape[2]))

    def instead_of(self, states: Tensor, theirs: Tensor) -> Tensor:
        """All states, [batch, tokens, width], with ``theirs``, [batch, global, width], for the global tokens."""
        number = (self.is_global.long().cumsum(1) - 1).clamp(min=0)
        own = theirs.gather(1, number[:, :, None].expand(-1, -1, states.shape[2]))
        return own.where(self.is_global[:, :, None], states)
