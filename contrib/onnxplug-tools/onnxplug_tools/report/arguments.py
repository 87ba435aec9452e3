"""The arguments of an export in a few words each: dtypes and shapes of tensors, never their values."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch

from onnxplug.metadata import Metadata
from onnxplug.registry.rule import Rule
from onnxplug_tools.outline.request import Functions

_MOST_ITEMS = 16
_WIDTH = 300
#: Arguments that a report has elsewhere, or that have no meaning for the export.
_LEFT_OUT = ("model", "progress", "registry", "report", "unknown")


def model_name(model: Any) -> str:
    """Class of a model, or the name of a function."""
    named = model if hasattr(model, "__qualname__") else type(model)
    return f"{getattr(named, '__module__', '')}.{named.__qualname__}".removeprefix("builtins.")


def summarised(arguments: Mapping[str, Any], defaults: Any = None) -> dict[str, str]:
    """The arguments that were given, in words.

    Args:
        defaults: The function that was called; arguments at their default are left out.
    """
    parameters = inspect.signature(defaults).parameters if callable(defaults) else {}
    summaries = {}
    for name, value in arguments.items():
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        is_default = value is default or (isinstance(value, str | int | float | tuple) and _equal(value, default))
        if name not in _LEFT_OUT and not is_default and not (value is None or value == {} or value == ()):
            summaries[name] = in_words(value)
    return summaries


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and len(repr(value)) < _WIDTH and repr(value) == repr(default)


def in_words(value: Any, depth: int = 0) -> str:
    """A value: dtype and shape of a tensor, the name of a function or class, the items of a list or dict."""
    text = _in_words(value, depth)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"


def _in_words(value: Any, depth: int) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{dtype}[{', '.join(str(size) for size in value.shape)}]{device}"
    if value is None or isinstance(value, bool | int | float | str | complex):
        return repr(value)
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Rule):
        return f"Rule({value.op!r})"
    if isinstance(value, Metadata | Functions) or type(value).__module__.startswith("torch.export"):
        return repr(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return _items(value, depth)
    if isinstance(value, torch.nn.Module):
        return type(value).__qualname__
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return type(value).__qualname__


def _items(value: Any, depth: int) -> str:
    if depth > 3:
        return "…"
    if isinstance(value, Mapping):
        items = [f"{_in_words(k, depth + 1)}: {in_words(v, depth + 1)}" for k, v in list(value.items())[:_MOST_ITEMS]]
        opening, closing = "{", "}"
    else:
        items = [in_words(v, depth + 1) for v in list(value)[:_MOST_ITEMS]]
        opening, closing = ("(", ")") if isinstance(value, tuple) else ("[", "]")
    if len(value) > _MOST_ITEMS:
        items.append(f"… {len(value) - _MOST_ITEMS} more")
    comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
    return f"{opening}{', '.join(items)}{comma}{closing}"
