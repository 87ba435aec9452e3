"""Attention with its cache in one operator, ONNX Runtime's ``GroupQueryAttention``: buffers that the cache grows in.

The operator knows of no padding: each row of a batch has its tokens in the buffer from its beginning, without gaps. The graph
therefore moves the new tokens of a row in front of the padding among them, whose keys and values the next step writes over, and
moves the results back. Padding may be on the left, on the right or in between. A single new token stays where it is: the nodes
that move tokens are in a branch, since each would otherwise run in every step of a text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer

from onnxplug import UsageError
from onnxplug_transformers.exchanged import modeling_of
from onnxplug_transformers.own_attention import (
    asks_for_a_mask,
    has_own_attention,
    restore_attention,
    use_attention,
)
from onnxplug_transformers.rotary import joint_rows, turned_rows

DOMAIN = "com.microsoft"
_NAME = "onnxplug_group_query"
#: Arguments of attention that change no result here.
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache", "cache_position", "is_causal", "dropout"})


@torch.library.custom_op("onnxplug_transformers::group_query_attention", mutates_args=())
def group_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    last: torch.Tensor,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    total: int,
    heads: int,
    groups: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention of new tokens to past tokens and to themselves.

    Args:
        query: [batch, sequence, heads * width].
        key, value: [batch, sequence, groups * width], of the new tokens.
        past_key, past_value: [batch, groups, past, width], of the past tokens, each row's from the buffer's beginning.
        last: int32 [batch], the place of each row's last new token; where there is no past, ``sequence - 1``.
        sinks: [heads], a further score for each head, beside the scores of the keys; ``None`` for none.
        bias: [1, heads, sequence, total], added to the scores; ``None`` for none.
        total: The length of the mask; where it is the number of new tokens, ONNX Runtime takes them for a prompt.
        window: The number of tokens that a token sees, itself among them; -1 for all.
        softcap: The scores' bound, 0 for none.

    Returns:
        [batch, sequence, heads * width], and the new keys and values, [batch, groups, max(past, total), width].
    """
    batch, sequence, _ = query.shape
    width = query.shape[2] // heads
    size = max(past_key.shape[2], total)
    results = []
    buffers = [nn.functional.pad(past, (0, 0, 0, size - past.shape[2])) for past in (past_key, past_value)]
    for row in range(batch):
        start = int(last[row]) + 1 - sequence
        for buffer, new in zip(buffers, (key, value), strict=True):
            buffer[row, :, start : start + sequence] = new[row].unflatten(1, (groups, width)).transpose(0, 1)
        keys, values = (buffer[row, :, : start + sequence].repeat_interleave(heads // groups, 0) for buffer in buffers)
        scores = query[row].unflatten(1, (heads, width)).transpose(0, 1).float() @ keys.float().mT * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias[0, :, :, : start + sequence].float()
        place, seen = torch.arange(start, start + sequence)[:, None], torch.arange(start + sequence)
        hidden = (seen > place) | ((seen <= place - window) if window > 0 else torch.zeros((), dtype=torch.bool))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].float().expand(-1, sequence, 1)], -1)
        weights = scores.softmax(-1)[..., : start + sequence]
        results.append((weights @ values.float()).transpose(0, 1).flatten(1))
    return torch.stack(results).to(query.dtype), buffers[0], buffers[1]


@group_query_attention.register_fake
def _(
    query: torch.Tensor, key: Any, value: Any, past_key: torch.Tensor, past_value: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, _, total, _, groups, *_ = others
    batch, _, past, width = past_key.shape
    shape = (batch, groups, torch.sym_max(past, total), width)
    return torch.empty_like(query), past_key.new_empty(shape), past_value.new_empty(shape)


@torch.library.custom_op("onnxplug_transformers::in_front", mutates_args=())
def in_front(tokens: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New tokens in front of the padding that is among them.

    Args:
        tokens: int64 [batch, sequence].
        attention_mask: int64 [batch, total], 1 for a token and 0 for padding; its end is the mask of ``tokens``.

    Returns:
        The tokens, [batch, sequence]; int32 [batch], the place of each row's last new token in the cache.
    """
    seen, new = _parted(attention_mask, tokens.shape[1])
    moved = tokens.gather(1, new.argsort(dim=1, descending=True, stable=True))
    return moved, (seen.sum(1) + tokens.shape[1] - 1).int()


@in_front.register_fake
def _(tokens: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(tokens), tokens.new_empty(tokens.shape[:1], dtype=torch.int32)


def _parted(mask: torch.Tensor, sequence: int) -> tuple[torch.Tensor, ...]:
    """The parts of a mask for the past tokens and for the new tokens."""
    return mask.split([mask.shape[1] - sequence, sequence], dim=1)


def convert_in_front(g: Any, node: Any) -> Any:
    """Emits TopK of the mask, which leaves equal numbers in their order."""
    import onnx_ir as ir

    tokens, mask = node.args

    def single() -> Any:
        before = g.op.Slice(mask, g.const([0]), g.const([-1]), g.const([1]))
        return tokens, g.cast(g.op.ReduceSum(before, g.const([1]), keepdims=0), ir.DataType.INT32)

    def several() -> Any:
        sequence, seen, new = _parts(g, mask, tokens)
        _, order = g.op.TopK(new, sequence, axis=1, _outputs=2)
        last = g.op.Sub(g.op.Add(g.op.ReduceSum(seen, g.const([1]), keepdims=0), sequence), g.const([1]))
        return g.op.GatherElements(tokens, order, axis=1), g.cast(last, ir.DataType.INT32)

    return _for_single(g, tokens, single, several, _outputs=2)


def _for_single(g: Any, tokens: Any, single: Any, several: Any, **outputs: int) -> Any:
    """An If on whether there is one new token."""
    is_single = g.op.Equal(g.op.Shape(tokens, start=1, end=2), g.const([1]))
    return g.op.If(
        is_single,
        then_branch=g.subgraph(single, name="single"),
        else_branch=g.subgraph(several, name="several"),
        **outputs,
    )


def _parts(g: Any, mask: Any, tokens: Any) -> tuple[Any, Any, Any]:
    """The number of new tokens, [1], and the parts of the mask, as of :func:`_parted`."""
    sequence = g.op.Shape(tokens, start=1, end=2)
    lengths = g.op.Concat(g.op.Sub(g.op.Shape(mask, start=1, end=2), sequence), sequence, axis=0)
    return (sequence, *g.op.Split(mask, lengths, axis=1, _outputs=2))


@torch.library.custom_op("onnxplug_transformers::places", mutates_args=())
def places(tokens: torch.Tensor, last: torch.Tensor, limit: int) -> torch.Tensor:
    """The places of new tokens, as the attention operator counts them.

    Args:
        tokens: [batch, sequence].
        last: int32 [batch], the place of each row's last new token.

    Returns:
        int64 [batch, sequence].
    """
    sequence = tokens.shape[1]
    return (last + 1 - sequence).long()[:, None] + torch.arange(sequence)


@places.register_fake
def _(tokens: torch.Tensor, last: torch.Tensor, limit: int) -> torch.Tensor:
    return tokens.new_empty(tokens.shape, dtype=torch.int64)


def convert_places(g: Any, node: Any) -> Any:
    """Sums of the sizes and of the last places."""
    import onnx_ir as ir

    tokens, last, _ = node.args
    sequence = g.as_scalar(g.dim(tokens, 1))
    start = g.op.Sub(g.op.Add(g.cast(last, ir.DataType.INT64), g.const(1)), sequence)
    return g.op.Add(g.op.Unsqueeze(start, g.const([1])), g.op.Range(g.const(0), sequence, g.const(1)))


@torch.library.custom_op("onnxplug_transformers::rows_at", mutates_args=())
def rows_at(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The vectors at some places of each row of a batch.

    Args:
        x: [batch, sequence, width].
        index: int64 [batch, places].

    Returns:
        [batch, places, width].
    """
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


@rows_at.register_fake
def _(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*index.shape, x.shape[2]))


def convert_rows_at(g: Any, node: Any) -> Any:
    """GatherND, which copies whole vectors."""
    return _rows_at(g, *node.args)


def _rows_at(g: Any, x: Any, index: Any) -> Any:
    return g.op.GatherND(x, g.op.Unsqueeze(index, g.const([2])), batch_dims=1)


@torch.library.custom_op("onnxplug_transformers::moved_back", mutates_args=())
def moved_back(x: torch.Tensor, tokens: torch.Tensor, attention_mask: torch.Tensor, last: bool) -> torch.Tensor:
    """Moves results for tokens that :func:`in_front` moved to the places of the tokens in the mask.

    Args:
        x: [batch, sequence, width].
        tokens: [batch, sequence], before they were moved.
        attention_mask: int64 [batch, total].
        last: Whether only each row's last new token has a result; a row without a new token has the result for padding.

    Returns:
        [batch, sequence, width], padding has some token's result; [batch, 1, width] of the last tokens.
    """
    _, new = _parted(attention_mask, x.shape[1])
    index = (new.sum(1, keepdim=True) - 1).clamp(min=0) if last else new.cumsum(1) - new
    return rows_at(x, index)


@moved_back.register_fake
def _(x: torch.Tensor, tokens: torch.Tensor, attention_mask: torch.Tensor, last: bool) -> torch.Tensor:
    return x.new_empty((x.shape[0], 1, x.shape[2])) if last else torch.empty_like(x)


def convert_moved_back(g: Any, node: Any) -> Any:
    """Emits the move for more than one new token; the result of a single token stays."""
    x, tokens, mask, last = node.args

    def several() -> Any:
        _, _, new = _parts(g, mask, tokens)
        if last:
            index = g.op.Max(g.op.Sub(g.op.ReduceSum(new, g.const([1])), g.const([1])), g.const([0]))
        else:
            index = g.op.CumSum(new, g.const(1), exclusive=1)
        return _rows_at(g, x, index)

    return _for_single(g, tokens, lambda: x, several)


def convert(g: Any, node: Any) -> Any:
    """GroupQueryAttention, which turns queries and keys itself where they are turned by the tokens' places.

    Queries, keys and values that are parts of one product are read from it.
    """
    import onnx_ir as ir

    query, key, value, past_key, past_value, last, sinks, bias, total, heads, groups, scale, window, softcap = node.args
    turned = turned_rows(g, node)
    if turned is not None:
        query, key = turned.query, turned.key
    whole = joint_rows(node, turned)
    if whole is not None:
        query, key, value = g.interpreter.value_of(whole), None, None
    return g.domain(DOMAIN).GroupQueryAttention(
        query,
        key,
        value,
        past_key,
        past_value,
        last,
        g.cast(g.as_scalar(total), ir.DataType.INT32),
        *(turned.tables if turned is not None else (None, None)),
        None,
        bias,
        sinks,
        num_heads=heads,
        kv_num_heads=groups,
        scale=float(scale),
        local_window_size=window,
        softcap=float(softcap),
        **({"do_rotary": 1} if turned is not None else {}),
        _outputs=3,
    )


class _NewTokens(DynamicLayer):
    """A layer of a cache that leaves it to the attention to put past and new tokens together."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        """The new keys and values, as they are."""
        return key_states, value_states


class FusedCache:
    """One call's cache, which the attention operators read and write.

    Args:
        past: The cache that came in, whose layers get the new keys and values.
        tokens: [batch, sequence], the new tokens.
        attention_mask: [batch, total], 1 for a token and 0 for padding.

    Attributes:
        tokens: [batch, sequence], the new tokens of each row in front of its padding.
        positions: [batch, sequence], their places.
        windows: The windows that the model's masks would have, ``None`` for a mask without one.
    """

    def __init__(self, past: Any, tokens: torch.Tensor, attention_mask: torch.Tensor, limit: int) -> None:
        self.past, self.total = past, attention_mask.shape[1]
        self._before = tokens, attention_mask
        self.tokens, self.last = in_front(tokens, attention_mask)
        self.positions: torch.Tensor = places(tokens, self.last, limit)
        self.given: Any = DynamicCache()
        for layer in past.layers:
            new: Any = _NewTokens()
            new.lazy_initialization(layer.keys, layer.values)
            new.keys, new.values = layer.keys, layer.values
            self.given.layers.append(new)
        self.calls = [0] * len(self.given.layers)
        self.windows: set[int | None] = set()
        self._bias: torch.Tensor | None = None

    def bias_of(self, table: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """The bias [1, heads, sequence, total] from a table for places, [heads, length]; the same in every layer.

        It is 0 for the last place, where halves are finest: only the differences between places have an effect.
        """
        if self._bias is None:
            row = table[:, torch.arange(self.total, device=table.device)]
            row = (row - row[:, -1:]).to(query.dtype)
            self._bias = row[None, :, None].expand(-1, -1, query.shape[2], -1)
        return self._bias

    def moved_back(self, states: torch.Tensor) -> torch.Tensor:
        """Results [batch, sequence, width] moved to the mask's places of the tokens; padding gets a token's result."""
        results: torch.Tensor = moved_back(states, *self._before, False)
        return results

    def last_of(self, states: torch.Tensor) -> torch.Tensor:
        """The results for each row's last new token, [batch, 1, width]; in a row without any, for padding."""
        results: torch.Tensor = moved_back(states, *self._before, True)
        return results

    def check(self) -> None:
        """Checks, after the call, that every layer's attention was the operator."""
        others = [index for index, calls in enumerate(self.calls) if calls != 1]
        if others:
            raise UsageError(f"the attention of layer {others[0]} can't be replaced")


_current: list[FusedCache] = []


@contextlib.contextmanager
def fused_attention(cache: FusedCache) -> Iterator[None]:
    """Holds while a model is called whose attention is :func:`use_fused_attention`'s."""
    _current.append(cache)
    try:
        yield
    finally:
        _current.pop()


def attentions_of(model: Any) -> list[tuple[Any, str]]:
    """The configurations of a model and its modules, each with the attention that it names."""
    configs = [model.config, model.config.get_text_config(), *(getattr(m, "config", None) for m in model.modules())]
    return [
        (c, c._attn_implementation) for c in {id(c): c for c in configs}.values() if hasattr(c, "_attn_implementation")
    ]


def use_fused_attention(model: Any) -> None:
    """Lets a model of transformers compute its attention by the operator."""
    if has_own_attention(model):
        use_attention(model, _attention)
    elif not hasattr(modeling_of(model), "ALL_ATTENTION_FUNCTIONS"):
        raise UsageError(f"{type(model).__name__} has attention of its own, which can't be replaced")
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _some_mask if asks_for_a_mask(model) else _no_mask)
    for config, _ in attentions_of(model):
        config._attn_implementation = _NAME


def use_former_attention(model: Any, before: Sequence[tuple[Any, str]]) -> None:
    """Lets a model compute its attention as before :func:`use_fused_attention`.

    Args:
        before: The result of :func:`attentions_of` from before.
    """
    restore_attention(model)
    for config, attention in before:
        config._attn_implementation = attention


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """No mask: the operator counts each row's tokens itself. The window that the mask would have is noted."""
    if _current:
        _current[-1].windows.add(local_size)


def _some_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    """A mask that nothing reads."""
    _no_mask(*args, **kwargs)
    return torch.zeros(())


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers' models call, with queries [batch, heads, sequence, width]."""
    unknown = sorted(
        name
        for name, argument in others.items()
        if argument is not None and name not in _WITHOUT_EFFECT and not name.startswith("output_")
    )
    if unknown or not _current or not hasattr(module, "layer_idx") or not getattr(module, "is_causal", True):
        what = f"attention with {', '.join(unknown)}" if unknown else "attention that is not that of a decoder's layer"
        raise UsageError(f"{type(module).__name__} has {what}")
    if _window_of(module) is not None and sliding_window is None:
        raise UsageError(f"{type(module).__name__} has a window that it does not tell its attention")
    cache = _current[-1]
    layer = cache.past.layers[module.layer_idx]
    if attention_mask is not None:
        raise UsageError(f"{type(module).__name__} has a mask of its own")
    if sliding_window not in (cache.windows or {None}):
        raise UsageError(f"{type(module).__name__} has another window than its mask")
    if {key.shape[1::2], value.shape[1::2]} != {layer.keys.shape[1::2]}:
        raise UsageError(f"{type(module).__name__} has keys and values of other shapes than its cache")
    cache.calls[module.layer_idx] += 1
    heads, groups, width = query.shape[1], key.shape[1], query.shape[3]
    rows = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    result, layer.keys, layer.values = group_query_attention(
        *rows,
        layer.keys,
        layer.values,
        cache.last,
        s_aux,
        None if bias is None else cache.bias_of(bias, query),
        cache.total,
        heads,
        groups,
        scaling if scaling is not None else width**-0.5,
        sliding_window if sliding_window is not None else -1,
        softcap or 0.0,
    )
    return result.unflatten(2, (heads, width)), None


def _window_of(module: Any) -> int | None:
    """The window that the configuration gives a layer."""
    config: Any = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window if getattr(config, "use_sliding_window", True) else None
