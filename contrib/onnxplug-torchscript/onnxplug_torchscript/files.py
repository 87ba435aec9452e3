"""Models of TorchScript, and their files."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onnxplug import OnnxplugError
from onnxplug.text import counted


def is_script(model: Any) -> bool:
    """Whether a model is a ScriptModule or a ScriptFunction."""
    return isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction)


def load(path: str) -> Any:
    """The ScriptModule of a file of ``torch.jit.save``, on the CPU.

    Args:
        path: The file.

    Raises:
        OnnxplugError: The file holds no script. The error describes its content, and how to export a model with it.
    """
    try:
        return torch.jit.load(path, map_location="cpu")
    except (RuntimeError, ValueError) as error:
        content, way = _described(path)
        raise OnnxplugError(f"{path} is {content}, and no script of torch.jit.save", hint=way) from error


def _described(path: str) -> tuple[str, str]:
    """The content of a file in words, and a hint how to export its model."""
    way = "file.py:make as TARGET, where make() builds the module, gives it these weights and returns (module, inputs)."
    try:
        held = _tensors_of_safetensors(path) if path.endswith(".safetensors") else _tensors_of_pickle(path)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        content = f"a pickled {named[1]}" if named else "a file of pickled objects"
        loaded = f"torch.load({path!r}, weights_only=False)"
        way = f"file.py:make as TARGET, where make() returns ({loaded}, inputs); it runs the file's code."
        return content, way
    except Exception as error:  # readers raise any error for files of another kind
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"a file that can't be read ({reason})", "Was it copied to its end?"
    if not held:
        return "a file of torch.save without tensors", way
    name, shape = next(iter(held.items()))
    return f"a file of {counted(len(held), 'tensor')}, the first of which is {name} {shape}", way


def _tensors_of_safetensors(path: str) -> dict[str, list[int]]:
    """Shapes of tensors by name, from the header of the file."""
    with Path(path).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, Path(path).stat().st_size)))
    return {name: list(about["shape"]) for name, about in header.items() if name != "__metadata__"}


def _tensors_of_pickle(path: str) -> dict[str, list[int]]:
    """Shapes of tensors by name, of a dictionary and the dictionaries within it."""
    held: dict[str, list[int]] = {}
    waiting = [("", torch.load(path, map_location="meta", weights_only=True))]
    while waiting:
        name, value = waiting.pop(0)
        if isinstance(value, torch.Tensor):
            held[name or "tensor"] = list(value.shape)
        elif isinstance(value, Mapping):
            waiting += [(f"{name}.{key}".strip("."), item) for key, item in value.items()]
    return held
