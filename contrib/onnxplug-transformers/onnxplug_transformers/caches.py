"""Caches taken apart into tensors, layer by layer (key, value, and a static layer's fill), and put together again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import cache_utils

from onnxplug.torch_private import pytree

_FIELDS: dict[type, tuple[str, ...]] = {
    cache_utils.DynamicLayer: ("keys", "values"),
    cache_utils.StaticLayer: ("keys", "values", "cumulative_length"),
}
_NAMES = {"keys": "key", "values": "value", "cumulative_length": "length"}


def register() -> None:
    """Registers the cache classes with torch's pytree, once a process; one that is registered already stays."""
    for kind in (cache_utils.DynamicCache, cache_utils.StaticCache, cache_utils.EncoderDecoderCache):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                flatten,
                unflatten,
                serialized_type_name=f"{kind.__module__}.{kind.__name__}",
                flatten_with_keys_fn=flatten_with_keys,
            )


def flatten(cache: Any) -> tuple[list[torch.Tensor], str]:
    """The tensors of a cache, and all else about it."""
    pairs, context = _take_apart(cache)
    return [tensor for _, tensor in pairs], json.dumps(context)


def flatten_with_keys(cache: Any) -> tuple[list[Any], str]:
    """As :func:`flatten`, each tensor with the name that an input of the graph gets from it."""
    pairs, context = _take_apart(cache)
    return [(pytree.MappingKey(name), tensor) for name, tensor in pairs], json.dumps(context)


def unflatten(values: Sequence[Any], context: str) -> Any:
    """The cache again."""
    left = list(values)
    cache = _put_together(json.loads(context), left)
    if left:
        raise ValueError(f"{len(left)} tensors more than the cache has")
    return cache


def shapes(cache: Any, batch: str, past: str, source: str) -> list[dict[int, str] | None]:
    """See :func:`onnxplug_transformers.cache_shapes`."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        return [
            *shapes(cache.self_attention_cache, batch, past, source),
            *shapes(cache.cross_attention_cache, batch, source, source),
        ]
    found: list[dict[int, str] | None] = []
    for name, _ in _take_apart(cache)[0]:
        if name.startswith("length"):
            found.append(None)
        else:
            found.append({0: batch} if isinstance(cache, cache_utils.StaticCache) else {0: batch, 2: past})
    return found


def _take_apart(cache: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        own, own_context = _take_apart(cache.self_attention_cache)
        cross, cross_context = _take_apart(cache.cross_attention_cache)
        return [(f"self_{n}", t) for n, t in own] + [(f"cross_{n}", t) for n, t in cross], {
            "halves": [own_context, cross_context],
            "updated": sorted(int(index) for index, done in cache.is_updated.items() if done),
        }
    if type(cache) not in (cache_utils.DynamicCache, cache_utils.StaticCache):
        raise TypeError(f"onnxplug-transformers does not support the cache class {type(cache).__name__}")
    pairs: list[tuple[str, Any]] = []
    layers: list[Any] = []
    for index, layer in enumerate(cache.layers):
        fields = _FIELDS.get(type(layer))
        if fields is None:
            raise TypeError(
                f"layer {index} of the {type(cache).__name__} has the class {type(layer).__name__}, whose state is not in its "
                "tensors alone. onnxplug-transformers supports DynamicLayer and StaticLayer; turn sliding windows off"
            )
        if layer.is_initialized:
            pairs += [(f"{_NAMES[field]}_{index}", getattr(layer, field)) for field in fields]
        layers.append([layer.is_initialized, getattr(layer, "max_cache_len", None)])
    return pairs, {"static": isinstance(cache, cache_utils.StaticCache), "layers": layers}


def _put_together(context: dict[str, Any], values: list[Any]) -> Any:
    if "halves" in context:
        own, cross = (_put_together(half, values) for half in context["halves"])
        both = cache_utils.EncoderDecoderCache.__new__(cache_utils.EncoderDecoderCache)
        both.self_attention_cache, both.cross_attention_cache = own, cross
        # Not asked of the sizes, as the constructor does it: they may be symbolic.
        both.is_updated = {index: index in context["updated"] for index in range(len(cross.layers))}
        return both
    if context["static"]:
        cache = cache_utils.StaticCache.__new__(cache_utils.StaticCache)
        cache_utils.Cache.__init__(cache, layers=[])
    else:
        cache = cache_utils.DynamicCache()
    for initialized, length in context["layers"]:
        layer = cache_utils.StaticLayer(length) if context["static"] else cache_utils.DynamicLayer()
        if initialized:
            _fill(layer, values)
        cache.layers.append(layer)
    return cache


def _fill(layer: Any, values: list[Any]) -> None:
    for field in _FIELDS[type(layer)]:
        setattr(layer, field, values.pop(0))
    layer.is_initialized = True
    keys = layer.keys
    if not isinstance(keys, torch.Tensor):
        return  # pytree maps over other leaves than tensors: names, specifications
    layer.dtype, layer.device = keys.dtype, keys.device
    if isinstance(layer, cache_utils.StaticLayer):
        layer.batch_size, layer.num_heads = keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = keys.shape[-1], layer.values.shape[-1]
