"""onnxplug-transformers: decoders with caches, step by step against transformers."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import onnxplug
from tests.support.contrib import plugged
from tests.support.zoo import ZOO

REGISTRY = plugged("onnxplug-transformers")
DECODERS = ("llama", "qwen3", "gpt2")


@pytest.fixture(autouse=True)
def _seeded(seeded: None) -> None:
    pass


def decoder(name: str) -> nn.Module:
    model = ZOO[name].module()
    model.config.use_cache = True
    return model


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape)


def mask(batch: int, total: int) -> torch.Tensor:
    """Rows padded on the left to different lengths, the first one not at all."""
    starts = torch.randint(0, max(total // 2, 1), (batch, 1))
    starts[0] = 0
    return (torch.arange(total)[None] >= starts).long()


def compare(program: Any, model: nn.Module, **inputs: Any) -> Any:
    """Runs both on copies of the inputs, compares every output; returns transformers' own."""
    got = program(**copy.deepcopy(inputs))
    with torch.no_grad():
        expected = model(**copy.deepcopy(inputs))
    leaves = [x for x in _pytree.tree_leaves(expected) if isinstance(x, torch.Tensor)]
    assert len(got) >= len(leaves)
    for mine, theirs in zip(got, leaves, strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    return expected


TEXT = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "total"}}


@pytest.mark.parametrize("name", DECODERS)
def test_prefill_returns_the_cache(name: str) -> None:
    model = decoder(name)
    shapes = {"input_ids": {0: "batch", 1: "sequence"}, "attention_mask": {0: "batch", 1: "sequence"}}
    inputs = {"input_ids": ids(2, 5), "attention_mask": mask(2, 5)}
    program = onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes, registry=REGISTRY)
    for batch, length in ((2, 5), (1, 1), (3, 9)):
        compare(program, model, input_ids=ids(batch, length), attention_mask=mask(batch, length))
    assert len(program.model.graph.outputs) == 5


def with_past(model: nn.Module, opset: int = 21) -> Any:
    from onnxplug_transformers import cache_shapes

    with torch.no_grad():
        past = model(input_ids=ids(2, 4), use_cache=True).past_key_values
    inputs = {"input_ids": ids(2, 3), "attention_mask": mask(2, 7), "past_key_values": past}
    shapes = {**TEXT, "past_key_values": cache_shapes(past)}
    return onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes, registry=REGISTRY, opset_version=opset)


def empty(model: nn.Module, batch: int) -> Any:
    """A cache that has seen nothing, its tensors of length 0."""
    with torch.no_grad():
        cache = model(input_ids=ids(batch, 1), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :0], layer.values[:, :, :0]
    return cache


@pytest.mark.parametrize("name", DECODERS)
def test_one_graph_prefills_and_decodes(name: str) -> None:
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
def test_decoding_at_other_opsets(opset: int) -> None:
    model = decoder("llama")
    program = with_past(model, opset)
    with torch.no_grad():
        past = model(input_ids=ids(3, 6), use_cache=True).past_key_values
    compare(program, model, input_ids=ids(3, 1), attention_mask=mask(3, 7), past_key_values=past)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("example", [1, 3])
def test_decoding_without_a_mask(name: str, example: int) -> None:
    """One token sees all of the past; attention that is merely causal would show it the first token alone."""
    from onnxplug_transformers import cache_shapes

    model = decoder(name)
    past = empty(model, 2)
    with torch.no_grad():
        past = model(input_ids=ids(2, 4), past_key_values=past).past_key_values
    # A single token is a graph of its own: transformers asks for the length.
    tokens = {0: "batch"} if example == 1 else {0: "batch", 1: "sequence"}
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, example), "past_key_values": past},
        dynamic_shapes={"input_ids": tokens, "past_key_values": cache_shapes(past)},
        registry=REGISTRY,
    )
    for batch, length in ((2, 4), (1, 1), (3, 7)):
        with torch.no_grad():
            past = model(input_ids=ids(batch, length)).past_key_values
        for count in (1,) if example == 1 else (1, 2, 5):
            compare(program, model, input_ids=ids(batch, count), past_key_values=past)


def test_generation_from_the_onnx_model_alone() -> None:
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
        past = _pytree.tree_unflatten(leaves, _pytree.tree_structure(past))
        tokens = logits[:, -1:].argmax(-1)
        text = torch.cat([text, tokens], 1)
    assert text.tolist() == expected.tolist()


def test_static_cache() -> None:
    """Written in place: keys, values and fill come back as outputs."""
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
        registry=REGISTRY,
    )
    for batch in (2, 1, 3):
        past, tokens = cache(batch), ids(batch, 4)
        for step in (1, 1, 2):
            past = compare(program, model, input_ids=tokens, past_key_values=past).past_key_values
            tokens = ids(batch, step)
        assert int(past.layers[0].cumulative_length) == 6


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_encoder_decoder_cache(name: str) -> None:
    """The first step fills both halves; later ones read the encoder's half."""
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
    first = onnxplug.to_onnx(model, kwargs=inputs(2, 6, 3), dynamic_shapes=shapes, registry=REGISTRY)
    past = compare(first, model, **inputs(2, 6, 3)).past_key_values
    cache = cache_shapes(past)
    if fixed:
        cache = [*cache[: len(cache) // 2], *({0: "batch"} for _ in cache[len(cache) // 2 :])]
    later = onnxplug.to_onnx(
        model,
        kwargs=inputs(2, 6, 2, past),
        dynamic_shapes={**shapes, "past_key_values": cache},
        registry=REGISTRY,
    )
    for batch, source, target in ((2, 6, 3), (1, 1, 1), (3, 9, 5)):
        given = inputs(batch, source, target)
        past = compare(first, model, **given).past_key_values
        for count in (1, 1, 2):
            step = {**given, "decoder_input_ids": ids(batch, count), "past_key_values": past}
            past = compare(later, model, **step).past_key_values


def test_round_trip_through_pytree(vision: None) -> None:
    from onnxplug_transformers.caches import register
    from transformers import DynamicCache, EncoderDecoderCache

    register()
    register()
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5), layer)
    both = EncoderDecoderCache(cache, copy.deepcopy(cache))
    for original in (cache, both, EncoderDecoderCache(DynamicCache(), DynamicCache())):
        leaves, spec = _pytree.tree_flatten(original)
        again = _pytree.tree_unflatten(leaves, spec)
        assert type(again) is type(original)
        assert [a is b for a, b in zip(_pytree.tree_leaves(again), leaves, strict=True)] == [True] * len(leaves)
        assert _pytree.tree_structure(again) == spec
        assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec
        assert getattr(again, "is_updated", None) == getattr(original, "is_updated", None)


def test_sliding_windows_are_refused(vision: None) -> None:
    from onnxplug_transformers import cache_shapes
    from transformers import DynamicCache, MistralConfig

    cache = DynamicCache(config=MistralConfig(num_hidden_layers=1, sliding_window=4))
    with pytest.raises(TypeError, match="DynamicSlidingWindowLayer"):
        cache_shapes(cache)


def test_without_transformers_nothing_is_imported() -> None:
    import subprocess

    code = (
        "import sys, torch, onnxplug; sys.path.insert(0, '.')\n"
        "from tests.support.contrib import plugged\n"
        "onnxplug.to_onnx(lambda x: x + 1, (torch.ones(2),), registry=plugged('onnxplug-transformers'))\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


def test_decoding_by_fused_operators() -> None:
    """The cache and ONNX Runtime's own operators in one model."""
    from onnxplug_transformers import cache_shapes

    model = decoder("llama")
    with torch.no_grad():
        past = model(input_ids=ids(2, 4), use_cache=True).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "attention_mask": mask(2, 7), "past_key_values": past},
        dynamic_shapes={**TEXT, "past_key_values": cache_shapes(past)},
        registry=plugged("onnxplug-transformers", "onnxplug-ort"),
        opset_version={"": 21, "com.microsoft": 1},
    )
    operators = program.statistics.operators
    assert {operators.get(n) for n in ("MultiHeadAttention", "RotaryEmbedding")} == {2, 4}
    for batch, length, step in ((2, 4, 3), (1, 1, 1), (3, 7, 2)):
        with torch.no_grad():
            past = model(input_ids=ids(batch, length)).past_key_values
        total = mask(batch, length + step)
        compare(program, model, input_ids=ids(batch, step), attention_mask=total, past_key_values=past)


# -- mixtures of experts -----------------------------------------------------------------------------------------------

_EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 5, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
}


def mixture(name: str, implementation: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small one, its weights large enough for experts to matter."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        use_cache=False,
        **_EXPERTS[name],
    )
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).eval().to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    if implementation is not None:
        model.set_experts_implementation(implementation)
    return model


def experts_program(model: nn.Module, opset: int = 21, **options: Any) -> Any:
    shapes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
    inputs = {"input_ids": ids(2, 5), "attention_mask": mask(2, 5)}
    options = {"registry": REGISTRY, "opset_version": opset, **options}
    return onnxplug.to_onnx(model, kwargs=inputs, dynamic_shapes=shapes, **options)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, None) for name in _EXPERTS), ("Mixtral", "eager"), ("GptOss", "eager"), ("Qwen3Moe", "batched_mm")],
)
def test_mixture_of_experts(name: str, implementation: str | None, vision: None) -> None:
    model = mixture(name, implementation)
    before = model.config._experts_implementation
    program = experts_program(model)
    # Captured in another way than it computes, perhaps; it computes as before.
    assert model.config._experts_implementation == before
    loops = program.statistics.operators.get("Loop", 0)
    assert loops == (0 if implementation == "batched_mm" else 4)
    for batch, length in ((2, 5), (1, 1), (3, 9)):
        compare(program, model, input_ids=ids(batch, length), attention_mask=mask(batch, length))
    # Weights are stored as the products take them.
    for node in program.model.graph.all_nodes():
        assert node.op_type != "Transpose" or node.inputs[0].name not in program.model.graph.initializers


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "opset"), [("GptOss", 18), ("Qwen3Moe", 24)])
def test_mixture_of_experts_at_other_opsets(name: str, opset: int, vision: None) -> None:
    model = mixture(name)
    program = experts_program(model, opset)
    for batch, length in ((2, 5), (1, 1), (3, 8)):
        compare(program, model, input_ids=ids(batch, length), attention_mask=mask(batch, length))


@pytest.mark.filterwarnings("ignore")
def test_the_choice_of_experts_ends_with_the_export(vision: None) -> None:
    from transformers.integrations import moe

    experts_program(mixture("Mixtral", "eager"))
    default = object()
    assert moe.ALL_EXPERTS_FUNCTIONS.get_interface("eager", default) is default
