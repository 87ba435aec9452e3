"""Sliding windows, linear attention and merged decoders: one graph, token by token, against transformers' own text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from onnxplug.torch_private import pytree

pytestmark = pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")

#: Tolerances that are looser than torch.testing's, with their reasons.
LOOSER = {"steps": ({"rtol": 1e-3, "atol": 1e-4}, "a state is handed on from step to step, each of whole layers")}

WINDOW = 6
LATER = [pytest.param(name, marks=pytest.mark.long) for name in ("gpt_oss", "qwen2", "qwen3_windows")]


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 100, shape)


def with_past(model: nn.Module, seen: int, **options: Any) -> Any:
    from onnxplug_transformers import cache_shapes

    with torch.no_grad():
        past = model(input_ids=ids(2, seen), use_cache=True).past_key_values
    mask = torch.ones(2, seen + 3, dtype=torch.long)
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "attention_mask": mask, "past_key_values": past},
        dynamic_shapes={
            "input_ids": {0: "batch", 1: "sequence"},
            "attention_mask": {0: "batch", 1: "past + sequence"},
            "past_key_values": cache_shapes(past),
        },
        **options,
    )
    return program, past


def continued(leaves: Any, past: Any) -> Any:
    """The cache of a run's outputs."""
    values = [int(x) if isinstance(y, int) else x for x, y in zip(leaves, pytree.tree_leaves(past), strict=True)]
    return pytree.tree_unflatten(values, pytree.tree_structure(past))


@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.parametrize(("name", "seen"), [("mistral", 4)])
@pytest.mark.long
def test_text_beyond_the_window(name: str, seen: int, decoder: Any) -> None:
    """From an empty cache, past the window's end, token by token; the example lies on either side of it."""
    check_text(decoder(name), seen)


@pytest.mark.long
@pytest.mark.parametrize("seen", [4, 9])
@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss", "qwen2", "qwen3_windows"])
def test_text_beyond_the_window_of_every_model(name: str, seen: int, decoder: Any) -> None:
    check_text(decoder(name), seen)


def check_text(model: Any, seen: int) -> None:
    from onnxplug_transformers import empty_cache

    program, past = with_past(model, seen)
    assert f"Min({WINDOW - 1}, past)" in {str(size) for value in program.model.graph.inputs for size in value.shape}
    program.verify(seeds=(0, 2))
    prompt = ids(2, 4)
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
    past = empty_cache(past)
    tokens, text = prompt, prompt
    for step in range(9):
        attention = torch.ones_like(text)
        if step in (3, 6):  # hidden tokens within the window, and outside of it
            attention[1, :4] = 0
            given = {"input_ids": tokens, "attention_mask": attention, "past_key_values": past}
            program.verify(args=(), kwargs=copy.deepcopy(given), seeds=())
        logits, *leaves = program(input_ids=tokens, attention_mask=torch.ones_like(text), past_key_values=past)
        past = continued(leaves, past)
        tokens = logits[:, -1:].argmax(-1)
        text = torch.cat([text, tokens], 1)
    assert text.tolist() == expected.tolist()
    assert past.get_seq_length() == 12


@pytest.mark.long
def test_without_a_mask_and_of_any_cache(decoder: Any) -> None:
    """A cache without windows has all tokens, and the windows are in the mask."""
    from onnxplug_transformers import cache_shapes
    from transformers import DynamicCache

    model = decoder("mistral")
    with torch.no_grad():
        past = model(input_ids=ids(2, 9), past_key_values=DynamicCache()).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "past_key_values": past},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}, "past_key_values": cache_shapes(past)},
    )
    program.verify(seeds=(0, 2))
    assert [str(value.shape) for value in program.model.graph.outputs[1:]] == ["[batch,2,past + sequence,16]"] * 4


@pytest.mark.long
def test_names_that_decoders_have(decoder: Any) -> None:
    from onnxplug_transformers import cache_names, cache_shapes
    from onnxplug_transformers.caches import argument_of

    model = decoder("gemma3")
    cache = argument_of(model)
    with torch.no_grad():
        past = model(input_ids=ids(2, 9))[cache]
    names = [f"past_key_values.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")]
    assert cache_names(past) == names
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), cache: past},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}, cache: cache_shapes(past)},
        input_names=["input_ids", *names],
        present_names=True,
    )
    program.verify(seeds=(2,))
    assert [value.name for value in program.model.graph.inputs] == ["input_ids", *names]
    presents = [name.replace("past_key_values", "present") for name in names]
    assert [value.name for value in program.model.graph.outputs] == ["logits", *presents]


@pytest.mark.long
@pytest.mark.parametrize("name", ["mistral", pytest.param("gemma3", marks=pytest.mark.long)])
def test_static_cache_beyond_the_window(name: str, decoder: Any) -> None:
    """One graph for windows that are filled in part, full, and filled in a call: the state is transformers' own each time."""
    from onnxplug_transformers import cache_shapes
    from transformers import StaticCache

    model = decoder(name)

    def cache(batch: int) -> Any:
        made = StaticCache(config=model.config, max_cache_len=24)
        made.early_initialization(batch, 2, 16, torch.float32, torch.device("cpu"))
        return made

    past = cache(2)
    with torch.no_grad():
        past = model(input_ids=ids(2, 4), past_key_values=past).past_key_values
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, 3), "past_key_values": copy.deepcopy(past)},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}, "past_key_values": cache_shapes(past)},
        mutations="ignore",
    )
    for batch, steps in ((2, (4, 1, 1, 1, 1, 1)), (1, (9, 1, 2)), (3, (2, 3, 5, 1))):
        past = cache(batch)
        for step in steps:
            given = {"input_ids": ids(batch, step), "past_key_values": past}
            program.verify(args=(), kwargs=copy.deepcopy(given), seeds=())
            past = continued(program(**copy.deepcopy(given))[1:], past)
        assert past.get_seq_length() == sum(steps)


@pytest.mark.long
def test_prefill_fills_the_window(decoder: Any) -> None:
    model = decoder("mistral")
    program = onnxplug.to_onnx(
        model, kwargs={"input_ids": ids(2, 4)}, dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}}
    )
    report = program.verify(seeds=range(4))
    assert max(case.sizes["sequence"] for case in report.cases) > WINDOW
    with torch.no_grad():
        past = model(input_ids=ids(1, 9)).past_key_values
    assert [x.shape for x in program(input_ids=ids(1, 9))[1:-1]] == [x.shape for x in pytree.tree_leaves(past)[:-1]]
    assert int(program(input_ids=ids(1, 9))[-1]) == 9


def test_the_number_of_tokens_seen_is_not_fixed(decoder: Any) -> None:
    """A fixed number would be wrong without a warning: every full window has the same size."""
    model = decoder("mistral")
    with torch.no_grad():
        past = model(input_ids=ids(2, 9)).past_key_values
    with pytest.raises(onnxplug.CaptureError, match="tokens that the sliding windows of a cache have seen is fixed"):
        onnxplug.to_onnx(model, kwargs={"input_ids": ids(2, 1), "past_key_values": past})


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mamba", 1),
        ("lfm2", 3),
        *(pytest.param(n, c, marks=pytest.mark.long) for n, c in (("qwen3_next", 1), ("mamba2", 3))),
    ],
)
@pytest.mark.long
def test_linear_attention(name: str, count: int, decoder: Any) -> None:
    """Steps after a prompt, the states handed on: of one token, or of any number if the model goes on from a state."""
    from onnxplug_transformers import cache_shapes

    model = decoder(name)
    cache = "cache_params" if "mamba" in name else "past_key_values"
    with torch.no_grad():
        past = model(input_ids=ids(2, 5), use_cache=True)[cache]
    tokens = {0: "batch"} if count == 1 else {0: "batch", 1: "sequence"}
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": ids(2, count), cache: past, "use_cache": True},
        dynamic_shapes={"input_ids": tokens, cache: cache_shapes(past), "use_cache": None},
    )
    with torch.no_grad():
        past = model(input_ids=ids(3, 7), use_cache=True)[cache]
    for step in (count, 1, 1 if count == 1 else 5):
        given = {"input_ids": ids(3, step), cache: past, "use_cache": True}
        program.verify(args=(), kwargs=copy.deepcopy(given), seeds=())
        leaves = program(**copy.deepcopy(given))[1:]
        past = continued(leaves[: len(pytree.tree_leaves(past))], past)


@pytest.mark.filterwarnings("error:the exported model is right only where")
@pytest.mark.parametrize("name", ["mamba", *(pytest.param(n, marks=pytest.mark.long) for n in ("lfm2", "mamba2"))])
def test_prompts_shorter_than_a_convolution(name: str, decoder: Any) -> None:
    """The state of a convolution begins with zeros where the prompt has fewer tokens than its kernel."""
    program = onnxplug.to_onnx(
        decoder(name),
        kwargs={"input_ids": ids(2, 6), "use_cache": True},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}, "use_cache": None},
    )
    for length in (1, 2, 3, 9):
        program.verify(kwargs={"input_ids": ids(3, length), "use_cache": True}, seeds=())


@pytest.mark.parametrize("name", ["t5", *(pytest.param(n, marks=pytest.mark.long) for n in ("bart", "whisper"))])
def test_merged_decoder(name: str, decoder: Any) -> None:
    """One graph for the first step and all later steps, against a model without a cache."""
    from onnxplug_transformers import cache_shapes, empty_cache, merged_cache
    from transformers.modeling_outputs import BaseModelOutput

    model = decoder(name)

    def states(batch: int, length: int) -> Any:
        return BaseModelOutput(torch.randn(batch, length, model.config.d_model))

    def prefix(length: int) -> Any:
        with torch.no_grad():
            given = {"encoder_outputs": states(2, length), "decoder_input_ids": ids(2, 4), "use_cache": True}
            return merged_cache(model(**given).past_key_values)

    past = prefix(5)
    program = onnxplug.to_onnx(
        model,
        kwargs={
            "encoder_outputs": states(2, 6),
            "decoder_input_ids": ids(2, 3),
            "past_key_values": past,
            "use_cache": True,
        },
        dynamic_shapes={
            "encoder_outputs": [{0: "batch", 1: "source"}],
            "decoder_input_ids": {0: "batch", 1: "target"},
            "past_key_values": cache_shapes(past, source="kept"),
            "use_cache": None,
        },
    )
    source = states(3, 7)
    leaves, spec = pytree.tree_flatten(empty_cache(past))
    past = pytree.tree_unflatten([leaf.new_zeros(3, *leaf.shape[1:]) for leaf in leaves], spec)
    text = torch.full((3, 1), 2)
    for step in range(6):
        with torch.no_grad():  # all of the text again, without a cache
            whole = model(encoder_outputs=copy.deepcopy(source), decoder_input_ids=text, use_cache=False).logits
        given = source if step == 0 else states(3, 0)
        logits, *leaves = program(
            encoder_outputs=given, decoder_input_ids=text[:, -1:], past_key_values=past, use_cache=True
        )
        past = pytree.tree_unflatten(leaves[: spec.num_leaves], spec)
        torch.testing.assert_close(logits[:, -1], whole[:, -1], **LOOSER["steps"][0])
        text = torch.cat([text, whole[:, -1:].argmax(-1) if step % 2 else ids(3, 1)], 1)
