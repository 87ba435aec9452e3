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
    """Images of any size, and any number of them."""
    hunyuan = "diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15"
    return [
        LibraryPatch(("diffusers.models.upsampling",), "onnxplug_diffusers.sizes:of_any_size"),
        LibraryPatch((hunyuan,), "onnxplug_diffusers.sizes:of_any_length"),
    ]


@hookimpl
def onnxplug_info() -> PluginInfo:
    """What it is for."""
    return PluginInfo(api=1, requires=["diffusers>=0.35"], libraries=("diffusers",))
