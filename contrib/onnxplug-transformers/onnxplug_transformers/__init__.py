"""transformers' caches as inputs and outputs of exported models: the plugin, and functions on caches for calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnxplug import Domain, ModelSource, PluginInfo, Rule, hookimpl

__all__ = ["cache_names", "cache_shapes", "empty_cache", "merged_cache"]


@hookimpl
def onnxplug_patches() -> list[Callable[[], Any]]:
    """Patches that give models forms that torch.export can capture; each module names its models, and why.

    The caches become pytree nodes: torch.export takes them apart into tensors, and puts them together. Loops over the
    example's experts, steps, chunks, images or series, and branches on sizes and values, become algebra of tensors, or
    scans.
    """
    models, place = "transformers.models.", "onnxplug_transformers"
    return [
        _where_used("transformers.cache_utils", f"{place}.windows:capturable_caches"),
        _where_used("transformers.integrations.moe", f"{place}.experts:exportable_experts"),
        _where_used(models, f"{place}.recurrences:exportable_recurrences"),
        _where_used(models, f"{place}.shifted_windows:windows_of_any_size"),
        _where_used(models, f"{place}.sizes:dynamic_sizes"),
        _where_used(models, f"{place}.positions:positions_of_any_length"),
        _where_used(models, f"{place}.packed_images:images_of_any_size"),
        _where_used(models, f"{place}.packed_squares:squares_of_any_number"),
        _where_used(f"{models}radio.modeling_radio", f"{place}.radio_images:radio_images_of_any_size"),
        _where_used(models, f"{place}.packed_audio:audio_of_any_length"),
        _where_used(models, f"{place}.padded_images:padded_images_of_any_size"),
        _where_used(models, f"{place}.tiled_images:tiled_images_of_any_size"),
        _where_used(models, f"{place}.real_images:any_number_of_real_images"),
        _where_used(models, f"{place}.sized_images:sized_images_of_any_number"),
        _where_used(f"{models}emu3", f"{place}.coded_images:codes_of_any_number_of_images"),
        _where_used(models, f"{place}.joined_images:joined_images_of_any_number"),
        _where_used(models, f"{place}.chosen_patches:patches_chosen_by_values"),
        _where_used(models, f"{place}.cached_texts:texts_without_a_cache"),
        _where_used(models, f"{place}.keypoints:any_number_of_keypoints"),
        _where_used(models, f"{place}.chunked_attention:chunks_of_any_text"),
        _where_used(models, f"{place}.sliding_windows:windows_of_any_text"),
        _where_used(f"{models}aimv2", f"{place}.bidirectional:masks_of_both_directions"),
        _where_used(f"{models}gemma", f"{place}.bidirectional:masks_of_both_directions"),
        _where_used(f"{models}phi4_multimodal", f"{place}.bidirectional:masks_that_are_causal"),
        _where_used(f"{models}hiera", f"{place}.kept_windows:windows_that_are_kept"),
        _where_used(f"{models}nemotron3_", f"{place}.diarization:recordings_of_any_length"),
        _where_used(f"{models}sam3", f"{place}.box_biases:boxes_of_any_image"),
        _where_used(f"{models}slane", f"{place}.tables:tables_of_any_length"),
        _where_used(f"{models}timesfm", f"{place}.series:any_number_of_series"),
        _where_used(f"{models}pe_audio_video", f"{place}.aligned:frames_aligned_at_once"),
        _where_used(f"{models}evolla", f"{place}.proteins:proteins_read_by_masks"),
        _where_used(f"{models}fastspeech2_conformer", f"{place}.durations:frames_of_any_duration"),
    ]


def _where_used(module: str, patch: str) -> Callable[[], Any]:
    """A patch that does nothing, and imports nothing, unless a module whose name begins with ``module`` is in use.

    A version of transformers that lacks a name that the patch needs is left as it is.
    """

    def entered() -> Any:
        import sys
        from contextlib import nullcontext
        from pkgutil import resolve_name

        if not any(name.startswith(module) for name in sys.modules):
            return nullcontext()
        try:
            patched = resolve_name(patch)
        except ImportError as error:
            if not (error.name or "").startswith("transformers"):
                raise
            return nullcontext()
        return patched()

    entered.__qualname__ = patch  # its name in errors
    return entered


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's API version, its requirements, and the library that it is for."""
    return PluginInfo(api=1, requires=["transformers>=5.21"], libraries=("transformers",))


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The package's own operators."""
    place = "onnxplug_transformers"
    return [
        Rule("onnxplug_transformers::matmul_nbits", f"{place}.four_bits:convert", domains={"com.microsoft": 1}),
        Rule("onnxplug_transformers::gather_nbits", f"{place}.four_bits:convert_gather", domains={"com.microsoft": 1}),
        Rule("onnxplug_transformers::experts_nbits", f"{place}.four_bit_experts:convert", domains={"com.microsoft": 1}),
        Rule("onnxplug_transformers::fields", f"{place}.blocks:convert_fields", opset=(18, None)),
        Rule("onnxplug_transformers::filled", f"{place}.blocks:convert_filled"),
        Rule("onnxplug_transformers::group_query_attention", f"{place}.fused:convert", domains={"com.microsoft": 1}),
        Rule("onnxplug_transformers::low_rank", f"{place}.adapters:convert"),
        Rule("onnxplug_transformers::written", f"{place}.static:convert", opset=(None, 23)),
        Rule("onnxplug_transformers::written", f"{place}.static:convert_at_once", opset=(24, None)),
        Rule("onnxplug_transformers::in_front", f"{place}.fused:convert_in_front"),
        Rule("onnxplug_transformers::places", f"{place}.fused:convert_places"),
        Rule("onnxplug_transformers::moved_back", f"{place}.fused:convert_moved_back"),
        Rule("onnxplug_transformers::rows_at", f"{place}.fused:convert_rows_at"),
    ]


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """ONNX Runtime's domain. Its schemas live in ONNX Runtime, not in onnx."""
    return [Domain("com.microsoft", 1)]


@hookimpl
def onnxplug_sources() -> list[ModelSource]:
    """``transformers:FOLDER`` on the command line."""
    place = "onnxplug_transformers.command"
    return [ModelSource("transformers", f"{place}:load", f"{place}:export", help="FOLDER is one of save_pretrained.")]


def cache_shapes(cache: Any, batch: str = "batch", past: str = "past", source: str = "source") -> Any:
    """The part of ``dynamic_shapes`` that belongs to a cache.

    A layer with a sliding window of W tokens keeps ``min(past, W - 1)`` of them. Where every layer has a window, the number of
    tokens seen is an input and an output of its own, after the tensors of the cache.

    Args:
        cache: A ``DynamicCache``, ``StaticCache`` or ``EncoderDecoderCache``.
        batch: Name of the batch dimension.
        past: Name of the number of tokens seen.
        source: Name of the encoder's length, in the cross-attention half of an encoder-decoder cache.

    Returns:
        An entry for each tensor of the cache, in the order in which it is taken apart.

    Raises:
        TypeError: It is another object, or a cache with layers of another kind.
        UsageError: Other code has registered the class with torch's pytree in a form of its own.
    """
    from onnxplug_transformers.caches import shapes

    return shapes(cache, batch, past, source)


def cache_names(cache: Any, prefix: str = "past_key_values") -> list[str]:
    """Names of a cache's tensors as decoders of ONNX have them: ``past_key_values.0.key``, ``past_key_values.0.value``, ...

    The names of the new cache, for ``output_names``, are ``cache_names(cache, "present")``.

    Args:
        cache: A ``DynamicCache``, ``StaticCache`` or ``EncoderDecoderCache``.
        prefix: The beginning of each name.

    Returns:
        A name for each tensor of the cache, in the order in which it is taken apart; the names of an encoder-decoder
        cache are ``past_key_values.0.decoder.key`` and ``past_key_values.0.encoder.key``.

    Raises:
        TypeError: It is another object, or a cache with layers of another kind.
    """
    from onnxplug_transformers.caches import names

    return names(cache, prefix)


def empty_cache(cache: Any) -> Any:
    """A cache of the same structure that has seen no tokens, for the first call of an exported decoder.

    Args:
        cache: A cache with tensors, of any number of tokens.

    Returns:
        A new cache: keys and values of length 0, or zeros where their length is fixed; states of linear attention are zero.

    Raises:
        TypeError: It is another object, or a cache with layers of another kind.
    """
    from onnxplug_transformers.caches import emptied

    return emptied(cache)


def merged_cache(cache: Any) -> Any:
    """Marks an encoder-decoder cache so that one graph serves the first step and all later steps.

    The cross-attention then reads the keys and values in the cache, followed by the keys and values of the encoder's
    states. The first step takes an empty cache and the encoder's states, later steps the cache and states of length 0.

    Args:
        cache: An ``EncoderDecoderCache`` with tensors in both halves.

    Returns:
        The same cache.

    Raises:
        TypeError: It is another object.
    """
    from onnxplug_transformers.caches import mark_merged

    return mark_merged(cache)
