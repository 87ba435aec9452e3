"""Decoders with caches, step by step against transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.torch_private import pytree

DECODERS = ("llama", "qwen3", "gpt2")


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape)


def mask(batch: int, total: int) -> torch.Tensor:
    """Rows padded on the left to different lengths, the first row not at all."""
    starts = torch.randint(0, max(total // 2, 1), (batch, 1))
    starts[0] = 0
    return (torch.arange(total)[None] >= starts).long()


def compare(program: Any, model: nn.Module, **inputs: Any) -> Any:
    """Compares every output with transformers' own, on copies of the inputs; returns transformers' outputs."""
    program.verify(args=(), kwargs=copy.deepcopy(inputs), seeds=())
    with torch.no_grad():
        return model(**copy.deepcopy(inputs))


TEXT = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "past + sequence"}}


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.long
def test_prefill_returns_the_cache(name: str, decoder: Any) -> None:
    model = decoder(name)
    shapes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}
    inputs = {"input_ids": ids(2, 5), "attention_mask": mask(2, 5)}
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes)
    for batch, length in ((2, 5), (1, 1), (3, 9)):
        compare(program, model, input_ids=ids(batch, length), attention_mask=mask(batch, length))
    assert len(program.model.graph.outputs) == 5


def with_past(model: nn.Module, opset: int = 21) -> Any:
    from onnxplug_transformers import cache_shapes

    with torch.no_grad():
        past = model(input_ids=ids(2, 4), use_cache=True).past_key_values
    inputs = {"input_ids": ids(2, 3), "attention_mask": mask(2, 7), "past_key_values": past}
    shapes = {**TEXT, "past_key_values": cache_shapes(past)}
    return onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes, opset_version=opset)


def empty(model: nn.Module, batch: int) -> Any:
    """A cache that has seen no tokens, its tensors of length 0."""
    with torch.no_grad():
        cache = model(input_ids=ids(batch, 1), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    return cache


@pytest.mark.parametrize("name", DECODERS)
def test_one_graph_prefills_and_decodes(name: str, decoder: Any) -> None:
    """A prompt into an empty cache, then steps of one token and of several, the cache handed on."""
    model = decoder(name)
    program = with_past(model)
    for batch, prompt in ((2, 5), (1, 1), (3, 8)):
        past = empty(model, batch)
        total = mask(batch, prompt)
        tokens = ids(batch, prompt)
        for step in (1, 1, 3, 1):
            result = compare(program, model, input_ids=tokens, attention_mask=total, past_key_values=past)
            past, tokens = result.past_key_values, ids(batch, step)
            total = torch.cat([total, torch.ones(batch, step, dtype=torch.long)], 1)
    names = [value.name for value in program.model.graph.inputs]
    assert names[2:] == [f"past_key_values_{kind}_{i}" for i in range(2) for kind in ("key", "value")]
    assert "past" in str(program.model.graph.inputs[2].shape)


@pytest.mark.parametrize("opset", [17, 23])
@pytest.mark.long
def test_decoding_at_other_opsets(opset: int, decoder: Any) -> None:
    model = decoder("llama")
    program = with_past(model, opset)
    with torch.no_grad():
        past = model(input_ids=ids(3, 6), use_cache=True).past_key_values
    compare(program, model, input_ids=ids(3, 1), attention_mask=mask(3, 7), past_key_values=past)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("example", [1, 3])
@pytest.mark.long
def test_decoding_without_a_mask(name: str, example: int, decoder: Any) -> None:
    """One token sees all of the past; attention that is merely causal would let it see the first token alone."""
    from onnxplug_transformers import cache_shapes

    model = decoder(name)
    past = empty(model, 2)
    with torch.no_grad():
        past = model(input_ids=ids(2, 4), past_key_values=past).past_key_values
    # A single token is a graph of its own: transformers branches on the length.
    tokens = {0: "batch"} if example == 1 else {0: "batch", 1: "sequence"}
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, example), "past_key_values": past},
        dynamic_shapes={"input_ids": tokens, "past_key_values": cache_shapes(past)},
    )
    for batch, length in ((2, 4), (1, 1), (3, 7)):
        with torch.no_grad():
            past = model(input_ids=ids(batch, length)).past_key_values
        for count in (1,) if example == 1 else (1, 2, 5):
            compare(program, model, input_ids=ids(batch, count), past_key_values=past)


@pytest.mark.long
def test_generation_from_the_onnx_model_alone(decoder: Any) -> None:
    """The outputs of one run are the inputs of the next; the text is transformers' own."""
    model = decoder("llama")
    program = with_past(model)
    prompt = ids(2, 4)
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    past = empty(model, 2)
    tokens, text = prompt, prompt
    for _ in range(8):
        logits, *leaves = program(input_ids=tokens, attention_mask=torch.ones_like(text), past_key_values=past)
        past = pytree.tree_unflatten(leaves, pytree.tree_structure(past))
        tokens = logits[:, -1:].argmax(-1)
        text = torch.cat([text, tokens], 1)
    assert text.tolist() == expected.tolist()


@pytest.mark.long
def test_static_cache(decoder: Any) -> None:
    """Written in place: keys, values and length come back as outputs."""
    from onnxplug_transformers import cache_shapes
    from transformers import StaticCache

    model = decoder("llama")

    def cache(batch: int) -> Any:
        made = StaticCache(config=model.config, max_cache_len=12)
        made.early_initialization(batch, 2, 16, torch.float32, torch.device("cpu"))
        return made

    past = cache(2)
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "past_key_values": past},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}, "past_key_values": cache_shapes(past)},
    )
    for batch in (2, 1, 3):
        past, tokens = cache(batch), ids(batch, 4)
        for step in (1, 1, 2):
            past = compare(program, model, input_ids=tokens, past_key_values=past).past_key_values
            tokens = ids(batch, step)
        assert int(past.layers[0].cumulative_length) == 6


@pytest.mark.long
@pytest.mark.parametrize("name", ["t5", pytest.param("whisper", marks=pytest.mark.long)])
def test_encoder_decoder_cache(name: str, decoder: Any) -> None:
    """The first step fills both halves; later steps read the encoder's half."""
    from onnxplug_transformers import cache_shapes
    from transformers.modeling_outputs import BaseModelOutput

    model = decoder(name)
    width = model.config.d_model
    fixed = name == "whisper"  # its encoder's length is the model's own

    def inputs(batch: int, source: int, target: int, past: Any = None) -> dict[str, Any]:
        states = torch.randn(batch, 20 if fixed else source, width)
        given = {"encoder_outputs": BaseModelOutput(states), "decoder_input_ids": ids(batch, target), "use_cache": True}
        return given if past is None else {**given, "past_key_values": past}

    states = [{0: "batch"} if fixed else {0: "batch", 1: "source"}]
    shapes = {"encoder_outputs": states, "decoder_input_ids": {0: "batch", 1: "target"}, "use_cache": None}
    first = onnxplug.to_onnx(model, kwargs=inputs(2, 6, 3), dynamic_shapes=shapes)
    past = compare(first, model, **inputs(2, 6, 3)).past_key_values
    cache = cache_shapes(past)
    if fixed:
        cache = [*cache[: len(cache) // 2], *({0: "batch"} for _ in cache[len(cache) // 2 :])]
    later = onnxplug.to_onnx(
        model,
        kwargs=inputs(2, 6, 2, past),
        dynamic_shapes={**shapes, "past_key_values": cache},
    )
    for batch, source, target in ((2, 6, 3), (1, 1, 1), (3, 9, 5)):
        given = inputs(batch, source, target)
        past = compare(first, model, **given).past_key_values
        for count in (1, 1, 2):
            step = {**given, "decoder_input_ids": ids(batch, count), "past_key_values": past}
            past = compare(later, model, **step).past_key_values


def test_round_trip_through_pytree() -> None:
    from onnxplug_transformers.caches import register
    from transformers import DynamicCache, EncoderDecoderCache

    register()
    register()
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), layer)
    both = EncoderDecoderCache(cache, copy.deepcopy(cache))
    for original in (cache, both, EncoderDecoderCache(DynamicCache(), DynamicCache())):
        leaves, spec = pytree.tree_flatten(original)
        again = pytree.tree_unflatten(leaves, spec)
        assert type(again) is type(original)
        assert [a is b for a, b in zip(pytree.tree_leaves(again), leaves, strict=True)] == [True] * len(leaves)
        assert pytree.tree_structure(again) == spec
        assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
        assert getattr(again, "is_updated", None) == getattr(original, "is_updated", None)


def test_round_trip_of_windows_and_states(decoder: Any) -> None:
    """The context has everything beside the tensors; the number of tokens seen is a layer's length or a number."""
    from onnxplug_transformers import cache_shapes
    from onnxplug_transformers.caches import register

    register()
    for name, field, last in (("mistral", "length", 9), ("gemma3", "value_1", None), ("qwen3_next", "value_1", None)):
        model = decoder(name)
        with torch.no_grad():
            cache = model(input_ids=ids(2, 9), use_cache=True).past_key_values
        leaves, spec = pytree.tree_flatten(cache)
        paths = [path[-1].key for path, _ in pytree.tree_flatten_with_path(cache)[0]]
        assert paths[-1] == field
        assert len(cache_shapes(cache)) == len(leaves)
        assert last is None or leaves[-1] == last
        again = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
        assert [type(layer) for layer in again.layers] == [type(layer) for layer in cache.layers]
        tokens = ids(2, 1)
        with torch.no_grad():
            results = [model(input_ids=tokens, past_key_values=copy.deepcopy(past)).logits for past in (cache, again)]
        assert torch.equal(*results)


def test_an_empty_cache_has_seen_nothing(decoder: Any) -> None:
    from onnxplug_transformers import empty_cache

    for name in ("mistral", "gemma3", "qwen3_next", "t5"):
        model = decoder(name)
        given = {"input_ids": ids(2, 9)} | ({"decoder_input_ids": ids(2, 3)} if name == "t5" else {})
        with torch.no_grad():
            cache = model(**given, use_cache=True).past_key_values
        before = [leaf.clone() for leaf in pytree.tree_leaves(cache) if isinstance(leaf, torch.Tensor)]
        nothing = empty_cache(cache)
        assert nothing.get_seq_length() == 0
        assert all(not bool(leaf.any()) for leaf in pytree.tree_leaves(nothing) if isinstance(leaf, torch.Tensor))
        after = [leaf for leaf in pytree.tree_leaves(cache) if isinstance(leaf, torch.Tensor)]
        assert all(map(torch.equal, before, after))


def test_names_of_other_caches(decoder: Any) -> None:
    from onnxplug_transformers import cache_names

    model = decoder("t5")
    with torch.no_grad():
        past = model(input_ids=ids(2, 5), decoder_input_ids=ids(2, 3), use_cache=True).past_key_values
    halves = [f"past.{layer}.decoder.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert cache_names(past, "past") == [*halves, *(name.replace("decoder", "encoder") for name in halves)]
    with torch.no_grad():
        states = decoder("mamba")(input_ids=ids(2, 5), use_cache=True).cache_params
        windows = decoder("mistral")(input_ids=ids(2, 5)).past_key_values
    assert cache_names(states, "past")[:3] == ["past.0.conv_state", "past.0.recurrent_state", "past.1.conv_state"]
    assert cache_names(windows)[-1] == "past_key_values.length"


def _recording(cache: Any) -> Any:
    cache.activate_past_recording()
    return cache


def _uneven(cache: Any) -> Any:
    cache.layers[0].cumulative_length += 1
    return cache


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda _: object(), "does not support the cache class object"),
        (_recording, "records its past"),
        (_uneven, r"have seen \[4, 5\] tokens"),
    ],
)
def test_caches_that_are_refused(change: Any, words: str) -> None:
    from onnxplug_transformers import cache_shapes
    from transformers import DynamicCache, MistralConfig

    cache = DynamicCache(config=MistralConfig(num_hidden_layers=2, sliding_window=6))
    for layer in range(2):
        cache.update(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), layer)
    cache_shapes(cache)
    with pytest.raises(TypeError, match=words):
        cache_shapes(change(cache))


def test_layers_and_caches_of_another_kind_are_refused() -> None:
    from onnxplug_transformers import cache_shapes, merged_cache
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicIndexedLayer

    cache = DynamicCache()
    cache.layers.append(DynamicIndexedLayer())
    with pytest.raises(TypeError, match="class DynamicIndexedLayer, whose state is not in its tensors alone"):
        cache_shapes(cache)
    with pytest.raises(TypeError, match="takes an EncoderDecoderCache"):
        merged_cache(DynamicCache())


def test_registration_of_other_code_is_named() -> None:
    """As in a process in which transformers' own exporter ran first."""
    from onnxplug_transformers import cache_shapes
    from transformers import DynamicCache

    ours = pytree.SUPPORTED_NODES.pop(DynamicCache, None)
    try:
        pytree.register_pytree_node(DynamicCache, lambda cache: ([], None), lambda values, context: DynamicCache())
        with pytest.raises(onnxplug.UsageError, match=f"registered .* in another form, by {__name__}"):
            cache_shapes(DynamicCache())
    finally:
        pytree._deregister_pytree_node(DynamicCache)
        if ours is not None:
            pytree.SUPPORTED_NODES[DynamicCache] = ours
