"""Nemotron 3 Diarization's chunks of a recording, and Nemotron 3.5 Transcribe's, while a model is captured.

transformers loops over the chunks of a recording. Each sees frames of earlier chunks too, kept in a queue and in a
cache of the speakers, which grow from chunk to chunk. Here the loop is a scan: queue and cache have their full length,
and the row of the frames that a chunk sees is gathered by index, with zeros behind it. A full cache keeps frames by
``torch.topk``, which leaves open which of equal frames it takes. Transcribe's encoder of speech sees some frames around
each chunk: its chunks are one batch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers.utils.generic import can_return_tuple

from onnxplug.patches.scans import laid_out
from onnxplug_transformers.exchanged import exchanged, modeling_of

_MODULE = "transformers.models.nemotron3_diarization.modeling_nemotron3_diarization"


@contextlib.contextmanager
def recordings_of_any_length() -> Iterator[None]:
    """Holds while a model is captured."""
    name = "Nemotron3DiarizationForAudioFrameClassification"
    with exchanged(
        {
            f"{name}.forward": (recording, _is_other_call),
            "Nemotron3_5TranscribeAudioModel.forward": (transcribed, _has_other_attention),
        }
    ):
        yield


def _is_other_call(
    self: Any,
    input_features: Tensor,
    attention_mask: Tensor | None = None,
    speaker_cache: Any = None,
    num_lookahead_frames: int | None = None,
    num_lookback_frames: int | None = None,
    **kwargs: Any,
) -> bool:
    """Whether a call has a chunk of a stream, asks for more than logits, trains, or has attention unknown here."""
    is_stream = any(one is not None for one in (speaker_cache, num_lookahead_frames, num_lookback_frames))
    names = "output_hidden_states", "output_attentions"
    is_asked = any(kwargs.get(name, getattr(self.config, name, False)) for name in names)
    return is_stream or is_asked or self.training or _is_other_attention(self.model.audio_tower)


def _has_other_attention(self: Any, *_: Any, **__: Any) -> bool:
    return self.training or _is_other_attention(self.asr_encoder)


def _is_other_attention(tower: Any) -> bool:
    return tower.config._attn_implementation not in ("eager", "sdpa")


class _Chunks(NamedTuple):
    """The chunks of a recording, with the frames around them.

    Attributes:
        starts: The first frame of each chunk, [chunks].
        ends: The frame after the last frame of each chunk, [chunks].
        first: The first frame that each chunk sees, [chunks].
        last: The frame after the last frame that each chunk sees, [chunks].
        windows: The frames that each chunk sees, zeros behind them, [chunks, batch, frames, width].
        inside: Which places of the windows have frames of the recording, [chunks, 1, frames].
        known: Which of these frames are no padding of the batch, [chunks, batch, frames].
    """

    starts: Tensor
    ends: Tensor
    first: Tensor
    last: Tensor
    windows: Tensor
    inside: Tensor
    known: Tensor


def _chunks(embeds: Tensor, mask: Tensor | None, config: Any) -> _Chunks:
    """Chunks of frames [batch, frames, width], with ``mask`` [batch, frames] or without."""
    count, chunk, device = embeds.shape[1], config.chunk_length, embeds.device
    starts = torch.arange((count + chunk - 1) // chunk, device=device) * chunk
    ends = (starts + chunk).clamp(max=count)
    first = (starts - config.chunk_left_context).clamp(min=0)
    last = (ends + config.chunk_right_context).clamp(max=count)
    place = first[:, None] + torch.arange(config.chunk_left_context + chunk + config.chunk_right_context, device=device)
    inside = place < last[:, None]
    place = place.clamp(max=count - 1)
    windows = embeds[:, place].where(inside[..., None], 0).transpose(0, 1)
    known = inside[:, None].expand(-1, embeds.shape[0], -1)
    if mask is not None:
        known = known & mask[:, place].transpose(0, 1)
    return _Chunks(starts, ends, first, last, windows, inside[:, None], known)


def _attention_mask(tower: Any, known: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask of keys, [batch, 1, 1, frames]. Where all are padding, eager attention sees the frames inside alike."""
    if tower.config._attn_implementation == "sdpa":
        return known[:, None, None, :]
    zero = torch.zeros((), dtype=dtype, device=known.device)
    mask = zero.where(known, torch.finfo(dtype).min).where(inside, -torch.inf)
    return mask[:, None, None, :]


class _Step(nn.Module):
    """One chunk: from the state (cache, queue and their lengths) and the frames to the next state and the logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        config = model.config
        self.stream = sys.modules[_MODULE].Nemotron3DiarizationSpeakerCache(
            config.streaming_config,
            fifo_length=config.fifo_length,
            speaker_cache_update_period=config.speaker_cache_update_period,
        )

    def forward(
        self,
        embeds: Tensor,
        probs: Tensor,
        fifo: Tensor,
        lengths: Tensor,
        window: Tensor,
        mask: Tensor,
        parts: Tensor,
    ) -> tuple[Tensor, ...]:
        """The next state, and the logits.

        Args:
            embeds: The cache, [batch, frames, width].
            probs: Its frames' speakers, [batch, frames, speakers].
            fifo: The queue, [batch, frames, width].
            lengths: How many frames of the cache and of the queue there are, and whether the cache was compressed, [3].
            window: The frames of the chunk and around it, zeros behind them, [batch, frames, width].
            mask: Which of the window's frames are seen, [batch, frames].
            parts: The numbers of the window's frames before the chunk, in it, and in all, [3].
        """
        model, config, stream = self.model, self.model.config, self.stream
        factor, chunk, device = config.audio_config.subsampling_factor, config.chunk_length, embeds.device
        batch, most, room = embeds.shape[0], embeds.shape[1], fifo.shape[1]
        cached, queued, compressed = lengths.unbind()
        before, size, width = parts.unbind()
        held = cached + queued
        length = held + width

        place = torch.arange(most + room + window.shape[1], device=device)
        index = place.where(place < cached, (most + place - cached).where(place < held, most + room + place - held))
        index = index.where(place < length, place.shape[0])
        row = _with_nothing(torch.cat([embeds, fifo, window], 1))[:, index]
        known = torch.cat([mask.new_ones(batch, most + room), mask, mask.new_zeros(batch, 1)], 1)[:, index]
        states = model.model.proj(self._encoded(row, known, place < length, place))
        states = states.where((place < length)[:, None], 0)
        logits = model.classifier(model.model.upsampler(states))
        now = functional.avg_pool1d(logits.sigmoid().transpose(1, 2), factor, factor).transpose(1, 2)
        now = (now * known[..., None].to(now.dtype)).to(probs)

        place = torch.arange(room + chunk, device=device)
        total = queued + size
        index = (cached + place).where(place < queued, held + before + place - queued)
        index = index.where(place < total, row.shape[1])
        queue, queue_probs = (_with_nothing(x)[:, index] for x in (row, now))
        popped = (total - room).clamp(min=stream.speaker_cache_update_period)
        popped = torch.minimum(popped, total).where(total > room, 0)

        place = torch.arange(most + room + chunk, device=device)
        index = place.where(place < cached, most + place - cached).where(place < cached + popped, place.shape[0])
        stored = probs.where(compressed > 0, now[:, :most])
        longer = _with_nothing(torch.cat([embeds, queue], 1))[:, index]
        longer_probs = _with_nothing(torch.cat([stored, queue_probs], 1))[:, index]
        fewer, fewer_probs = stream._compress(longer, longer_probs, model.silence_embeds)
        is_full = cached + popped > most
        embeds = fewer.where(is_full, longer[:, :most])
        probs = fewer_probs.where(is_full, longer_probs[:, :most])
        kept = torch.arange(room, device=device) + popped
        fifo = queue[:, kept.clamp(max=room + chunk - 1)]
        lengths = torch.stack(
            [(cached + popped).clamp(max=most), total - popped, (compressed > 0).where(~is_full, True) + 0]
        )

        place = (held + before) * factor + torch.arange(chunk * factor, device=device)
        return embeds, probs, fifo, lengths, logits[:, place.clamp(max=logits.shape[1] - 1)]

    def _encoded(self, row: Tensor, known: Tensor, inside: Tensor, place: Tensor) -> Tensor:
        """The encoder's states, [batch, frames, width]."""
        tower = self.model.model.audio_tower
        mask, turns = _attention_mask(tower, known, inside, row.dtype), tower.rotary_emb(row, place[None])
        states = tower.input_layer_norm(row)
        for layer in tower.layers:
            states = layer(states, attention_mask=mask, position_embeddings=turns)
        result: Tensor = tower.layer_norm(states)
        return result


def _with_nothing(x: Tensor) -> Tensor:
    """Frames [batch, frames, width], and one more frame of zeros."""
    return functional.pad(x, (0, 0, 0, 1))


@can_return_tuple
def recording(
    self: Any,
    input_features: Tensor,
    attention_mask: Tensor | None = None,
    speaker_cache: Any = None,
    num_lookahead_frames: int | None = None,
    num_lookback_frames: int | None = None,
    **_: Any,
) -> Any:
    """The logits of a whole recording, [batch, frames, speakers]."""
    config = self.config
    factor = config.audio_config.subsampling_factor
    embeds = self.model.audio_tower.embedder(input_features)
    batch, width = embeds.shape[0], embeds.shape[2]
    mask = attention_mask[:, ::factor].bool() if attention_mask is not None else None
    chunks = _chunks(embeds, mask, config)
    starts, ends, first, last = chunks.starts, chunks.ends, chunks.first, chunks.last
    parts = torch.stack([starts - first, ends - starts, last - first], -1)
    cache, speakers = config.streaming_config.speaker_cache_length, config.streaming_config.num_speakers
    state = [
        embeds.new_zeros(batch, cache, width),
        embeds.new_zeros(batch, cache, speakers),
        embeds.new_zeros(batch, config.fifo_length, width),
        parts.new_zeros(3),
    ]
    logits = _scanned(_Step(self), state, [laid_out(chunks.windows), laid_out(chunks.known), parts])
    logits = logits.transpose(0, 1).flatten(1, 2)[:, : input_features.shape[1]]
    return sys.modules[_MODULE].Nemotron3DiarizationOutput(logits=logits)


def _scanned(step: nn.Module, state: list[Tensor], sequences: list[Tensor]) -> Tensor:
    """The logits of all steps, along a new first axis: a scan in a capture, with the weights as operands."""
    if not torch.compiler.is_compiling():
        steps = []
        for slices in zip(*sequences, strict=True):
            *state, logits = step(*state, *slices)
            steps.append(logits)
        return torch.stack(steps)
    tensors = {**dict(step.named_parameters()), **dict(step.named_buffers())}
    split = len(state) + len(sequences)

    def called(*operands: Tensor) -> Any:
        weights = dict(zip(tensors, operands[split:], strict=True))
        return list(functional_call(step, weights, operands[:split]))

    results = torch.ops.higher_order.scan(called, state, sequences, tuple(tensors.values()))
    result: Tensor = results[-1]
    return result


@can_return_tuple
def transcribed(self: Any, input_features: Tensor, input_features_mask: Tensor | None = None, **_: Any) -> Any:
    """Transcribe's states of speech plus the states of the speakers, [batch, frames, width]."""
    module, factor = modeling_of(self), self.config.subsampling_factor
    length = input_features.shape[1]
    if length % factor != 0:
        raise ValueError(f"The number of spectrogram frames ({length}) must be a multiple of {factor}.")
    if input_features_mask is None:
        input_features_mask = torch.ones(input_features.shape[:2], dtype=torch.long, device=input_features.device)
    features = module.normalize_per_feature(input_features, input_features_mask).to(self.asr_encoder.dtype)
    speech = _in_chunks(
        self.asr_encoder, features, input_features_mask[:, ::factor].bool(), self.config.diarization_config
    )
    logits = self.diarization_model(
        input_features.to(self.diarization_model.dtype), attention_mask=input_features_mask
    ).logits
    speakers = logits.sigmoid().unflatten(1, (length // factor, factor)).mean(2).to(speech.dtype)
    active = (speakers > self.config.speaker_activity_threshold).to(speech.dtype)
    return module.Nemotron3_5TranscribeAudioModelOutput(
        last_hidden_state=self.asr_norm(speech) + self.speaker_embedding(self.speaker_norm(active)),
        asr_last_hidden_state=speech,
        speaker_logits=logits,
    )


def _in_chunks(encoder: Any, features: Tensor, mask: Tensor, config: Any) -> Tensor:
    """The encoder's states of all chunks, [batch, frames, width]."""
    embeds = encoder.embedder(features)
    batch, count, _ = embeds.shape
    _, _, first, _, windows, inside, known = _chunks(embeds, mask, config)
    inside = inside.expand(-1, batch, -1).flatten(0, 1)
    seen = _attention_mask(encoder, known.flatten(0, 1), inside, embeds.dtype)
    states = encoder(inputs_embeds=windows.flatten(0, 1), attention_mask=seen).last_hidden_state
    width = windows.shape[2]
    frame = torch.arange(count, device=embeds.device)
    chunk = frame // config.chunk_length
    place = chunk * width + frame - first[chunk]
    rows = states.reshape(-1, batch, width, states.shape[-1]).transpose(0, 1).flatten(1, 2)
    result: Tensor = rows[:, place]
    return result
