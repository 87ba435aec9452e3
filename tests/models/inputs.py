"""Inputs of transformers' architectures: by the names of ``forward``'s parameters, for a few models by functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tests.models.configurations import VOCABULARY
from tests.models.libraries import draw_arguments
from tests.models.small import Small

#: Inputs by name, and the dynamic dimensions of each by axis.
Inputs = tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]
#: An input, and its dynamic dimensions by axis.
Input = tuple[torch.Tensor, dict[int, str]]

#: Inputs of a kind of models beside the required parameters of ``forward``, where ``forward`` has them.
_GIVEN: Mapping[str, tuple[str, ...]] = {
    "causal": ("input_ids",),
    "masked": ("input_ids",),
    "seq2seq": ("input_ids", "decoder_input_ids"),
    "segmentation": ("pixel_values", "pixel_values_videos", "input_points"),
    "reading": ("input_ids", "bbox", "image", "pixel_values", "token_type_ids"),
    "video": ("pixel_values", "pixel_values_videos"),
    "contrastive": ("input_ids", "pixel_values", "pixel_values_videos"),
    "speech": ("input_ids", "input_values", "input_features", "inputs", "decoder_input_ids"),
    "audio": ("input_values", "input_features"),
    "synthesis": ("input_ids", "decoder_input_values", "decoder_input_ids"),
    "series": ("past_values",),
    "classification": ("input_ids",),
    "choices": ("input_ids",),
}


_WITH_A_DECODER = frozenset(
    f"base {name}" for name in "canary cohere_asr moonshine moonshine_streaming speech_to_text".split()
)


def draw_inputs(model: nn.Module, config: Any, model_type: str, kind: str) -> Inputs:
    """Example inputs for a model.

    Args:
        model: The model.
        config: Its configuration.
        model_type: Its name in transformers.
        kind: One of :data:`tests.models.measure.TABLES`.
    """
    own = OWN_INPUTS.get(f"{kind} {model_type}")
    if own is not None:
        return own(config)
    if kind == "choices":
        return {"input_ids": _ids(2, 3, 9)}, {"input_ids": {0: "batch", 1: "choices", 2: "sequence"}}
    parameters = inspect.signature(model.forward).parameters
    given = _GIVEN.get(kind, ("pixel_values",))
    if kind in ("pretraining", "base"):
        given = (model.main_input_name, "decoder_input_ids" if model.main_input_name == "input_ids" else "")
    if f"{kind} {model_type}" in _WITH_A_DECODER:
        given = (*given, "decoder_input_ids")
    names = [
        name
        for name, parameter in parameters.items()
        if (parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD) or name in given
    ]
    inputs = {name: _BY_NAME[name](config) for name in names}
    if kind == "classification" and getattr(config, "is_encoder_decoder", False):
        inputs["input_ids"][0][:, -1] = config.eos_token_id  # the token whose state is classified
    return {name: value for name, (value, _) in inputs.items()}, {name: axes for name, (_, axes) in inputs.items()}


def _ids(*sizes: int) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, sizes)


def _tokens(config: Any) -> Input:
    return _ids(2, 9), {0: "batch", 1: "sequence"}


def _target(config: Any) -> Input:
    return _ids(2, 7), {0: "batch", 1: "target"}


def _size(config: Any) -> tuple[int, int]:
    """The height and width of images."""
    for part in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        size = getattr(part, "image_size", None) or getattr(part, "input_size", None)
        if size:
            return (size, size) if isinstance(size, int) else tuple(size)
    return 64, 64


def _channels(config: Any) -> int:
    for part in (config, getattr(config, "vision_config", None), getattr(config, "backbone_config", None)):
        channels = getattr(part, "num_channels", None)
        if channels:
            return int(channels)
    return 3


def _picture(config: Any) -> Input:
    return torch.randn(2, _channels(config), *_size(config)), {0: "batch"}


def _film(config: Any) -> Input:
    parts = config, getattr(config, "vision_config", None)
    frames = next((n for p in parts for name in ("num_frames", "frames_per_clip") if (n := getattr(p, name, None))), 4)
    return torch.randn(2, frames, 3, *_size(config)), {0: "batch"}


def _waveform(config: Any) -> Input:
    return torch.randn(2, 3200), {0: "batch", 1: "samples"}


def _spectrogram(config: Any) -> Input:
    """Frames of mel bins."""
    return torch.randn(2, 80, _bins(config)), {0: "batch", 1: "frames"}


def _bins(config: Any) -> int:
    for part in (config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None)):
        for name in ("feature_projection_input_dim", "num_mel_bins", "input_dim"):
            bins = getattr(part, name, None)
            if bins:
                return int(bins)
    return 80


def _history(config: Any) -> Input:
    channels = getattr(config, "num_input_channels", None)
    length = config.context_length
    return torch.randn(2, length, channels) if channels else torch.randn(2, length), {0: "batch"}


def _points(config: Any) -> Input:
    """Two points of one object in each image."""
    return torch.rand(2, 1, 2, 2) * 20, {0: "batch"}


def _boxes(config: Any) -> Input:
    corners = torch.randint(0, 60, (2, 9, 2))
    return torch.cat([corners, corners + torch.randint(0, 60, (2, 9, 2))], -1), {0: "batch", 1: "sequence"}


_BY_NAME: Mapping[str, Callable[[Any], Input]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _target,
    "token_type_ids": lambda config: (torch.zeros(2, 9, dtype=torch.long), {0: "batch", 1: "sequence"}),
    "pixel_values": _picture,
    "image": _picture,
    "pixel_values_videos": _film,
    "input_values": _waveform,
    "inputs": _waveform,
    "input_features": _spectrogram,
    "past_values": _history,
    "input_points": _points,
    "bbox": _boxes,
    "task_inputs": lambda config: (torch.randn(2, config.task_seq_len), {0: "batch"}),
}


def _written(inputs: str, **sizes: int) -> Callable[[Any], Inputs]:
    """Inputs as :class:`tests.models.small.Small` describes them."""
    return lambda config: draw_arguments(Small("", inputs, sizes=sizes))


def _text(config: Any) -> Inputs:
    ids, axes = _tokens(config)
    return {"input_ids": ids}, {"input_ids": axes}


def _prefixed_text(config: Any) -> Inputs:
    """Text with token types of a prefix, which attends to all of itself."""
    inputs, axes = _text(config)
    kinds = (torch.arange(9) > 5).long().repeat(2, 1)
    return {**inputs, "token_type_ids": kinds}, {**axes, "token_type_ids": axes["input_ids"]}


def _text_pair_and_mask(config: Any) -> Inputs:
    """Two texts and a mask, for models that make a mask themselves, but not while torch.export traces them."""
    mask = (torch.arange(9)[None] < torch.tensor([[9], [6]])).long()
    text, axes = {0: "batch", 1: "sequence"}, {0: "batch", 1: "target"}
    inputs = {"input_ids": _ids(2, 9), "decoder_input_ids": _ids(2, 7), "attention_mask": mask}
    return inputs, {"input_ids": text, "decoder_input_ids": axes, "attention_mask": text}


def _codebooks(config: Any) -> Inputs:
    """A row for each codebook: the batch is a multiple of their number."""
    return {"input_ids": _ids(2 * config.num_codebooks, 9)}, {"input_ids": {1: "sequence"}}


def _patches(config: Any) -> Inputs:
    """Images as rows of patches; the second one is smaller than the first."""
    vision = getattr(config, "vision_config", config)
    inputs = {
        "pixel_values": torch.randn(2, 16, vision.num_channels * vision.patch_size**2),
        "pixel_attention_mask": (torch.arange(16)[None] < torch.tensor([[16], [12]])).long(),
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }
    return inputs, {name: {0: "batch"} for name in inputs}


def _image_and_text(config: Any) -> Inputs:
    """An image's tokens before those of the text."""
    image = torch.full((2, config.mm_tokens_per_image), config.image_token_index)
    size = config.vision_config.image_size
    inputs = {
        "input_ids": torch.cat([image, torch.randint(4, VOCABULARY - 2, (2, 5))], 1),
        "pixel_values": torch.randn(2, 3, size, size),
    }
    return inputs, {"input_ids": {0: "batch", 1: "sequence"}, "pixel_values": {0: "batch"}}


def _sound_and_text(config: Any) -> Inputs:
    """Eight frames for each token; sound and text are added."""
    inputs = {"input_ids": _ids(2, 9), "input_features": torch.randn(2, config.audio_config.num_mel_bins, 72)}
    return inputs, {name: {0: "batch"} for name in inputs}


def _pairs_of_pictures(config: Any) -> Inputs:
    return {"pixel_values": torch.rand(2, 2, 3, 64, 64)}, {"pixel_values": {0: "batch"}}


def _pictures_of_size(*size: int) -> Callable[[Any], Inputs]:
    return lambda config: ({"pixel_values": torch.randn(2, 3, *size)}, {"pixel_values": {0: "batch"}})


def _films(config: Any) -> Inputs:
    film, axes = _film(config)
    return {"pixel_values": film}, {"pixel_values": axes}


def _masked_films(config: Any) -> Inputs:
    """Films with an equal number of hidden tubes of patches."""
    inputs, axes = _films(config)
    tubes = config.num_frames // config.tubelet_size * (config.image_size // config.patch_size) ** 2
    hidden = (torch.arange(tubes) % 3 > 0).repeat(2, 1)
    return {**inputs, "bool_masked_pos": hidden}, {**axes, "bool_masked_pos": {0: "batch"}}


def _hidden_by_noise(config: Any) -> Inputs:
    """Noise that decides which patches are hidden; without it the model draws noise itself."""
    image, axes = _picture(config)
    patches = (config.image_size // config.patch_size) ** 2
    return {"pixel_values": image, "noise": torch.rand(2, patches)}, {"pixel_values": axes, "noise": {0: "batch"}}


def _padded_history(config: Any) -> Inputs:
    length = config.context_length
    inputs = {
        "past_values": torch.randn(2, length),
        "past_values_padding": (torch.arange(length)[None] < torch.tensor([[0], [length // 4]])).long(),
        "freq": torch.tensor([[0], [1]]),
    }
    return inputs, {name: {0: "batch"} for name in inputs}


def _masked_choices(config: Any) -> Inputs:
    axes = {0: "batch", 1: "choices", 2: "sequence"}
    mask = torch.ones(2, 3, 9, dtype=torch.long)
    mask[1, 1:, 6:] = 0
    return {"input_ids": _ids(2, 3, 9), "attention_mask": mask}, {"input_ids": axes, "attention_mask": axes}


def _mel_of_length(length: int, *more: str) -> Callable[[Any], Inputs]:
    """Mel bins before ``length`` frames, and the inputs ``more``, such as a decoder's."""

    def draw(config: Any) -> Inputs:
        inputs = {"input_features": torch.randn(2, config.num_mel_bins, length)}
        axes = {"input_features": {0: "batch"}}
        for name in more:
            inputs[name], axes[name] = _BY_NAME[name](config)
        return inputs, axes

    return draw


def _spectrogram_of_model(config: Any) -> Inputs:
    return {"input_values": torch.randn(2, config.max_length, config.num_mel_bins)}, {"input_values": {0: "batch"}}


def _longer_waveform(config: Any) -> Inputs:
    return {"input_values": torch.randn(2, 8000)}, {"input_values": {0: "batch", 1: "samples"}}


def _blocks_of_sound(config: Any) -> Inputs:
    """Two blocks of samples, as the model requires."""
    return {"input_values": torch.randn(2, 3840)}, {"input_values": {0: "batch"}}


def _channel_of_sound(config: Any) -> Inputs:
    """The input of a codec: channels before samples."""
    return {"input_values": torch.randn(2, 1, 3200)}, {"input_values": {0: "batch", 2: "samples"}}


def _patches_and_text(config: Any) -> Inputs:
    inputs, axes = _patches(config)
    return {**inputs, "input_ids": _ids(2, 9)}, {**axes, "input_ids": {0: "batch"}}


def _text_and_frames(config: Any) -> Inputs:
    inputs = {"input_ids": _ids(2, 9), "decoder_input_values": torch.randn(2, 6, config.num_mel_bins)}
    return inputs, {"input_ids": {0: "batch", 1: "sequence"}, "decoder_input_values": {0: "batch", 1: "frames"}}


def _table(config: Any) -> Inputs:
    """Each token's segment, column, row, and ranks."""
    kinds = torch.stack([torch.randint(0, min(n, 4), (2, 9)) for n in config.type_vocab_sizes], -1)
    axes = {0: "batch", 1: "sequence"}
    return {"input_ids": _ids(2, 9), "token_type_ids": kinds}, {"input_ids": axes, "token_type_ids": axes}


def _text_and_codes(config: Any) -> Inputs:
    codes = torch.randint(0, 64, (2, 7, config.decoder_config.num_channels))
    axes = {"input_ids": {0: "batch", 1: "sequence"}, "decoder_input_ids": {0: "batch", 1: "target"}}
    return {"input_ids": _ids(2, 9), "decoder_input_ids": codes}, axes


def _text_with_codes(config: Any) -> Inputs:
    """Each token with a code of each codebook."""
    return {"input_ids": _ids(2, 9, config.num_codebooks + 1)}, {"input_ids": {0: "batch", 1: "sequence"}}


def _text_and_codebooks(config: Any) -> Inputs:
    """A row of codes for each codebook."""
    codes = _ids(2 * config.decoder.num_codebooks, 7)
    return {"input_ids": _ids(2, 9), "decoder_input_ids": codes}, {"input_ids": {1: "sequence"}}


def _frames_and_text(width: Callable[[Any], int]) -> Callable[[Any], Inputs]:
    def draw(config: Any) -> Inputs:
        axes = {"input_features": {0: "batch", 1: "frames"}, "decoder_input_ids": {0: "batch", 1: "target"}}
        return {"input_features": torch.randn(2, 20, width(config)), "decoder_input_ids": _ids(2, 7)}, axes

    return draw


def _series(config: Any) -> Inputs:
    """The past of a series, and the values and features of its future."""
    past, ahead = config.context_length + max(config.lags_sequence), config.prediction_length
    inputs = {
        "past_values": torch.rand(2, past) + 0.5,
        "past_time_features": torch.randn(2, past, config.num_time_features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.rand(2, ahead) + 0.5,
        "future_time_features": torch.randn(2, ahead, config.num_time_features),
    }
    return inputs, {name: {0: "batch"} for name in inputs}


def _decisions(config: Any) -> Inputs:
    axes = {0: "batch", 1: "sequence"}
    inputs = {
        "states": torch.randn(2, 9, config.state_dim),
        "actions": torch.randn(2, 9, config.act_dim),
        "rewards": torch.randn(2, 9, 1),
        "returns_to_go": torch.randn(2, 9, 1),
        "timesteps": torch.arange(9).repeat(2, 1),
        "attention_mask": torch.ones(2, 9),
    }
    return inputs, dict.fromkeys(inputs, axes)


def _classes_and_task(config: Any) -> Inputs:
    """Three classes of each image, as texts in one batch."""
    inputs = {
        "pixel_values": torch.randn(2, 3, *_size(config)),
        "classes_input_ids": _ids(6, 5),
        "classes_attention_mask": torch.ones(6, 5, dtype=torch.long),
        "tasks_input_ids": _ids(2, 9),
        "tasks_attention_mask": torch.ones(2, 9, dtype=torch.long),
        "classes_structure": torch.tensor([3, 3]),
    }
    text = {0: "batch", 1: "sequence"}
    axes: dict[str, dict[int, str]] = {"pixel_values": {0: "batch"}, "classes_structure": {0: "batch"}}
    axes |= {"classes_input_ids": {0: "classes"}, "classes_attention_mask": {0: "classes"}}
    return inputs, axes | {"tasks_input_ids": text, "tasks_attention_mask": text}


def _masked_mel(config: Any) -> Inputs:
    """Mel bins before frames, of a number that the model fixes, with a mask of the frames of sound."""
    mask = (torch.arange(80)[None] < torch.tensor([[80], [60]])).long()
    inputs = {"input_features": torch.randn(2, config.num_mel_bins, 80), "input_features_mask": mask}
    return inputs, {name: {0: "batch"} for name in inputs}


def _frames(width: Callable[[Any], int], name: str = "input_features", masked: bool = False) -> Callable[[Any], Inputs]:
    """Frames of a width, with a mask of the frames of sound where ``masked``."""

    def draw(config: Any) -> Inputs:
        axes = {0: "batch", 1: "frames"}
        inputs = {name: torch.randn(2, 80, width(config))}
        if masked:
            inputs[f"{name}_mask"] = torch.arange(80)[None] < torch.tensor([[80], [60]])
        return inputs, dict.fromkeys(inputs, axes)

    return draw


def _muted(config: Any) -> Inputs:
    """Frames of mel bins, with a mask of the padding."""
    inputs, axes = _frames(lambda config: config.input_feat_size, "audio_mel", masked=True)(config)
    return inputs | {"audio_mel_mask": ~inputs["audio_mel_mask"]}, axes


def _described_sound(config: Any) -> Inputs:
    """A spectrogram of one channel, and text."""
    inputs = {"input_ids": _ids(2, 9), "input_features": torch.randn(2, 1, 60, config.audio_config.num_mel_bins)}
    return inputs, {"input_ids": {0: "batch", 1: "sequence"}, "input_features": {0: "batch"}}


def _text_and_voice(config: Any) -> Inputs:
    inputs = {"input_ids": _ids(2, 9), "input_features": torch.randn(2, config.decoder_config.feature_size, 30)}
    return inputs, {"input_ids": {0: "batch", 1: "sequence"}, "input_features": {0: "batch", 2: "frames"}}


def _picture_and_text(config: Any) -> Inputs:
    (picture, sides), (text, words) = _picture(config), _tokens(config)
    return {"input_ids": text, "pixel_values": picture}, {"input_ids": words, "pixel_values": sides}


_WAVES = "input_values: batch 1 320*frames; input_features: batch frames 160"
_PROMPTED = ("pixel_values", "prompt_pixel_values", "prompt_masks")
_WORDS, _SOUND = "input_ids: batch text < 99", "input_values: batch 1 samples"
OWN_INPUTS: Mapping[str, Callable[[Any], Inputs]] = {
    "causal musicgen": _codebooks,
    "causal musicgen_melody": _codebooks,
    "seq2seq longt5": _text_pair_and_mask,
    "seq2seq switch_transformers": _text_pair_and_mask,
    "seq2seq voxtral_realtime": _sound_and_text,
    "image imagegpt": _text,  # clusters of colours
    "image siglip2": _patches,
    "image shieldgemma2": _image_and_text,
    "keypoints efficientloftr": _pairs_of_pictures,
    "speech dia": _text_and_codes,
    "speech kyutai_speech_to_text": _text_with_codes,
    "base kyutai_speech_to_text": _text_with_codes,
    "speech pop2piano": _frames_and_text(lambda config: config.d_model),
    "synthesis musicgen": _text_and_codebooks,
    "synthesis musicgen_melody": _text_and_codebooks,
    "keypoints lightglue": _pairs_of_pictures,
    "keypoints superglue": _pairs_of_pictures,
    "reading pp_ocrv5_mobile_rec": _pictures_of_size(96, 160),
    "reading pp_ocrv5_server_rec": _pictures_of_size(48, 160),
    "reading tapas": _table,
    "video timesformer": _films,
    "video videomae": _films,
    "base videomae": _films,
    "base vivit": _films,
    "base longt5": _text_pair_and_mask,
    "base switch_transformers": _text_pair_and_mask,
    "base perceiver": _frames(lambda config: config.d_model, "inputs"),
    "base timesformer": _films,
    "base timesfm": _padded_history,
    "base voxtral_realtime": _sound_and_text,
    "choices modernbert": _masked_choices,
    "pretraining videomae": _masked_films,
    "video vivit": _films,
    "contrastive siglip2": _patches_and_text,
    "audio whisper": _mel_of_length(80),
    "audio audio-spectrogram-transformer": _spectrogram_of_model,
    "base audio-spectrogram-transformer": _spectrogram_of_model,
    "base dia": _text_and_codes,
    "base paligemma": _prefixed_text,
    **dict.fromkeys(("pretraining vit_mae", "base vit_mae"), _hidden_by_noise),
    "base musicgen": _codebooks,
    "base musicgen_melody": _codebooks,
    "base bridgetower": _picture_and_text,
    "base clap": _described_sound,
    "base clvp": _text_and_voice,
    "base audioflamingo3_encoder": _masked_mel,
    "base fun_asr_nano_encoder": _frames(lambda config: config.input_size, masked=True),
    "base gemma4_audio": _frames(lambda config: 128),
    "base granite_speech5_encoder": _frames(lambda config: 4 * config.num_mel_bins),
    "base nemotron3_5_transcribe_word_timestamp": _frames(lambda config: config.hidden_size, "inputs_embeds"),
    "speech granite_speech5_ctc": _frames(lambda config: 4 * config.encoder_config.num_mel_bins),
    "base decision_transformer": _decisions,
    **dict.fromkeys(("base autoformer", "base informer", "base time_series_transformer"), _series),
    "detection omdet-turbo": _classes_and_task,
    "base efficientloftr": _pairs_of_pictures,
    "base glmasr_encoder": _mel_of_length(80),
    "base moss_transcribe_diarize_audio": _mel_of_length(80),
    "base qwen2_audio_encoder": _mel_of_length(80),
    "base pp_ocrv5_mobile_rec": _pictures_of_size(96, 160),
    "base muse_spark_audio": _blocks_of_sound,
    "base mimi_encoder": _channel_of_sound,
    "base pe_audio_encoder": _channel_of_sound,
    "base encodec": _channel_of_sound,
    "base dac": _channel_of_sound,
    "base mimi": _channel_of_sound,
    "base whisper": _mel_of_length(80, "decoder_input_ids"),
    "speech whisper": _mel_of_length(80, "decoder_input_ids"),
    "synthesis speecht5": _text_and_frames,
    "base gemma3n_audio": _muted,
    "base mimi_decoder": _written("latents: batch 32 length"),
    "base muse_glimmer_assistant": _written("noise_embeds: batch text 32; context_hidden_states: batch length 160"),
    "base nemotron3_5_transcribe_audio": _written("input_features: batch 8*frames 16", frames=10),
    **dict.fromkeys(("base neucodec", "base xcodec2"), _written(_WAVES, frames=10)),
    "base pe_audio": _written(f"{_WORDS}; {_SOUND}", samples=3200),
    "base pe_video": _written(f"{_WORDS}; pixel_values_videos: batch frames 3 32 32"),
    "base pe_video_encoder": _written("pixel_values_videos: batch frames 3 32 32"),
    "base pe_audio_video": _written(f"{_WORDS}; {_SOUND}; pixel_values_videos: batch frames 3 32 32", samples=3200),
    "base pe_audio_video_encoder": _written(f"{_SOUND}; pixel_values_videos: batch frames 3 32 32", samples=3200),
    "base pocket_tts_audio_tokenizer": _channel_of_sound,
    "base pocket_tts_audio_tokenizer_decoder": _written("latents: batch 32 length"),
    "base pocket_tts_audio_tokenizer_encoder": _channel_of_sound,
    "base qwen3_asr_encoder": _written(
        "input_features: batch 16 100*frames; input_features_mask: batch 100*frames mask", frames=2
    ),
    **dict.fromkeys(("base sam3", "base sam3_lite_text"), _picture_and_text),
    "base sam3_lite_text_text_model": _text,
    "base seggpt": _written("; ".join(f"{name}: batch 3 32 32" for name in _PROMPTED)),
    "base siglip2_vision_model": _patches,
    "base speecht5": _written("input_values: batch length 32; decoder_input_values: batch text 32"),
    "base tvp": _written("input_ids: 1 text < 99; pixel_values: 1 4 3 64 64"),  # of one film
    "base vibevoice_acoustic_tokenizer": _written(_SOUND, samples=9600),
    "base vibevoice_acoustic_tokenizer_encoder": _written("hidden_states: batch 1 samples", samples=9600),
    "base vibevoice_acoustic_tokenizer_decoder": _written("hidden_states: batch 32 frames"),
    "base univnet": _written("input_features: batch frames 16; noise_sequence: batch frames 8", frames=16),
    "base voxtral_encoder": _mel_of_length(256),
    "base voxtral_realtime_encoder": _written("input_features: batch 16 frames", frames=80),
    "base xclip": _written(f"{_WORDS}; pixel_values: batch 8 3 32 32"),
    "base xcodec": _channel_of_sound,
    "contrastive blip-2": _written(
        "input_ids: batch tokens < 99; pixel_values: batch 3 32 32; attention_mask: batch tokens mask"
    ),
    "pretraining hiera": _written("pixel_values: batch 3 224 224; noise: batch 49 image"),
    **dict.fromkeys(
        (f"audio {name}" for name in "data2vec-audio unispeech-sat wav2vec2 wav2vec2-conformer wavlm".split()),
        _longer_waveform,
    ),
}
