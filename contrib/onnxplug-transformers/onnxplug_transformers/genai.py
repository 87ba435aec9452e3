"""``genai_config.json``: the configuration of a folder for onnxruntime-genai."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxplug import UsageError
from onnxplug_transformers.models import PACKED

if TYPE_CHECKING:
    from onnxplug_transformers.images_and_text import Parts

#: Settings of generation that transformers and onnxruntime-genai have under the same name.
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
#: Inputs of images to their names in onnxruntime-genai, where these differ.
_VISION = {"pixel_attention_mask": "attention_mask"}
#: Mean and deviation of images where a processor names none: CLIP's.
_MEAN, _STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
#: Kinds of layers with states of convolutions and recurrences.
_STATES = {"linear_attention", "hybrid"}
#: Frames of sound that onnxruntime-genai gives Whisper.
SPEECH_FRAMES = 3000


def genai_config(
    model: Any, *, positions: bool, layers: int, heads: int | None, head_size: int | None, shared_buffers: bool = False
) -> dict[str, Any]:
    """The contents of ``genai_config.json`` for a decoder.

    The type is ``decoder``: with the names of models onnxruntime-genai connects graphs of another form (gpt2) or
    special cases of other exporters (phi3). States of convolutions without those of recurrences have the type ``lfm2``.

    Args:
        positions: Whether the graph has the input ``position_ids``.
        shared_buffers: Whether the graph writes new keys and values into the buffers of the past keys and values.
    """
    config = model.config.get_text_config()
    generation = model.generation_config
    length = context_length(config)
    inputs = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
    if positions:
        inputs["position_ids"] = "position_ids"
    kinds = list(getattr(config, "layer_types", None) or ())
    convolutions = "conv" in kinds
    states = ["conv"] if convolutions else ["conv", "recurrent"] if not _STATES.isdisjoint(kinds) else []
    about = {
        "type": "lfm2" if convolutions else "decoder",
        **_tokens(config, generation, length),
        "decoder": {
            "filename": "model.onnx",
            "session_options": _SESSION,
            "hidden_size": config.hidden_size,
            "num_attention_heads": getattr(config, "num_attention_heads", heads),
            "num_hidden_layers": layers,
            **({"layer_types": kinds} if convolutions else {}),
            "num_key_value_heads": heads,
            "head_size": head_size,
            "inputs": {
                **inputs,
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
                **{f"past_{state}_names": f"past_key_values.%d.{state}_state" for state in states},
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
                **{f"present_{state}_names": f"present.%d.{state}_state" for state in states},
            },
        },
    }
    search = _search(generation, length, shared_buffers)
    if "recurrent" in states:
        search.pop("num_beams", None)  # these states are not reordered by beams
    return {"model": about, "search": search}


def images_config(model: Any, parts: Parts, processor: str | None) -> dict[str, Any]:
    """The contents of ``genai_config.json`` for a model that reads images and text.

    The type names the loop that calls the three files: onnxruntime-genai has a loop for tokens with one position, and a
    loop for tokens with three.

    Args:
        model: The model.
        parts: Its files.
        processor: The name of the file with the settings for preparing images, if there is such a file.
    """
    config, is_packed = model.config, model.config.model_type in PACKED
    about = genai_config(model, positions=is_packed, layers=parts.layers, heads=parts.heads, head_size=parts.head_size)
    decoder = about["model"]["decoder"]
    decoder["inputs"] = {name: name for name in parts.step.example.input_names if "past" not in name} | {
        name: value for name, value in decoder["inputs"].items() if name.startswith("past")
    }
    features = {"image_features": "image_features"}
    vision: dict[str, Any] = {
        "filename": "vision.onnx",
        "inputs": {_VISION.get(name, name): name for name in parts.images.example.input_names},
        "outputs": features,
    }
    tokens = {}
    if processor is not None:
        vision["config_filename"] = processor
    if is_packed:
        vision["spatial_merge_size"] = config.vision_config.spatial_merge_size
        vision["patch_size"] = config.vision_config.patch_size
        tokens = {
            f"{name}_token_id": getattr(config, f"{name}_token_id") for name in ("image", "video", "vision_start")
        }
    embedding = {
        "filename": "embedding.onnx",
        "inputs": {"input_ids": "input_ids", **features},
        "outputs": {"inputs_embeds": "inputs_embeds"},
    }
    kind = "qwen2_5_vl" if is_packed else "gemma3"
    return {**about, "model": {**about["model"], "type": kind, **tokens, "vision": vision, "embedding": embedding}}


def patches_processor(processor: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, for onnxruntime-genai, of a processor that makes rows of patches, with transformers' numbers.

    Args:
        processor: The contents of ``preprocessor_config.json``.
    """
    patch, merged = processor.get("patch_size", 14), processor.get("merge_size", 2)
    size = processor.get("size") or {}
    pixels = {
        "min_pixels": size.get("shortest_edge") or processor.get("min_pixels") or 56 * 56,
        "max_pixels": size.get("longest_edge") or processor.get("max_pixels") or 28 * 28 * 1280,
    }
    # the size itself is computed from the image's size and the settings that follow
    resize = {"width": patch * merged, "height": patch * merged, "smart_resize": 1, **pixels}
    numbers = {"mean": processor.get("image_mean", _MEAN), "std": processor.get("image_std", _STD), "qwen2_5_vl": 1}
    steps = [
        (True, "decode_image", "DecodeImage", {"color_space": "RGB"}),
        (True, "convert_to_rgb", "ConvertRGB", {}),
        (processor.get("do_resize", True), "resize", "Resize", {**resize, "patch_size": patch, "merge_size": merged}),
        (
            processor.get("do_rescale", True),
            "rescale",
            "Rescale",
            {"rescale_factor": processor.get("rescale_factor", 1 / 255)},
        ),
        (processor.get("do_normalize", True), "normalize", "Normalize", numbers),
        (
            True,
            "patch_image",
            "PatchImage",
            {
                "patch_size": patch,
                "temporal_patch_size": processor.get("temporal_patch_size", 2),
                "merge_size": merged,
            },
        ),
    ]
    transforms = [_operation(name, kind, attributes) for is_done, name, kind, attributes in steps if is_done]
    return {"processor": {"name": "qwen2_5_image_processor", "transforms": transforms}}


def _operation(name: str, kind: str, attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {"operation": {"name": name, "type": kind, **({"attrs": attributes} if attributes else {})}}


def speech_config(model: Any) -> dict[str, Any]:
    """The contents of ``genai_config.json`` for Whisper: an encoder, whose states' keys and values a decoder reads."""
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
    """The contents of ``audio_processor_config.json``: the steps from a sound file to Whisper's spectrogram.

    Args:
        processor: The contents of ``preprocessor_config.json``.
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
    return {"feature_extraction": {"sequence": [_operation(*step) for step in steps]}}


def _tokens(config: Any, generation: Any, length: int) -> dict[str, Any]:
    """The size of the vocabulary, the greatest length of a text, and the tokens at its ends."""
    eos = generation.eos_token_id  # transformers stops at these tokens; the configuration's are not used
    ends = [eos] if isinstance(eos, int) else list(eos or ())
    pad = _first(generation.pad_token_id, getattr(config, "pad_token_id", None))
    start = _first(generation.bos_token_id, config.bos_token_id)
    return {
        "vocab_size": config.vocab_size,
        "context_length": length,
        "pad_token_id": pad if pad is not None else (ends[0] if ends else 0),
        # onnxruntime-genai needs an end, and takes token 0 where there is none; no text goes on after padding.
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
    if set(getattr(config, "layer_types", None) or ()) == {"linear_attention"}:
        return 2**20  # without attention there is no limit, and onnxruntime-genai asks for one
    raise UsageError(
        f"{type(config).__name__} does not say how many tokens a text may have",
        hint="Set max_position_embeddings in its config.json.",
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
