"""Small models of libraries that the development environment lacks: each library lies in a folder of ``out/models-packages``."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.utils._pytree import tree_map

from tests.libraries.rows import LIBRARIES
from tests.models.diffusion import COMMON, TRANSFORMERS
from tests.models.others import KORNIA, MONAI, OPEN_CLIP, SEGMENTATION_MODELS, ULTRALYTICS
from tests.models.small import SIZES, Small
from tests.models.unets import AUTOENCODERS, CONTROLNETS, UNETS
from tests.support.vision_kernels import define_vision_kernels
from tests.support.zoo import stirred

#: The kinds, which are libraries, each with its models by name.
OTHERS: Mapping[str, Mapping[str, Small]] = {
    "diffusers": {**TRANSFORMERS, **UNETS, **CONTROLNETS, **AUTOENCODERS},
    "open_clip": OPEN_CLIP,
    "segmentation_models_pytorch": SEGMENTATION_MODELS,
    "monai": MONAI,
    "kornia": KORNIA,
    "ultralytics": ULTRALYTICS,
}
#: The packages of contrib/ that belong to each kind.
PLUGINS_OF_OTHERS: Mapping[str, tuple[str, ...]] = {
    "diffusers": ("onnxplug-transformers", "onnxplug-diffusers"),
    **dict.fromkeys(list(OTHERS)[1:], ("onnxplug-torchvision",)),
    "kornia": ("onnxplug-torchvision", "onnxplug-kornia"),
}
_KINDS_OF_NUMBERS = ("mask", "image", "flags")
PACKAGES = Path(__file__).resolve().parents[2] / "out/models-packages"
_PINNED = {library.module: (f"{library.name}=={library.version}", *library.needs) for library in LIBRARIES}
#: The projects of PyPI in a kind's folder, installed without their dependencies.
PROJECTS: dict[str, tuple[str, ...]] = {
    **{kind: _PINNED[kind] for kind in OTHERS if kind in _PINNED},
    "diffusers": ("diffusers==0.42.1", "importlib_metadata==10.2.0", "zipp==4.1.2"),
    "open_clip": ("open_clip_torch==3.3.0", "ftfy==6.3.1", "wcwidth==0.9.4"),
}


def install(kind: str) -> bool:
    """Whether the library of a kind is there, after an attempt to fetch it."""
    folder = PACKAGES / kind
    if folder.is_dir():
        return True
    fresh = folder.with_suffix(".part")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-deps"]
    if subprocess.run([*pip, "--upgrade", "--target", str(fresh), *PROJECTS[kind]], check=False).returncode:
        return False
    fresh.rename(folder)
    return True


def other_model(kind: str, name: str) -> tuple[nn.Module, dict[str, Any], dict[str, Any]]:
    """A small model of a library with random weights, its arguments and their dynamic dimensions."""
    define_vision_kernels()
    if str(PACKAGES / kind) not in sys.path:
        sys.path.append(str(PACKAGES / kind))
    small = OTHERS[kind][name]
    module, _, attribute = small.target.partition(":")
    make = getattr(importlib.import_module(module), attribute)
    common = COMMON if kind == "diffusers" else {}
    known = inspect.signature(make).parameters
    settings = {key: value for key, value in common.items() if key in known} | dict(small.settings)
    torch.manual_seed(0)
    model = stirred(make(**settings).eval())
    for part in model.modules():
        for key, value in small.attributes.items():
            if hasattr(part, key):
                setattr(part, key, value)
    return model, *draw_arguments(small)


def draw_arguments(small: Small) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of a small model, and the dynamic dimensions of each by axis; ``None`` for constants."""
    arguments: dict[str, Any] = dict(small.constants)
    dynamic: dict[str, Any] = tree_map(lambda _: None, dict(small.constants))
    for part in small.inputs.split(";"):
        name, _, text = part.partition(":")
        arguments[name.strip()] = _drawn(text.split(), small.sizes)
        dynamic[name.strip()] = _dynamic(text.split())
    return arguments, dynamic


def _size(word: str, sizes: Mapping[str, int]) -> int:
    """The size that ``8*height``, ``height`` or ``4`` stands for."""
    factor, _, name = word.rpartition("*")
    return int(factor or 1) * (int(name) if name.isdigit() else {**SIZES, **sizes}[name])


def _drawn(words: list[str], sizes: Mapping[str, int]) -> torch.Tensor:
    below = words.index("<") if "<" in words else None
    kind = words[-1] if words[-1] in _KINDS_OF_NUMBERS else ""
    shape = [_size(word, sizes) for word in (words[:-1] if kind else words[:below])]
    if below is not None:
        return torch.randint(0, int(words[-1]), shape)
    if kind == "mask":  # the second text is shorter than the first
        return (torch.arange(shape[1])[None] < shape[1] - 2 * torch.arange(shape[0])[:, None]).long()
    if kind == "flags":
        return torch.rand(shape) < 0.5
    return torch.rand(shape) if kind == "image" else torch.randn(shape)


def _dynamic(words: list[str]) -> dict[int, Any]:
    """A name for each dimension that isn't a number; its multiple where a factor stands before it."""
    axes: dict[int, Any] = {}
    for axis, word in enumerate(words):
        factor, _, name = word.rpartition("*")
        if word == "<" or word in _KINDS_OF_NUMBERS:
            break
        if not name.isdigit():
            axes[axis] = int(factor) * Dim(name) if factor else name
    return axes
