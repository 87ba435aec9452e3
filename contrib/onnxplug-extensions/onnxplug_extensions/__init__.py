"""Text, images and sound as inputs of an ONNX file: the plugin. Importing it imports neither torch nor onnxruntime-extensions."""

from __future__ import annotations

from typing import Any

from onnxplug import Domain, OpSample, OrtLibrary, PluginInfo, Rule, hookimpl

__all__ = ["Detokenizer", "Image", "Labels", "LogMel", "Pixels", "Sound", "Tokenizer"]

#: The domain of onnxruntime-extensions' operators.
DOMAIN = "ai.onnx.contrib"
#: The domain of its operators on images.
IMAGES = "com.microsoft.extensions"
REQUIRED = "onnxruntime-extensions>=0.15.2,<0.16"
_HOME = {
    "Tokenizer": "tokenizers",
    "Detokenizer": "decoding",
    "Image": "images",
    "Labels": "decoding",
    "LogMel": "sound",
    "Pixels": "images",
    "Sound": "sound",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


@hookimpl
def onnxplug_rules() -> list[Rule]:
    """The translations: each asks the processor that its operator names."""
    return [
        Rule(f"onnxplug_extensions::{name}", f"{__name__}.{module}:convert_{name}", opset=(18, None))
        for name, module in _OPERATORS.items()
    ]


#: Operators to the modules of their rules.
_OPERATORS = {
    **dict.fromkeys(("tokenize", "detokenize", "named"), "operators"),
    "decode_sound": "sound",
    "decode_image": "images",
}


@hookimpl
def onnxplug_domains() -> list[Domain]:
    """The domains of onnxruntime-extensions, whose schemas are in its library."""
    return [Domain(DOMAIN, 1), Domain(IMAGES, 1)]


@hookimpl
def onnxplug_runtime() -> list[OrtLibrary]:
    """The library of onnxruntime-extensions."""
    return [OrtLibrary(_library, domains=(DOMAIN, IMAGES))]


def _library() -> str:
    from onnxplug_extensions.library import library_path

    return library_path()


@hookimpl
def onnxplug_samples() -> list[OpSample]:
    """Inputs to test the operators with."""
    from onnxplug_extensions.samples import samples

    return samples()


@hookimpl
def onnxplug_info() -> PluginInfo:
    """The operators' namespace, and the version of onnxruntime-extensions that the package requires."""
    return PluginInfo(api=1, namespaces=("onnxplug_extensions",), requires=[REQUIRED])
