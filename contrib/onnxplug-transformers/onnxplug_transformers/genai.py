"""``genai_config.json``: what onnxruntime-genai reads of a folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxplug import UsageError

#: Settings of generation that both know, under the same name.
_SEARCH = (
    "do_sample",
    "early_stopping",
    "length_penalty",
    "min_length",
    "no_repeat_ngram_size",
    "num_beams",
    "num_return_sequences",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "diversity_penalty",
)
_SESSION: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": []}
#: Frames of sound that onnxruntime-genai gives Whisper.
SPEECH_FRAMES = 3000


def genai_config(
    model: Any, *, positions: bool, layers: int, heads: int, head_size: int, shared_buffers: bool = False
) -> dict[str, Any]:
    """What ``genai_config.json`` says of a decoder.

    The type is always ``decoder``: with the names of models onnxruntime-genai connects graphs of another form (gpt2) or
    special cases of other exporters (phi3).

    Args:
        positions: Whether the graph has the input ``position_ids``.
        shared_buffers: The graph writes the new keys and values into the buffers of the past ones.
    """
    config = model.config.get_text_config()
    generation = model.generation_config
    length = context_length(config)
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if positions:
        inputs["position_ids"] = "position_ids"
    about = {
        "type": "decoder",
        **_tokens(config, generation, length),
        "decoder": {
            "filename": "model.onnx",
            "session_options": _SESSION,
            "hidden_size": config.hidden_size,
            "num_attention_heads": config.num_attention_heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": heads,
            "head_size": head_size,
            "inputs": {
                **inputs,
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    return {"model": about, "search": _search(generation, length, shared_buffers)}


def images_config(model: Any, *, layers: int, heads: int, head_size: int) -> dict[str, Any]:
    """What ``genai_config.json`` says of a model that reads images and text."""
    about = genai_config(model, positions=False, layers=layers, heads=heads, head_size=head_size)
    given = about["model"]["decoder"]["inputs"]
    about["model"]["decoder"]["inputs"] = {"inputs_embeds": "inputs_embeds", **given}
    features = {"image_features": "image_features"}
    vision = {"filename": "vision.onnx", "inputs": {"pixel_values": "pixel_values"}, "outputs": features}
    embedding = {
        "filename": "embedding.onnx",
        "inputs": {"input_ids": "input_ids", **features},
        "outputs": {"inputs_embeds": "inputs_embeds"},
    }
    return {**about, "model": {**about["model"], "type": "gemma3", "vision": vision, "embedding": embedding}}


def speech_config(model: Any) -> dict[str, Any]:
    """What ``genai_config.json`` says of Whisper: an encoder, whose states' keys and values a decoder reads."""
    config, generation = model.config, model.generation_config
    length = config.max_target_positions

    def part(name: str, layers: int, heads: int, inputs: dict[str, str], outputs: dict[str, str]) -> dict[str, Any]:
        return {
            "filename": f"{name}_model.onnx",
            "session_options": _SESSION,
            "hidden_size": config.d_model,
            "num_attention_heads": heads,
            "num_hidden_layers": layers,
            "num_key_value_heads": heads,
            "head_size": config.d_model // heads,
            "inputs": inputs,
            "outputs": outputs,
        }

    def names(place: str, key: str, half: str) -> dict[str, str]:
        return {f"{place}_{kind}_names": f"{key}.%d.{half}.{kind}" for kind in ("key", "value")}

    heads, layers = config.decoder_attention_heads, config.decoder_layers
    states = {"encoder_hidden_states": "last_hidden_state", **names("cross_present", "past_key_values", "encoder")}
    inputs = {
        "input_ids": "input_ids",
        **names("past", "past_key_values", "decoder"),
        **names("cross_past", "past_key_values", "encoder"),
    }
    outputs = {"logits": "logits", **names("present", "present", "decoder")}
    about = {
        "type": "whisper",
        **_tokens(config, generation, length),
        # its cache of the encoder's keys and values has as many layers as the decoder
        "encoder": part("encoder", layers, heads, {"audio_features": model.main_input_name}, states),
        "decoder": part("decoder", layers, heads, inputs, outputs),
    }
    return {"model": about, "search": _search(generation, length, shared_buffers=False)}


def speech_processor(processor: Mapping[str, Any]) -> dict[str, Any]:
    """What ``audio_processor_config.json`` says: how onnxruntime-genai makes Whisper's spectrogram of a sound file.

    Args:
        processor: What ``preprocessor_config.json`` says.
    """
    window, hop = processor.get("n_fft", 400), processor.get("hop_length", 160)
    spectrum = {"n_fft": window, "frame_length": window, "hop_length": hop}
    mel = {
        "chunk_size": processor.get("chunk_length", 30),
        "hop_length": hop,
        "n_fft": window,
        "n_mel": processor.get("feature_size", 80),
    }
    steps = [("audio_decoder", "AudioDecoder", {}), ("STFT", "STFTNorm", spectrum), ("log_mel", "LogMelSpectrum", mel)]
    operations = [{"operation": {"name": name, "type": kind, **({"attrs": a} if a else {})}} for name, kind, a in steps]
    return {"feature_extraction": {"sequence": operations}}


def _tokens(config: Any, generation: Any, length: int) -> dict[str, Any]:
    """The vocabulary, how long a text may be, and the tokens at its ends."""
    eos = generation.eos_token_id  # what transformers stops at; the configuration's does not count
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    pad = _first(generation.pad_token_id, getattr(config, "pad_token_id", None))
    start = _first(generation.bos_token_id, config.bos_token_id)
    return {
        "vocab_size": config.vocab_size,
        "context_length": length,
        "pad_token_id": pad if pad is not None else (ends[0] if ends else 0),
        # onnxruntime-genai needs one, and takes token 0 where there is none; padding is none that a text goes on after.
        "eos_token_id": ends or [pad or 0],
        **({} if start is None else {"bos_token_id": start}),
    }


def _search(generation: Any, length: int, shared_buffers: bool) -> dict[str, Any]:
    found = {name: getattr(generation, name, None) for name in _SEARCH}
    if not isinstance(found["early_stopping"], bool):  # also "never", which onnxruntime-genai doesn't have
        found["early_stopping"] = None
    if not found["do_sample"]:
        found["temperature"] = found["top_k"] = found["top_p"] = None
    given = {name: value for name, value in found.items() if value is not None}
    return {"max_length": length, **given, "past_present_share_buffer": shared_buffers}


def context_length(config: Any) -> int:
    """How many tokens a text may have."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise UsageError(
        f"{type(config).__name__} does not say how many tokens a text may have",
        hint="Set max_position_embeddings in its config.json.",
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
