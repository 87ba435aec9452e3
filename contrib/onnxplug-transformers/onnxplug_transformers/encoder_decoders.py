"""Encoders and decoders in two files: the encoder's file computes the keys and values of the cross-attention once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache, cache_utils
from transformers.modeling_outputs import BaseModelOutput

from onnxplug import UsageError
from onnxplug_transformers.caches import argument_of
from onnxplug_transformers.rounded import results_of
from onnxplug_transformers.tasks import Part, TaskExample

_SOURCE = "encoder_attention_mask"


class Encoder(Part):
    """The encoder, and the keys and values of its states in each layer of the decoder."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """From the model's inputs to ``states``, a cache of as many layers as the decoder.

        Keys and values are [batch, heads, source, width].
        """
        states = self._model.get_encoder()(**inputs, return_dict=True).last_hidden_state
        mask = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
        return {"states": _projected(self._model, states, **mask)}


class SpeechEncoder(Part):
    """The encoder, with its states as a result too, which onnxruntime-genai asks for."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """From the model's inputs to ``last_hidden_state`` and ``states``, as of ``States`` and ``Encoder``."""
        states = self._model.get_encoder()(**inputs, return_dict=True).last_hidden_state
        return {"last_hidden_state": states, "states": _projected(self._model, states)}


class States(Part):
    """The encoder alone."""

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """From the model's inputs to ``last_hidden_state``, [batch, source, width]."""
        return {"last_hidden_state": self._model.get_encoder()(**inputs, return_dict=True).last_hidden_state}


class Projections(Part):
    """The keys and values of the encoder's states in each layer of the decoder."""

    def forward(self, encoder_hidden_states: torch.Tensor) -> dict[str, Any]:
        """From the states to a cache of as many layers as the decoder: [batch, heads, source, width]."""
        return {"states": _projected(self._model, encoder_hidden_states)}


def _projected(model: Any, states: torch.Tensor, **mask: torch.Tensor) -> Any:
    """The cache of the cross-attention, which the decoder makes of the encoder's states as it reads a token."""
    start = torch.zeros(states.shape[0], 1, dtype=torch.long, device=states.device)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    model(
        encoder_outputs=BaseModelOutput(last_hidden_state=states),
        decoder_input_ids=start,
        use_cache=True,
        **{argument_of(model): cache},
        **mask,
    )
    return cache.cross_attention_cache


class Decoder(Part):
    """A step of the decoder."""

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any, encoder_attention_mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """One step.

        Args:
            input_ids: [batch, sequence] the new tokens.
            past_key_values: An ``EncoderDecoderCache``: the decoder's own past, and the encoder's ``states``.
            encoder_attention_mask: [batch, source], 0 for padding, where the encoder takes a mask.

        Returns:
            ``logits``, [batch, sequence, vocabulary], and ``present``, the new cache of the decoder's own tokens.
        """
        keys = past_key_values.cross_attention_cache.layers[0].keys
        # The states themselves are read by nothing: their keys and values are in the cache.
        states = keys.new_zeros(keys.shape[0], keys.shape[2], self._model.config.hidden_size)
        mask = {} if encoder_attention_mask is None else {"attention_mask": encoder_attention_mask}
        result = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=input_ids,
            use_cache=True,
            **{argument_of(self._model): past_key_values},
            **mask,
        )
        return {"logits": result.logits, "present": past_key_values.self_attention_cache}


class SpeechDecoder(Decoder):
    """A step with the logits by which ``generate`` chooses: -inf for tokens that the settings of generation suppress.

    Args:
        always, first: Numbers of the tokens that are suppressed in each step, and in the first step alone, a call
            without a past.
    """

    def __init__(self, model: Any, always: Sequence[int], first: Sequence[int]) -> None:
        super().__init__(model)
        for name, tokens in (("always", always), ("first", first)):
            out = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            out[[token for token in tokens if token < len(out)]] = True
            self.register_buffer(f"suppressed_{name}", out, persistent=False)

    def forward(
        self, input_ids: torch.Tensor, past_key_values: Any, encoder_attention_mask: torch.Tensor | None = None
    ) -> dict[str, Any]:
        """One step, as of :class:`Decoder`."""
        past = past_key_values.self_attention_cache.layers[0].keys.shape[2]
        result = super().forward(input_ids, past_key_values, encoder_attention_mask)
        length = input_ids.shape[1]
        # The last token of a call without a past: with a past, no place is below length.
        begins = torch.arange(length, device=input_ids.device) + past * length == length - 1
        out = self.suppressed_always | (begins[:, None] & self.suppressed_first)
        return {**result, "logits": result["logits"].masked_fill(out, -torch.inf)}


def without_past(past: Any) -> Any:
    """A cache that has the encoder's keys and values alone, as before the first step."""
    own = DynamicCache()
    for number, layer in enumerate(past.self_attention_cache.layers):
        own.update(layer.keys[:, :, :0], layer.values[:, :, :0], number)
    return EncoderDecoderCache(own, past.cross_attention_cache)


@dataclass(frozen=True)
class PartExample:
    """The arguments of ``to_onnx`` for a part of the model."""

    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]
    input_names: list[str]
    output_names: list[str]

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments."""
        return dict(vars(self))


def examples_of(model: Any, example: TaskExample) -> tuple[PartExample, PartExample]:
    """Example inputs of the encoder and of the decoder."""
    source = _renamed(example)
    tokens = torch.randint(0, model.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(1))
    past: Any = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        model(**example.kwargs, decoder_input_ids=tokens[:, :4], use_cache=True, **{argument_of(model): past})
    halves = (past.self_attention_cache, past.cross_attention_cache)
    for half in halves:
        kinds = sorted({type(layer).__name__ for layer in half.layers if type(layer) is not cache_utils.DynamicLayer})
        if kinds or not half.layers:
            raise UsageError(
                f"{type(model).__name__} has a cache of {', '.join(kinds) or 'nothing'}, not of keys and values"
            )
    layers = len(halves[0].layers)
    own, other = (
        [f"past_key_values.{i}.{half}.{kind}" for i in range(layers) for kind in ("key", "value")]
        for half in ("decoder", "encoder")
    )
    grows = any(axis > 0 for shape in source.dynamic_shapes.values() for axis in shape)
    encoder = PartExample(source.kwargs, source.dynamic_shapes, list(source.kwargs), other)
    cross = {0: "batch", 2: "source"} if grows else {0: "batch"}
    kwargs: dict[str, Any] = {"input_ids": tokens[:, 4:].contiguous(), "past_key_values": past}
    dynamic: dict[str, Any] = {
        "input_ids": {0: "batch", 1: "sequence"},
        "past_key_values": [{0: "batch", 2: "past"}] * len(own) + [cross] * len(other),
    }
    names = ["input_ids", *own, *other]
    if "attention_mask" in example.kwargs:
        kwargs[_SOURCE] = example.kwargs["attention_mask"]
        dynamic[_SOURCE] = source.dynamic_shapes["attention_mask"]
        names.append(_SOURCE)
    present = ["logits", *[name.replace("past_key_values", "present") for name in own]]
    return encoder, PartExample(kwargs, dynamic, names, present)


def _renamed(example: TaskExample) -> TaskExample:
    """An example in which the source's length has a name of its own, beside the text's length."""
    return TaskExample(
        example.kwargs,
        {
            name: {axis: "source" if size == "sequence" else size for axis, size in shape.items()}
            for name, shape in example.dynamic_shapes.items()
        },
    )


def merged_examples_of(model: Any, example: TaskExample) -> tuple[PartExample, PartExample, PartExample]:
    """Example inputs of the encoder alone, of the projections of its states and of the decoder."""
    encoder, decoder = examples_of(model, example)
    with torch.no_grad():
        states = States(model)(**example.kwargs)["last_hidden_state"]
    grows = any(axis > 0 for shape in encoder.dynamic_shapes.values() for axis in shape)
    dynamic = {"encoder_hidden_states": {0: "batch", 1: "source"} if grows else {0: "batch"}}
    projections = PartExample({"encoder_hidden_states": states}, dynamic, [*dynamic], encoder.output_names)
    return replace(encoder, output_names=["last_hidden_state"]), projections, decoder


class Merged:
    """PyTorch's results of the decoder whose first step computes the keys and values of the cross-attention."""

    def __init__(self, model: Any, decoder: PartExample, projections: PartExample) -> None:
        self._model, self._decoder, self._projections = model, decoder, projections

    def results(self, later: bool) -> dict[str, torch.Tensor]:
        """Results by name: of a later step, or of the first step, which has seen no tokens."""
        kwargs = dict(self._decoder.kwargs)
        past = copy.deepcopy(kwargs["past_key_values"])
        if not later:
            with torch.no_grad():
                states = Projections(self._model)(**self._projections.kwargs)["states"]
            past = EncoderDecoderCache(DynamicCache(), states)
        cross = past.cross_attention_cache
        kwargs["past_key_values"] = past
        tensors = results_of(Decoder(self._model), kwargs, self._decoder.output_names)
        for number, layer in enumerate(cross.layers):
            tensors |= {f"present.{number}.encoder.key": layer.keys, f"present.{number}.encoder.value": layer.values}
        return tensors
