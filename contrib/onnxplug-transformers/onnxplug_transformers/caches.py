"""Caches taken apart into tensors, layer by layer, and put together again.

A layer of attention has keys and values, a static layer also the number of tokens in them; a layer of linear attention
has the states of convolutions and recurrences. The number of tokens that a sliding window has seen is no size of its
tensors once it is full: it is the length of a layer that keeps all tokens, and where there is no such layer, a number
beside the tensors.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers import cache_utils

from onnxplug import UsageError
from onnxplug.torch_private import pytree

_Linear = cache_utils.LinearAttentionLayer
_Sliding = cache_utils.DynamicSlidingWindowLayer
_StaticSliding = cache_utils.StaticSlidingWindowLayer
_FIELDS: dict[type, tuple[str, ...]] = {
    cache_utils.DynamicLayer: ("keys", "values"),
    cache_utils.StaticLayer: ("keys", "values", "cumulative_length"),
    _Sliding: ("keys", "values"),
    _StaticSliding: ("keys", "values"),
    _Linear: (),
    cache_utils.LinearAttentionAndFullAttentionLayer: ("keys", "values"),
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: ("keys", "values"),
    cache_utils.LinearAttentionAndStaticFullAttentionLayer: ("keys", "values", "cumulative_length"),
    cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer: ("keys", "values"),
}
if hasattr(cache_utils, "DummyLayer"):  # transformers 5.22
    _FIELDS[cache_utils.DummyLayer] = ()
_KINDS = {kind.__name__: kind for kind in _FIELDS}
_NAMES = {"keys": "key", "values": "value", "cumulative_length": "length"}
_HALVES = {"self": "decoder", "cross": "encoder"}
_STATES = {"conv_states": "conv", "recurrent_states": "recurrent"}
#: Names of the cache in arguments and results of transformers' modules; ``cache`` is the name from 5.24 on.
_ARGUMENTS = ("past_key_values", "cache_params", "cache")


def register() -> None:
    """Registers the cache classes with torch's pytree, once a process; a class registered already stays as it is."""
    for kind in (cache_utils.DynamicCache, cache_utils.StaticCache, cache_utils.EncoderDecoderCache):
        if kind not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(
                kind,
                flatten,
                unflatten,
                serialized_type_name=f"{kind.__module__}.{kind.__name__}",
                flatten_with_keys_fn=flatten_with_keys,
            )


def argument_of(model: Any) -> str:
    """The name of the argument that takes a model's cache; the result has the new cache under the same name."""
    takes = inspect.signature(model.forward).parameters
    for name in _ARGUMENTS:
        if name in takes:
            return name
    raise UsageError(f"{type(model).__name__} takes no cache of transformers, which text generation hands on")


def renamed(argument: str) -> str:
    """The name of an argument in functions that stand for transformers' own: a cache is ``cache``, as from 5.24 on."""
    return "cache" if argument in _ARGUMENTS else argument


def _check_registration(kind: type) -> None:
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is not None and node.flatten_fn is not flatten:
        raise UsageError(
            f"{kind.__name__} is registered with torch's pytree in another form, by {node.flatten_fn.__module__}; cache_shapes "
            "describes the one of onnxplug-transformers",
            hint="Export in a process in which transformers' own exporter has not run.",
        )


def flatten(cache: Any) -> tuple[list[Any], str]:
    """The tensors of a cache, and everything else about it as JSON."""
    pairs, context = _take_apart(cache)
    return [tensor for _, tensor in pairs], json.dumps(context)


def flatten_with_keys(cache: Any) -> tuple[list[Any], str]:
    """As :func:`flatten`, each tensor with the name that an input of the graph gets from it."""
    pairs, context = _take_apart(cache)
    return [(pytree.MappingKey(name), tensor) for name, tensor in pairs], json.dumps(context)


def unflatten(values: Iterable[Any], context: str) -> Any:
    """The cache again."""
    left = list(values)
    cache = _put_together(json.loads(context), left)
    if left:
        raise ValueError(f"{len(left)} tensors more than the cache has")
    return cache


def shapes(cache: Any, batch: str, past: str, source: str) -> list[Any]:
    """See :func:`onnxplug_transformers.cache_shapes`."""
    if isinstance(cache, cache_utils.EncoderDecoderCache):
        return [
            *shapes(cache.self_attention_cache, batch, past, source),
            *shapes(cache.cross_attention_cache, batch, source, source),
        ]
    _check_registration(type(cache))
    _take_apart(cache)  # refuses caches that are not supported
    axes: list[Any] = []
    for layer in cache.layers:
        for field, _ in _tensors(layer):
            if field == "cumulative_length":
                axes.append(None)
            elif field in _STATES or isinstance(layer, cache_utils.StaticLayer):
                axes.append({0: batch})
            elif isinstance(layer, _Sliding):
                axes.append({0: batch, 2: f"min({past}, {layer.sliding_window - 1})"})
            else:
                axes.append({0: batch, 2: past})
    return [*axes, past] if _has_own_length(cache) else axes


def names(cache: Any, prefix: str) -> list[str]:
    """See :func:`onnxplug_transformers.cache_names`."""
    paths = []
    for name, _ in _take_apart(cache)[0]:
        half, _, rest = name.partition("_") if isinstance(cache, cache_utils.EncoderDecoderCache) else ("", "", name)
        kind, *numbers = rest.split("_")
        layer = numbers[:1]
        kind = f"{kind}_state" if kind in _STATES.values() else kind  # as onnxruntime-genai names it
        parts = [*layer, *([_HALVES[half]] if half else []), kind, *numbers[1:]]
        paths.append(".".join([prefix, *parts]))
    return paths


def emptied(cache: Any) -> Any:
    """See :func:`onnxplug_transformers.empty_cache`."""
    pairs, context = _take_apart(cache)
    return unflatten([_emptied(name, tensor, context) for name, tensor in pairs], json.dumps(context))


def _emptied(name: str, tensor: Any, context: dict[str, Any]) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return 0
    half = context["halves"][name.startswith("cross_")] if "halves" in context else context
    grows = not half["static"] and name.removeprefix("self_").removeprefix("cross_").startswith(("key", "value"))
    return tensor[:, :, :0].clone() if grows else torch.zeros_like(tensor)


def mark_merged(cache: Any) -> Any:
    """See :func:`onnxplug_transformers.merged_cache`."""
    if not isinstance(cache, cache_utils.EncoderDecoderCache):
        raise TypeError(f"merged_cache takes an EncoderDecoderCache, got {type(cache).__name__}")
    cache.is_updated = dict.fromkeys(range(len(cache.cross_attention_cache.layers)), False)
    return cache


# -- taking apart ------------------------------------------------------------------------------------------------------


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
    layers: list[dict[str, Any]] = []
    for index, layer in enumerate(cache.layers):
        _check(cache, index, layer)
        for field, state in _tensors(layer):
            number = f"_{state}" if state else ""
            pairs.append((f"{(_NAMES | _STATES)[field]}_{index}{number}", _tensor(layer, field, state)))
        layers.append(_about(layer))
    context: dict[str, Any] = {"static": isinstance(cache, cache_utils.StaticCache), "layers": layers}
    if _has_own_length(cache):
        context["length"] = True
        pairs.append(("length", _seen(_windows(cache)[0])))
    return pairs, context


def _tensors(layer: Any) -> Iterator[tuple[str, int]]:
    """The fields of a layer that have tensors, each with the number of its state."""
    if isinstance(layer, _Linear):
        for index in range(layer.number_of_states):
            if layer.is_conv_states_initialized[index]:
                yield "conv_states", index
            if layer.is_recurrent_states_initialized[index]:
                yield "recurrent_states", index
    if getattr(layer, "is_initialized", False):
        for field in _FIELDS[type(layer)]:
            yield field, 0


def _tensor(layer: Any, field: str, state: int) -> Any:
    value = getattr(layer, field)
    return value[state] if field in _STATES else value


def _about(layer: Any) -> dict[str, Any]:
    """The class and the settings of a layer, without its tensors."""
    about: dict[str, Any] = {"kind": type(layer).__name__, "filled": bool(getattr(layer, "is_initialized", False))}
    if isinstance(layer, cache_utils.StaticLayer):
        about["max"] = layer.max_cache_len
    if isinstance(layer, _Sliding | _StaticSliding):
        about["window"] = layer.sliding_window if isinstance(layer, _Sliding) else layer.max_cache_len
    if isinstance(layer, _Linear):
        about["states"] = [
            [
                layer.is_conv_states_initialized[index],
                layer.is_recurrent_states_initialized[index],
                layer.has_previous_state[index],
                layer.conv_kernel_size[index],
            ]
            for index in range(layer.number_of_states)
        ]
    return about


def _check(cache: Any, index: int, layer: Any) -> None:
    """Refuses a layer whose state is not in its tensors."""
    if type(layer) not in _FIELDS:
        raise TypeError(
            f"layer {index} of the {type(cache).__name__} has the class {type(layer).__name__}, whose state is not in its "
            f"tensors alone. onnxplug-transformers supports {', '.join(_KINDS)}"
        )
    if getattr(layer, "record_past", False):
        raise TypeError(f"layer {index} of the {type(cache).__name__} records its past, for assisted decoding")


def _windows(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, _Sliding | _StaticSliding) and layer.is_initialized]


def _seen(window: Any) -> Any:
    """How many tokens a window has seen."""
    return window.cumulative_length if isinstance(window, _Sliding) else window.cumulative_length_int


def _whole(cache: Any) -> Any:
    """A layer that keeps all tokens; ``None`` where there is none."""
    for layer in cache.layers:
        whole = isinstance(layer, cache_utils.DynamicLayer) and not isinstance(layer, _Sliding)
        if whole and layer.is_initialized:
            return layer
    return None


def _has_own_length(cache: Any) -> bool:
    """Whether the number of tokens seen is in no tensor."""
    windows, whole = _windows(cache), _whole(cache)
    seen = [_seen(layer) for layer in windows]
    if whole is not None and isinstance(whole.keys, torch.Tensor):
        seen.append(whole.keys.shape[-2])
    if all(isinstance(number, int) for number in seen) and len(set(seen)) > 1:
        raise TypeError(f"the layers of the {type(cache).__name__} have seen {sorted(set(seen))} tokens")
    return bool(windows) and whole is None


# -- putting together --------------------------------------------------------------------------------------------------


def _put_together(context: dict[str, Any], values: list[Any]) -> Any:
    if "halves" in context:
        own, cross = (_put_together(half, values) for half in context["halves"])
        both = cache_utils.EncoderDecoderCache.__new__(cache_utils.EncoderDecoderCache)
        both.self_attention_cache, both.cross_attention_cache = own, cross
        # Not read off the sizes, as in the constructor: they may be symbolic.
        both.is_updated = {index: index in context["updated"] for index in range(len(cross.layers))}
        return both
    if context["static"]:
        cache: Any = cache_utils.StaticCache.__new__(cache_utils.StaticCache)
        cache_utils.Cache.__init__(cache, layers=[])
    else:
        cache = cache_utils.DynamicCache()
    for about in context["layers"]:
        layer = _made(about)
        _fill(layer, about, values)
        cache.layers.append(layer)
    windows = _windows(cache)
    if windows:
        length = values.pop(0) if context.get("length") else _length_of(_whole(cache).keys)
        _check_length(length)
        for layer in windows:
            _set_seen(layer, length)
    return cache


def _set_seen(window: Any, length: Any) -> None:
    if isinstance(window, _Sliding):
        window.cumulative_length = length
        return
    window.cumulative_length_int = length
    if isinstance(length, int):  # a number: not while a model is captured, where nothing reads the tensor
        window.cumulative_length = torch.tensor(min(length, window.max_cache_len), device=window.device)


def _made(about: dict[str, Any]) -> Any:
    kind = _KINDS[about["kind"]]
    arguments: dict[str, Any] = {}
    if "max" in about:
        arguments["max_cache_len"] = about["max"]
    if "window" in about:
        arguments["sliding_window"] = about["window"]
    if "states" in about:
        arguments["number_of_states"] = len(about["states"])
    return kind(**arguments)


def _fill(layer: Any, about: dict[str, Any], values: list[Any]) -> None:
    for index, (conv, recurrent, previous, size) in enumerate(about.get("states", ())):
        layer.has_previous_state[index], layer.conv_kernel_size[index] = previous, size
        for there, field in ((conv, "conv_states"), (recurrent, "recurrent_states")):
            if there:
                getattr(layer, field)[index] = values.pop(0)
                getattr(layer, f"is_{field}_initialized")[index] = True
                _place(layer, getattr(layer, field)[index])
    if not about["filled"]:
        return
    for field in _FIELDS[type(layer)]:
        setattr(layer, field, values.pop(0))
    layer.is_initialized = True
    _place(layer, layer.keys)
    is_static = isinstance(layer, cache_utils.StaticLayer)
    if is_static and isinstance(layer.keys, torch.Tensor):
        layer.batch_size, layer.num_heads = layer.keys.shape[:2]
        layer.k_head_dim, layer.v_head_dim = layer.keys.shape[-1], layer.values.shape[-1]


def _place(layer: Any, tensor: Any) -> None:
    if isinstance(tensor, torch.Tensor):  # pytree maps over other leaves too: names, specifications
        layer.dtype, layer.device = tensor.dtype, tensor.device


def _length_of(keys: Any) -> Any:
    return keys.shape[-2] if isinstance(keys, torch.Tensor) else 0


def _check_length(length: Any) -> None:
    """Refuses a fixed number of tokens seen: the graph would be wrong, without a warning, for every other number."""
    if type(length) is int and torch.compiler.is_exporting():
        raise TypeError(
            "the number of tokens that the sliding windows of a cache have seen is fixed by the export. Make it dynamic: "
            "dynamic_shapes={'past_key_values': cache_shapes(past_key_values)}"
        )
