"""Text generation in one file: a tokenizer, a loop over a decoder's steps that takes the best tokens, a detokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from onnxplug import UsageError, string_tensor
from onnxplug_transformers.decoders import Decoder, DecoderExample, fused_cases_of, padded_prompt_of
from onnxplug_transformers.merged import move_nodes
from onnxplug_transformers.processors import check_extensions
from onnxplug_transformers.tasks import Part

TEXTS = ("The cat sleeps on the sofa.", "", "The dog")
COUNT, RESULT = "max_new_tokens", "generated_text"
#: Settings of generation that change the best token, with their values that do not.
_CHANGING: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "guidance_scale": (1.0,),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), (0,)),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), ([], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("stop_strings", "watermarking_config", "dola_layers"), ()),
    "token_healing": (False,),
}
#: Inputs of a step to its results that are these inputs of the next step.
_NEXT = {
    "input_ids": "next_ids",
    "attention_mask": "next_mask",
    "position_ids": "next_positions",
    "tokens": "next_tokens",
    "unfinished": "still_unfinished",
}


class Prompt(nn.Module):
    """Texts to the inputs of the first step; padding is on the left, as in ``generate``.

    Args:
        tokenizer: A tokenizer of transformers.
        example: The example of the decoder.
    """

    def __init__(self, tokenizer: Any, example: DecoderExample) -> None:
        from onnxplug_extensions import Tokenizer

        super().__init__()
        special = [tokenizer.pad_token_id, *tokenizer.all_special_ids]
        self._padding = next((token for token in special if token is not None), None)
        if self._padding is None:
            raise UsageError("the tokenizer has no special token, of which there must be one for padding")
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        self.tokenizer = Tokenizer(tokenizer)
        self._positions = "position_ids" in example.kwargs
        self._cache: tuple[Any, ...] = (example.heads, 0, example.head_size)
        self._dtype = example.kwargs["past_key_values"].layers[0].keys.dtype

    def forward(self, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        """The first step's inputs by name, ``past`` for each tensor of its cache, and ``going``: if any text goes on.

        A text without tokens is finished.
        """
        inputs = self.tokenizer(texts)
        ids, lengths = inputs["input_ids"], inputs["attention_mask"].sum(1, keepdim=True)
        places = torch.arange(ids.shape[1]) - ids.shape[1] + lengths
        shown, places = places >= 0, places.clamp(min=0)
        tokens = ids.gather(1, places).masked_fill(~shown, self._padding)
        unfinished = lengths[:, 0] > 0
        results = {"going": unfinished.any(), "tokens": tokens, "attention_mask": shown.long()}
        if self._positions:
            results["position_ids"] = places
        past = torch.zeros(ids.shape[0], *self._cache, dtype=self._dtype)
        return {**results, "unfinished": unfinished, "past": past}


class Step(Part):
    """A step of a decoder, and the choice of the best tokens, as by ``generate`` without sampling.

    Args:
        decoder: The decoder.
        ends: Tokens that end a text.
        padding: The token that follows them.
    """

    def __init__(self, decoder: Decoder, ends: Sequence[int], padding: int) -> None:
        super().__init__(decoder)
        self._ends, self._padding = list(ends), padding

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: Any,
        tokens: torch.Tensor,
        unfinished: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> dict[str, Any]:
        """One step.

        Args:
            input_ids, attention_mask, past_key_values, position_ids: As of the decoder.
            tokens: [batch, past + sequence], the text up to here.
            unfinished: bool [batch], the rows that go on.

        Returns:
            ``going``, whether any row goes on, and the inputs of the next step.
        """
        positions = {} if position_ids is None else {"position_ids": position_ids}
        result = self._model(input_ids, attention_mask, past_key_values, **positions)
        best = torch.where(unfinished, result["logits"][:, -1].argmax(-1), self._padding)
        for end in self._ends:
            unfinished = unfinished & (best != end)
        best = best[:, None]
        return {
            "going": unfinished.any(),
            "next_ids": best,
            "next_mask": torch.cat([attention_mask, torch.ones_like(best)], 1),
            **({} if position_ids is None else {"next_positions": position_ids[:, -1:] + 1}),
            "past_key_values": result["past_key_values"],
            "next_tokens": torch.cat([tokens, best], 1),
            "still_unfinished": unfinished,
        }


class Text(nn.Module):
    """Tokens to text, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from onnxplug_extensions import Detokenizer

        super().__init__()
        self.detokenizer = Detokenizer(tokenizer)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """The texts."""
        return {RESULT: self.detokenizer(tokens)}


def parts_of(
    model: Any, decoder: Decoder, example: DecoderExample, folder: Path
) -> tuple[list[tuple[nn.Module, list[dict[str, Any]], dict[str, Any]]], tuple[str, ...]]:
    """The prompt, the step and the text: modules, inputs to compare them on, and keyword arguments of ``to_onnx``; and notes.

    Args:
        model: The causal language model of transformers.
        decoder, example: Its step.
        folder: The folder of the tokenizer.

    Raises:
        UsageError: onnxplug-extensions is missing or has no such tokenizer, or the settings of generation change the
            best token.
    """
    check_extensions()
    from transformers import AutoTokenizer

    settings = model.generation_config
    notes = _check(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = settings.eos_token_id
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    padding = settings.pad_token_id if settings.pad_token_id is not None else ends[0] if ends else 0
    texts = {"texts": string_tensor(TEXTS)}
    prompt = {"kwargs": texts, "dynamic_shapes": {"texts": {0: "texts"}}}
    prompts = [texts, {"texts": string_tensor(TEXTS[::-1][:2])}]
    compared = fused_cases_of(example) if decoder.fused else [example.kwargs, padded_prompt_of(example)]
    cases = [_case(kwargs, ends) for kwargs in compared]
    kinds = {"tokens": example.dynamic_shapes["attention_mask"], "unfinished": {0: "batch"}}
    step = {
        "kwargs": _case(example.kwargs, ends),
        "dynamic_shapes": {**example.dynamic_shapes, **kinds},
        "input_names": [*example.input_names, "tokens", "unfinished"],
        "present_names": True,
    }
    tokens = [{"tokens": kwargs["tokens"]} for kwargs in cases]
    text = {"kwargs": tokens[0], "dynamic_shapes": {"tokens": {0: "texts", 1: "length"}}}
    return [
        (Prompt(tokenizer, example).eval(), prompts, prompt),
        (Step(decoder, ends, padding).eval(), cases, step),
        (Text(tokenizer).eval(), tokens, text),
    ], notes


def _case(kwargs: Mapping[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    """Inputs of a step, whose first row is finished."""
    mask = kwargs["attention_mask"]
    tokens = torch.cat([torch.full_like(mask, (ends or [0])[0]), kwargs["input_ids"]], 1)[:, -mask.shape[1] :]
    return {**kwargs, "tokens": tokens, "unfinished": torch.arange(len(mask)) > 0}


def _check(settings: Any) -> tuple[str, ...]:
    """Checks that settings of generation do not change the best token; returns notes on settings that are ignored.

    Raises:
        UsageError: A setting changes it.
    """
    for name, without in _CHANGING.items():
        value = getattr(settings, name, None)
        if value is not None and value not in without:
            raise UsageError(
                f"--with-processor takes the best token of each step, and the settings of generation have {name}: {value!r}",
                hint="Take it out of generation_config.json, or export without --with-processor.",
            )
    asked = ["do_sample"] if settings.do_sample else []
    asked += [f"num_beams {settings.num_beams}"] if (settings.num_beams or 1) > 1 else []
    return (f"each step takes the best token, and not {' or '.join(asked)}",) if asked else ()


def join(prompt: ir.Model, step: ir.Model, text: ir.Model) -> None:
    """Puts a step into a loop, in place, with the prompt in front and the text behind.

    Args:
        prompt: From ``texts`` to the inputs of the first step.
        step: From the inputs of a step to the inputs of the next step.
        text: From tokens to texts.
    """
    graph = step.graph
    given, made = list(graph.inputs), {str(value.name): value for value in graph.outputs}
    names = [str(value.name) for value in given]
    first, outputs = {str(value.name): value for value in prompt.graph.outputs}, list(text.graph.outputs)
    (texts,), (tokens,) = prompt.graph.inputs, text.graph.inputs
    count = ir.Value(name=COUNT, shape=ir.Shape([]), type=ir.TensorType(ir.DataType.INT64))
    turn, goes_on = (
        ir.Value(name=name, shape=ir.Shape([]), type=ir.TensorType(dtype))
        for name, dtype in (("turn", ir.DataType.INT64), ("goes_on", ir.DataType.BOOL))
    )
    for values in (graph.inputs, graph.outputs, prompt.graph.inputs, text.graph.inputs):
        values.clear()
    nodes = list(graph)
    graph.remove(nodes)
    carried = [made[_NEXT.get(name, name.replace("past_key_values.", "present."))] for name in names]
    body = ir.Graph([turn, goes_on, *given], [made["going"], *carried], nodes=nodes, name="step")
    starts = {**first, "input_ids": first["tokens"]}
    results = [ir.Value(name=f"last.{value.name}", type=value.type) for value in given]
    loop = ir.Node(
        "",
        "Loop",
        [count, first["going"], *(starts.get(name, first["past"]) for name in names)],
        [ir.AttrGraph("body", body)],
        outputs=results,
        name="generate",
    )
    tokens.replace_all_uses_with(results[names.index("tokens")])
    graph.inputs.extend([texts, count])
    graph.extend([*move_nodes(prompt, step, "prompt"), loop, *move_nodes(text, step, "text")])
    graph.outputs.extend(outputs)
    for value in outputs:
        value.name = str(value.name).removeprefix("text.")
