"""Folders of sentence-transformers: the transformer, and the modules of ``modules.json`` that make one vector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplug import OnnxplugError, UsageError
from onnxplug_transformers.folders import SentenceModule, read_json, sentence_modules
from onnxplug_transformers.tasks import Task

#: ``pooling_mode`` to NAME of ``pooling_mode_NAME`` in older files. The vectors of several modes stand in this order.
_POOLINGS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


class Sentences(nn.Module):
    """From tokens to the states of a transformer, and to one vector for each text.

    Args:
        folder: The folder with ``modules.json``.
    """

    def __init__(self, model: nn.Module, folder: Path) -> None:
        super().__init__()
        self.transformer = Task(model)
        self.parts = nn.ModuleList(_made(folder, module) for module in sentence_modules(folder)[1:])
        if not any(isinstance(part, Pooling) for part in self.parts):
            raise UsageError(f"{folder / 'modules.json'} has no Pooling, which makes one vector of the tokens'")

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """``last_hidden_state``, [batch, sequence, width], and ``sentence_embedding``, [batch, width]."""
        states = self.transformer(**inputs)["last_hidden_state"]
        mask = inputs["attention_mask"]
        vector = states
        for part in self.parts:
            vector = part(vector, mask) if isinstance(part, Pooling) else part(vector)
        return {"last_hidden_state": states, "sentence_embedding": vector}


class Pooling(nn.Module):
    """One vector of the tokens that the mask shows.

    Args:
        modes: The ways of pooling; the vectors of several ways stand side by side.
    """

    def __init__(self, modes: list[str]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """[batch, width] of [batch, sequence, width]."""
        return torch.cat([_pooled(mode, states, attention_mask) for mode in self.modes], 1)


def _pooled(mode: str, states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    shown = attention_mask[..., None].to(states.dtype)
    places = torch.arange(1, states.shape[1] + 1, device=states.device)
    if mode == "cls":
        return states[:, 0]
    if mode == "max":
        return states.masked_fill(shown == 0, -1e9).amax(1)
    if mode == "lasttoken":
        last = (places * attention_mask).argmax(1)
        return states.gather(1, last[:, None, None].expand(-1, 1, states.shape[2]))[:, 0]
    weights = shown * places[:, None].to(states.dtype) if mode == "weightedmean" else shown
    total = weights.sum(1).clamp(min=1e-9)
    return (states * weights).sum(1) / (total.sqrt() if mode == "mean_sqrt_len_tokens" else total)


class Normalize(nn.Module):
    """Vectors of length 1."""

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """[batch, width]."""
        return nn.functional.normalize(vectors, dim=1)


def _made(folder: Path, module: SentenceModule) -> nn.Module:
    place = folder / module.path
    if module.kind == "Pooling":
        return _pooling(place, read_json(place / "config.json"))
    if module.kind == "Dense":
        about = read_json(place / "config.json")
        linear = nn.Linear(about["in_features"], about["out_features"], bias=about.get("bias", True))
        _load(linear, place, "linear")
        return nn.Sequential(linear, _activation(place, about.get("activation_function")))
    if module.kind == "LayerNorm":
        norm = nn.LayerNorm(read_json(place / "config.json")["dimension"])
        _load(norm, place, "norm")
        return norm
    if module.kind == "Normalize":
        return Normalize()
    if module.kind == "Dropout":
        return nn.Identity()
    raise UsageError(
        f"{folder / 'modules.json'} has a module of the kind {module.type}, which is unknown here",
        hint="Known are Transformer (the first), Pooling, Dense, LayerNorm, Normalize and Dropout. "
        "--task feature-extraction exports the transformer alone.",
    )


def _pooling(place: Path, about: Mapping[str, Any]) -> Pooling:
    named = about.get("pooling_mode")
    if named is None:
        modes = [mode for mode, name in _POOLINGS.items() if about.get(f"pooling_mode_{name}")]
        modes += [
            key for key, value in about.items() if key.startswith("pooling_mode_") and value and not _is_known(key)
        ]
    else:
        poolings = [named] if isinstance(named, str) else list(named)
        modes = sorted(poolings, key=[*_POOLINGS, *poolings].index)
    if not modes or not _POOLINGS.keys() >= set(modes):
        raise UsageError(
            f"{place / 'config.json'} pools by {', '.join(modes) or 'nothing'}, which is unknown here",
            hint=f"Known are {', '.join(_POOLINGS)}.",
        )
    if about.get("include_prompt") is False:
        raise UsageError(
            f"{place / 'config.json'} leaves the tokens of a prompt out (include_prompt), whose number a graph does not know",
            hint="--task feature-extraction exports the transformer alone.",
        )
    return Pooling(modes)


def _is_known(key: str) -> bool:
    return key.removeprefix("pooling_mode_") in _POOLINGS.values()


def _activation(place: Path, name: Any) -> nn.Module:
    """The activation of a class of torch.nn, by its path."""
    if name is None:
        return nn.Tanh()
    path, _, last = str(name).rpartition(".")
    kind = getattr(nn, last, None)
    if not path.startswith("torch.nn.modules.") or not isinstance(kind, type) or not issubclass(kind, nn.Module):
        raise UsageError(f"{place / 'config.json'} has the activation {name}, which is none of torch.nn")
    return kind()


def _load(module: nn.Module, place: Path, name: str) -> None:
    """Loads the weights of a module, which are called NAME.weight and NAME.bias."""
    try:
        if (place / "model.safetensors").is_file():
            from safetensors.torch import load_file

            weights = load_file(place / "model.safetensors")
        else:
            weights = torch.load(place / "pytorch_model.bin", map_location="cpu", weights_only=True)
        module.load_state_dict({key.removeprefix(f"{name}."): value for key, value in weights.items()})
    except Exception as error:
        raise OnnxplugError(f"{place}: the weights can't be loaded: {type(error).__name__}: {error}") from error
