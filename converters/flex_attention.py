"""Attention whose scores and mask are computed by the model's own functions (``flex_attention``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onnxplug.build.builder import GraphBuilder
from onnxplug.errors import Unsupported
from onnxplug.interpret.decompose import trace_function
from onnxplug.interpret.node import FxNode, meta_of
from onnxplug.registry.rule import Rule


def flex_attention(g: GraphBuilder, node: FxNode) -> list[Any]:
    """``flex_attention``: softmax(mod(query @ key^T * scale)) @ value, with the keys hidden that the mask's function hides.

    query [B, Hq, L, E], key [B or 1, H, S, E], value [B or 1, H, S, Ev]; each key's head serves Hq / H of the query's. The results
    are [B, Hq, L, Ev] and, [B, Hq, L], logsumexp and maximum of the scores to the base 2. ``mod(score, b, h, q, kv)`` and
    ``mask(b, h, q, kv)`` are functions of scalars, here over all positions at once. The blocks of a BlockMask only save calls of
    the mask's function. A row whose keys are all hidden is zero; scores are computed in float32 at least.
    """
    positions: list[Any] = [*node.fx.args, *node.fx.kwargs.values()]
    values = list(node.args)
    score_graph, block_mask, scale = values[3], values[4], values[5]
    score_buffers, mask_buffers = values[7], values[8]
    mask_graph = block_mask[-1]
    operands: list[tuple[Any, Any]] = list(zip(positions[:3], values[:3], strict=True))
    operands += zip(positions[7], score_buffers, strict=True)
    operands += zip(positions[8], mask_buffers, strict=True)
    split = 3 + len(score_buffers)
    traced = [(meta_of(fx), value) for fx, value in operands]
    plain = [fake for fake, _ in traced]
    places = [i for i, fake in enumerate(plain) if isinstance(fake, torch.Tensor | torch.SymInt)]

    def attend(*inputs: Any) -> tuple[Any, ...]:
        items = list(plain)
        for place, item in zip(places, inputs, strict=True):
            items[place] = item
        query, key, value = items[:3]
        modify = None if _returns_first(score_graph) else _over_positions(score_graph, 1, len(score_buffers))
        mask = None if _is_all_true(mask_graph) else _over_positions(mask_graph, 0, len(mask_buffers))
        scores = _scores(query, key, scale)
        indices = [torch.arange(size, device=scores.device) for size in scores.shape]
        if modify is not None:
            scores = modify(scores, *indices, *items[3:split])
        if mask is not None:
            scores = torch.where(mask(*indices, *items[split:]), scores, -math.inf)
        return _results(scores, _repeated(value, query), query.dtype, bounded=modify is None and mask is None)

    try:
        module = trace_function(attend, [plain[place] for place in places])
    except ValueError as error:
        raise Unsupported(f"flex_attention whose functions can't be traced for all sizes: {error}") from error
    results = g.interpreter.inline(module, [traced[place][1] for place in places])
    # torch declares float for the logsumexp and the maximum of doubles too.
    return [
        result if spec is None or result.dtype == spec.dtype else g.cast(result, spec.dtype)
        for result, spec in zip(results, node.outputs, strict=True)
    ]


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """[B, Hq, L, S]."""
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return (query.to(dtype) @ _repeated(key, query).to(dtype).transpose(-2, -1)) * scale


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values, with each head as often as heads of the query share it."""
    heads, own = query.shape[1], tensor.shape[1]
    if heads == own:
        return tensor
    count = heads // own
    spread = tensor.unsqueeze(2).expand(tensor.shape[0], own, count, *tensor.shape[2:])
    return spread.reshape(tensor.shape[0], heads, *tensor.shape[2:])


def _results(scores: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, *, bounded: bool) -> tuple[Any, ...]:
    """The attention's results; ``bounded``: no score is -inf."""
    weights = torch.softmax(scores, dim=-1)
    if not bounded:
        hidden = (scores == -math.inf).all(dim=-1, keepdim=True)
        weights = torch.where(hidden, 0.0, weights)
    unit = math.log(2)
    return weights.to(dtype) @ value, scores.logsumexp(dim=-1) / unit, scores.amax(dim=-1) / unit


def _over_positions(function: Callable[..., Any], before: int, after: int) -> Callable[..., Any]:
    """A function of batch, head, query and key, over all of them: the axes of its result in this order.

    Args:
        function: The function of scalars.
        before: How many arguments it has before them, which have all four axes.
        after: How many arguments it has after them, which have none.
    """
    for axis in (3, 2, 1, 0):
        axes = tuple(0 if axis == other else None for other in range(4))
        function = torch.vmap(function, in_dims=(*[0] * before, *axes, *[None] * after))
    return function


def _returns_first(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph returns its first input."""
    return _returned(graph) is next(iter(graph.graph.nodes))


def _is_all_true(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph returns True for everything, as torch's mask for a call without a mask."""
    returned = _returned(graph)
    target = getattr(returned, "target", None)
    if target is torch.ops.aten.new_ones.default:
        return True
    filled = {torch.ops.aten.full.default: 1, torch.ops.aten.new_full.default: 2}
    return target in filled and returned.args[filled[target]] is True


def _returned(graph: torch.fx.GraphModule) -> Any:
    result: Any = graph.graph.output_node().args[0]
    while isinstance(result, Sequence) and len(result) == 1:
        result = result[0]
    return result


RULES: list[Rule] = [Rule("flex_attention", flex_attention)]
