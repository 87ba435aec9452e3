"""Pipelines of diffusers in ONNX: the plugin. Importing it imports neither torch nor diffusers."""

from __future__ import annotations

from onnxplug import LibraryPatch, ModelSource, PluginInfo, hookimpl


@hookimpl
def onnxplug_sources() -> list[ModelSource]:
    """``diffusers:FOLDER`` on the command line."""
    place = "onnxplug_diffusers.command"
    about = "FOLDER is one of a pipeline's save_pretrained."
    return [ModelSource("diffusers", f"{place}:load", f"{place}:export", help=about)]


@hookimpl
def onnxplug_patches() -> list[LibraryPatch]:
    """Images of any size, any number of them, and mixtures of experts."""
    patches = {
        "attention_processor": "batches:mochi",
        "autoencoders.autoencoder_kl_mochi": "batches:mochi_autoencoder",
        "embeddings": "sizes:places_of_any_size",
        "upsampling": "sizes:of_any_size",
        "autoencoders.autoencoder_kl_hunyuanvideo15": "sizes:hunyuan_video",
        "transformers.transformer_chroma": "sizes:chroma",
        "transformers.transformer_cosmos": "sizes:cosmos",
        "transformers.transformer_hidream_image": "sizes:hidream",
        "transformers.transformer_hunyuan_video15": "batches:hunyuan_video",
        "transformers.transformer_lumina2": "lumina2:of_any_batch",
        "transformers.transformer_omnigen": "sizes:omnigen",
    }
    return [
        LibraryPatch((f"diffusers.models.{module}",), f"onnxplug_diffusers.{patch}")
        for module, patch in patches.items()
    ]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The plugin's API version, its requirements, and the library that it is for."""
    return PluginInfo(api=1, requires=["diffusers>=0.35"], libraries=("diffusers",))
