"""Decoders in the form of ONNX models: one step, from tokens and a cache to logits and the new cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import DynamicCache, cache_utils

from onnxplug import UsageError
from onnxplug_transformers.adapters import Adapters, adapted
from onnxplug_transformers.caches import argument_of, emptied, names, shapes
from onnxplug_transformers.fused import (
    FusedCache,
    attentions_of,
    fused_attention,
    use_former_attention,
    use_fused_attention,
)
from onnxplug_transformers.genai import context_length
from onnxplug_transformers.own_attention import bias_of
from onnxplug_transformers.padding import layers_with_states, padding_in_front
from onnxplug_transformers.state_spaces import NO_LIMIT, state_spaces_go_on
from onnxplug_transformers.tasks import Part
from onnxplug_transformers.windows import windows_by_position

#: Kinds of layers that have keys and values, states of convolutions and recurrences, both, or nothing in a cache.
_KEYS, _STATES = ("full_attention", "sliding_attention"), ("linear_attention", "conv", "hybrid")
_LAYERS = (*_KEYS, *_STATES, "moe", "mlp")
_DynamicLayer, _Linear = cache_utils.DynamicLayer, cache_utils.LinearAttentionLayer
#: Classes of the layers that text generation takes in a cache.
_IN_CACHES = (
    *(_DynamicLayer, _Linear, cache_utils.LinearAttentionAndFullAttentionLayer),
    getattr(cache_utils, "DummyLayer", _Linear),  # transformers 5.22
)
#: Why a program does not take a cache.
_SEVERAL_SHAPES = "keys and values of several shapes; {} takes one for all layers"
_WITH_STATES = "states of linear attention or convolutions in its cache; {} takes keys and values alone"


class Decoder(Part):
    """A step of a language model.

    The cache keeps all tokens in every layer with keys and values; windows are in the mask. States of linear attention and
    state spaces go on from the cache's, whatever the number of tokens; padding may stand anywhere in the first tokens.

    Args:
        last_logits: Logits of each row's last token alone, the last that the mask shows.
        fused: Attention and cache by one operator of ONNX Runtime; a row's tokens then stand in the cache without gaps, in the
            order in which the mask shows them.

    Attributes:
        takes_positions: Whether a step has the input ``position_ids``.
        layers_with_states: The layers that hand on states of convolutions or recurrences.
    """

    def __init__(self, model: Any, *, last_logits: bool = False, fused: bool = False) -> None:
        super().__init__(model)
        config = model.config
        kinds, takes = set(getattr(config, "layer_types", None) or ()), inspect.signature(model.forward).parameters
        if other := kinds.difference(_LAYERS):
            raise UsageError(
                f"{type(model).__name__} has layers of the kind {', '.join(sorted(other))}; text generation takes "
                f"{', '.join(_LAYERS[:-1])} and {_LAYERS[-1]}"
            )
        self._cache_name = argument_of(model)
        refuse_changing_angles(model)
        self.config, self._has_states = config, not kinds.isdisjoint(_STATES)
        # A model without attention, and so without positions, multiplies its new states by the mask.
        without_attention = kinds.isdisjoint((*_KEYS, "hybrid")) and "position_ids" not in takes
        self._multiplies_by_mask = self._has_states and without_attention
        self.layers_with_states = layers_with_states(model) if self._has_states else []
        has_positions = "position_ids" in takes
        self.takes_positions, self._has_positions = has_positions and not fused, has_positions
        self.last_logits, self.fused = last_logits, fused
        if fused:
            if not has_positions and bias_of(model) is None:
                raise UsageError(f"{type(model).__name__} computes positions from a mask over the whole cache")
            use_fused_attention(model)
        if last_logits and model.get_output_embeddings() is None:
            raise UsageError(f"--last-logits: {type(model).__name__} does not say which module computes its logits")

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: Any,
        position_ids: torch.Tensor | None = None,
        adapter: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """One step.

        Args:
            input_ids: [batch, sequence] the new tokens.
            attention_mask: [batch, past + sequence], 0 for padding.
            past_key_values: A ``DynamicCache`` without windows.
            position_ids: [batch, sequence], where the model takes them.
            adapter: The factors of an adapter, as :class:`onnxplug_transformers.adapters.Adapters` names them.

        Returns:
            ``logits``, [batch, sequence, vocabulary] or [batch, 1, vocabulary], and ``past_key_values``, the new cache.
        """
        with adapted(self._model, adapter or {}):
            if self.fused:
                return self._fused_step(input_ids, attention_mask, past_key_values)
            return self._plain_step(input_ids, attention_mask, past_key_values, position_ids)

    def _plain_step(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: Any, position_ids: torch.Tensor | None
    ) -> dict[str, Any]:
        given = {"position_ids": position_ids} if position_ids is not None else {}
        states = partial(_last, attention_mask=attention_mask) if self.last_logits else None
        with windows_by_position(attention_mask), self._states(input_ids, attention_mask), self._before_logits(states):
            if self._multiplies_by_mask:
                attention_mask = _of_new(attention_mask, input_ids)
            result = self._model(
                input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **{self._cache_name: past}, **given
            )
        return {"logits": result.logits, "past_key_values": getattr(result, self._cache_name, None)}

    @contextmanager
    def _states(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Iterator[None]:
        """Holds while the model is called: states go on from the states in the cache, and padding is in front."""
        if not self.layers_with_states:
            yield
            return
        new = _of_new(attention_mask, input_ids)
        with (
            state_spaces_go_on(attention_mask.shape[1] - input_ids.shape[1]),
            padding_in_front(self.layers_with_states, new),
        ):
            yield

    def new_cache(self) -> Any:
        """A cache that has seen no tokens."""
        if not self._has_states:
            return DynamicCache()
        cache: Any = DynamicCache(config=self.config)
        for place, layer in enumerate(cache.layers):
            if type(layer) is cache_utils.DynamicSlidingWindowLayer:
                cache.layers[place] = _DynamicLayer()
        return cache

    def _fused_step(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: Any) -> dict[str, Any]:
        cache = FusedCache(past, input_ids, attention_mask, context_length(self.config.get_text_config()))
        results = cache.last_of if self.last_logits else cache.moved_back
        head = self._model.get_output_embeddings()
        places = {"position_ids": cache.positions} if self._has_positions else {}
        with fused_attention(cache), self._before_logits(results if head is not None else None):
            result = self._model(input_ids=cache.tokens, use_cache=True, **{self._cache_name: cache.given}, **places)
        cache.check()
        logits = result.logits if head is not None else results(result.logits)
        return {"logits": logits, "past_key_values": cache.past}

    @contextmanager
    def _before_logits(self, change: Callable[[torch.Tensor], torch.Tensor] | None) -> Iterator[None]:
        """Holds while the model is called: the layer of the logits reads ``change(x)`` instead of its input ``x``."""
        if change is None:
            yield
            return
        hook = self._model.get_output_embeddings().register_forward_pre_hook(lambda _, x: (change(x[0]), *x[1:]))
        try:
            yield
        finally:
            hook.remove()


def _last(states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """[batch, 1, width] of [batch, sequence, width]: the state of the last new token that the mask shows."""
    new = _of_new(attention_mask, states)
    place = (torch.arange(states.shape[1], device=new.device) * new).argmax(-1)
    return states.gather(1, place[:, None, None].expand(-1, 1, states.shape[-1]))


def _of_new(attention_mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The part of a mask that belongs to the new tokens."""
    return attention_mask.split([attention_mask.shape[1] - new.shape[1], new.shape[1]], dim=1)[1]


def refuse_changing_angles(model: Any) -> None:
    """Refuses rotary embeddings whose frequencies are computed anew as the text grows: the export would fix them.

    ``longrope`` is accepted: it has two sets of frequencies, and the graph takes one of them by the largest position.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        found = sorted({kinds} if isinstance(kinds, str) else set((kinds or {}).values()))
        changing = [kind for kind in found if "dynamic" in kind]
        if changing:
            raise UsageError(
                f"{type(model).__name__}: the rotary embedding {name} is of the kind {changing[0]!r}, whose frequencies "
                "depend on the length of the text; a graph has one set of them",
                hint="Set rope_parameters in the configuration to a kind that does not depend on it.",
            )


@dataclass(frozen=True)
class DecoderExample:
    """The arguments of ``to_onnx`` for a decoder.

    Attributes:
        kwargs: Example inputs by name.
        dynamic_shapes: Their dynamic dimensions.
        input_names: Names of the graph's inputs.
        layers: Layers with a cache.
        heads: Heads of keys and values; ``None`` where they have several shapes.
        head_size: Their width, or ``None``.
        reason: Why the cache has more than keys and values of one shape, for :func:`check_one_shape`; else ``""``.
    """

    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]
    input_names: list[str]
    layers: int
    heads: int | None
    head_size: int | None
    reason: str


def example_of(decoder: Decoder, *, past: int = 5, sequence: int = 3, batch: int = 2) -> DecoderExample:
    """Example inputs of a decoder, after a few tokens.

    Raises:
        UsageError: The model takes no ``DynamicCache``, its cache has other layers than keys, values and states, or a
            text that comes in pieces has other logits.
    """
    vocabulary, length = decoder.config.get_text_config().vocab_size, past + sequence
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch, length), generator=generator)
    mask = torch.ones_like(tokens)

    def piece(start: int, end: int, cache: Any) -> dict[str, Any]:
        parts = {"input_ids": tokens[:, start:end].contiguous(), "attention_mask": mask[:, :end].contiguous()}
        if decoder.takes_positions:
            parts["position_ids"] = torch.arange(start, end).expand(batch, -1).contiguous()
        return {**parts, "past_key_values": cache}

    model = type(decoder._model).__name__
    with torch.no_grad():
        try:
            cache = decoder(**piece(0, past, decoder.new_cache()))["past_key_values"]
        except UsageError:
            raise
        except (AttributeError, ValueError) as error:
            raise UsageError(
                f"{model} does not take a DynamicCache, which text generation hands on: {error}"
            ) from error
        about = check_cache(cache, model, len(decoder.layers_with_states))
        if decoder.layers_with_states:
            check_pieces(decoder, piece, emptied(cache), past, length)
    kwargs = piece(past, length, cache)
    in_cache = shapes(cache, "batch", "past", "source")
    grows = any("past" in axes.values() for axes in in_cache)
    dynamic: dict[str, Any] = {
        "input_ids": {0: "batch", 1: "sequence"},
        "attention_mask": {0: "batch", 1: "past + sequence" if grows else "total"},
    }
    if decoder.takes_positions:
        dynamic["position_ids"] = {0: "batch", 1: "sequence"}
    dynamic["past_key_values"] = in_cache
    return DecoderExample(kwargs, dynamic, [*list(kwargs)[:-1], *names(cache, "past_key_values")], *about)


def tolerance_of(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How far logits that a model computes in a dtype may be from others on average."""
    return (1e-4 if dtype == torch.float32 else 0.1) * exact.std()


def check_pieces(
    decoder: Decoder, piece: Callable[[int, int, Any], dict[str, Any]], cache: Any, past: int, length: int
) -> None:
    """Checks that a text that comes in pieces has the same logits as the text at once.

    Args:
        piece: The inputs for the tokens from a start to an end, after the tokens of a cache.
        cache: A cache that has seen no tokens, whose states are zeros.
        past: Tokens of the first piece.
        length: Tokens of the text.

    Raises:
        UsageError: The logits differ.
    """
    exact = decoder(**piece(0, length, decoder.new_cache()))["logits"].float()
    limits = {tuple(getattr(module, "time_step_limit", None) or NO_LIMIT) for module in decoder.modules()}
    ends = (0, past, length - 1, length) if limits == {NO_LIMIT} else (0, past, length)  # a single token has no limit
    logits = []
    for start, end in pairwise(ends):
        result = decoder(**piece(start, end, cache))
        cache = result["past_key_values"]
        logits.append(result["logits"])
    # of the row that is nearer, on average: rounding may choose another expert for a token
    distance = (torch.cat(logits, 1) - exact).abs().mean((1, 2)).min()
    if not bool(distance <= tolerance_of(exact, logits[0].dtype)):
        raise UsageError(f"{type(decoder._model).__name__} gives other logits for a text that comes in pieces")


def adapted_example_of(example: DecoderExample, adapters: Adapters) -> DecoderExample:
    """The same example with an adapter, whose tensors are the last inputs."""
    tensors = adapters.example()
    return replace(
        example,
        kwargs={**example.kwargs, "adapter": tensors},
        dynamic_shapes={**example.dynamic_shapes, "adapter": adapters.dynamic_shapes()},
        input_names=[*example.input_names, *tensors],
    )


def padded_prompt_of(example: DecoderExample) -> dict[str, Any]:
    """A prompt of two rows, the first of which is padded on the left."""
    tokens = example.kwargs["input_ids"].repeat(1, 2)[:2, :5].contiguous()
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    prompt = {"input_ids": tokens, "attention_mask": mask}
    if "position_ids" in example.kwargs:
        prompt["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return {**prompt, "past_key_values": emptied(example.kwargs["past_key_values"])}


def fused_example_of(example: DecoderExample) -> DecoderExample:
    """The same example for a decoder with fused attention: the buffers' length is independent of the text's."""
    dynamic = {**example.dynamic_shapes, "attention_mask": {0: "batch", 1: "total"}}
    kwargs, dynamic = ({k: v for k, v in table.items() if k != "position_ids"} for table in (example.kwargs, dynamic))
    names = [name for name in example.input_names if name != "position_ids"]
    return replace(example, kwargs=kwargs, dynamic_shapes=dynamic, input_names=names)


def fused_cases_of(example: DecoderExample) -> list[dict[str, Any]]:
    """Inputs for comparing a decoder with fused attention: prompts, also in longer buffers, and steps of one token.

    Rows have padding on the left, on the right, in between, or none.
    """
    cases = []
    for past, new, space in ((0, 6, 0), (0, 3, 9), (5, 1, 5), (4, 1, 12)):
        tokens = example.kwargs["input_ids"].repeat(2, 3)[:3, :new]
        mask = torch.ones(3, past + new, dtype=torch.long)
        mask[0, :2], mask[1, 1] = 0, 0
        if not past:
            mask[1, -1] = 0
        empty = torch.arange(space) >= mask[:, :past].sum(1, keepdim=True)
        cache: Any = copy.deepcopy(example.kwargs["past_key_values"])
        for layer in cache.layers:
            for name in ("keys", "values"):
                filled = getattr(layer, name)[:1].repeat(3, 1, 3, 1)[:, :, :space]
                setattr(layer, name, filled.masked_fill(empty[:, None, :, None], 0))
        cases.append({"input_ids": tokens, "attention_mask": mask, "past_key_values": cache})
    return cases


def cases_of(decoder: Decoder, example: DecoderExample) -> list[dict[str, Any]] | None:
    """Inputs for comparing a decoder; ``None`` where any sizes can be drawn for its example's dimensions."""
    if decoder.fused:
        return fused_cases_of(example)
    if "total" not in example.dynamic_shapes["attention_mask"].values():
        return None
    step = {**example.kwargs, "input_ids": example.kwargs["input_ids"][:, -1:].contiguous()}
    return [example.kwargs, padded_prompt_of(example), step]


def decoder_of(model: Any, *, last_logits: bool, fused: bool) -> tuple[Decoder, DecoderExample, str]:
    """A decoder and its example.

    Args:
        last_logits: As of :class:`Decoder`.
        fused: As of :class:`Decoder`; attention that can't be replaced stays.

    Returns:
        The decoder, its example, and why the attention stays; ``""`` where it is replaced or ``fused`` is False.
    """
    plain = Decoder(model).eval()
    example, reason = example_of(plain), ""
    if fused:
        before = attentions_of(model)
        with torch.no_grad():
            exact = plain(**padded_prompt_of(example))["logits"].float()
        try:
            check_one_shape(example.reason, type(model).__name__, "GroupQueryAttention")
            decoder = Decoder(model, last_logits=last_logits, fused=True).eval()
            example_of_fused = fused_example_of(example)
            check_logits(decoder, padded_prompt_of(example_of_fused), exact)
            return decoder, example_of_fused, ""
        except UsageError as error:
            reason = str(error.message)
            use_former_attention(model, before)
    return Decoder(model, last_logits=last_logits).eval(), example, reason


def check_logits(decoder: Decoder, prompt: dict[str, Any], exact: torch.Tensor) -> None:
    """Compares the logits of a prompt's tokens with those of the model's own attention.

    Raises:
        UsageError: The logits differ.
    """
    with torch.no_grad():
        logits = decoder(**prompt)["logits"].float()
    distance = (logits - exact[:, -logits.shape[1] :]).abs().mean(-1)
    distance = distance.masked_fill(prompt["attention_mask"][:, -logits.shape[1] :] == 0, 0.0)
    # of the row that is nearer: rounding may choose another expert for a token
    if not bool(distance.mean(1).min() <= tolerance_of(exact, decoder._model.dtype)):
        raise UsageError(f"{type(decoder._model).__name__} has other logits with it")


def check_cache(cache: Any, model: str, with_states: int = 0) -> tuple[int, int | None, int | None, str]:
    """The layers of a cache, the heads and width of keys and values, and why it has not these of one shape alone.

    Heads are ``None`` where there are several shapes, and 1 where there are no keys and values.

    Args:
        with_states: The number of the model's layers that hand on states.

    Raises:
        UsageError: The model has states outside of the cache, or the cache has layers other than keys, values and
            states.
    """
    layers: Any = getattr(cache, "layers", ())
    linear = [
        layer for layer in layers if isinstance(layer, _Linear) and any(layer.is_conv_states_initialized.values())
    ]
    if cache is None or len(linear) != with_states:
        raise UsageError(f"{model} keeps states elsewhere than in its cache, which is what text generation hands on")
    if type(cache) is not DynamicCache or any(type(layer) not in _IN_CACHES for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers}) or [type(cache).__name__]
        raise UsageError(
            f"{model} has a cache of {', '.join(kinds)}; text generation takes keys and values, and states"
        )
    pairs = [(layer.keys, layer.values) for layer in layers if getattr(layer, "keys", None) is not None]
    found = {tuple(x.shape[i] for i in (1, 3)) for pair in pairs for x in pair} or {(1, 1)}
    if len(found) > 1:
        return len(layers), None, None, _SEVERAL_SHAPES
    return len(layers), *found.pop(), _WITH_STATES if linear else ""


def check_one_shape(reason: str, model: str, program: str) -> None:
    """Checks that a cache has keys and values of one shape alone.

    Args:
        reason: Why it has not, as of :func:`check_cache`, or ``""``.

    Raises:
        UsageError: The cache has more, which this program does not take.
    """
    if reason:
        raise UsageError(f"{model} has {reason.format(program)}")
