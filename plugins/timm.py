"""``timm:NAME`` on the command line."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.text import did_you_mean


def load(name: str, *, pretrained: bool) -> tuple[Any, tuple[Any, ...]]:
    """A model of timm with an image of the model's own size.

    Raises:
        UsageError: timm has no such model.
        OnnxplugError: timm can't be imported, or can't load the trained weights.
    """
    try:
        import timm
    except Exception as error:
        raise OnnxplugError(f"timm can't be imported: {error}", hint=_remedy(error)) from error
    import torch

    try:
        model = timm.create_model(name, pretrained=pretrained).eval()
    except Exception as error:
        if not pretrained and isinstance(error, RuntimeError):
            near = did_you_mean(name, timm.list_models(), otherwise="`timm.list_models()` names those that there are.")
            raise UsageError(f"timm has no model {name!r}: {error}", hint=near) from None
        if not pretrained:
            raise
        raise OnnxplugError(
            f"timm can't load the trained weights of {name}: {type(error).__name__}: {error}",
            hint="They are downloaded at first use. Without --pretrained the weights are random.",
        ) from error
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return model, (torch.randn(2, *size),)


def _remedy(error: Exception) -> str:
    """The hint where timm can't be imported."""
    if isinstance(error, ModuleNotFoundError) and error.name == "timm":
        return "pip install timm"
    if "torchvision::" in str(error):  # an operator that a build of torchvision for another torch lacks
        versions = " and ".join(f"{name} {version(name)}" for name in ("torchvision", "torch"))
        return f"timm needs torchvision, and {versions} do not fit one another: install the torchvision of that torch."
    return "timm is installed; `python -c 'import timm'` shows what is wrong with it."
