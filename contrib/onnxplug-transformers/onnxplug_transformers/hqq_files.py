"""Checkpoints of HQQ, ``weight = (number - zero) * scale`` with zeros that need not be integers.

They are folders with ``qmodel.pt``, as the package hqq saves them, or with safetensors in which each layer has ``W_q``, ``scale``,
``zero`` and the rest, as transformers 4 did. Numbers are in groups along the rows of the matrix (axis 1) or across them (axis 0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplug import OnnxplugError, UsageError
from onnxplug_transformers.blocks import BlockLinear, Blocks, Form, Numbers
from onnxplug_transformers.folders import read_json
from onnxplug_transformers.four_bits import BLOCK_SIZES, joint_layers, place
from onnxplug_transformers.weightless import load_around

#: Bits of a number, and bits of a word that numbers fill, by the names of packings.
_PACKINGS = {"8bit_u8": (8, 8), "4bit_u8": (4, 8), "2bit_u8": (2, 8), "1bit_u8": (1, 8), "3bit_32": (3, 30)}


def load_hqq(folder: Path, config: Any, loader: Any, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a folder, its linear layers in the checkpoint's numbers.

    Args:
        dtype: Element type of the tensors that are not quantised.

    Returns:
        The model, and transformers' information on the loading.
    """
    states, tensors = _read(folder)
    with torch.device("meta"):
        kind = type(loader.from_config(config))
    loaded, about = load_around(kind, config, tensors, states, dtype)
    biases = {name: loaded.get_submodule(name).bias for name in states}
    layers = {name: _layer(name, state, biases[name]) for name, state in states.items()}
    kinds = {
        name: (found.form, found.tensors["numbers"].shape[1:]) if isinstance(found, Blocks) else None
        for name, found in layers.items()
    }
    for group in joint_layers(kinds):
        parts = [layers[name] for name in group]
        blocks = [part for part in parts if isinstance(part, Blocks)]
        layer: Any = BlockLinear(blocks, [biases[name] for name in group]) if blocks else parts[0]
        place(loaded, group, layer)
    return loaded, about


def _read(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
    """The entries of each quantised linear layer, by its name, and the other tensors."""
    states: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    if (folder / "qmodel.pt").is_file():
        whole = torch.load(folder / "qmodel.pt", map_location="cpu", weights_only=True, mmap=True)
        for name, state in whole.items():
            if "W_q" in state:
                states[name] = dict(state)
                state = {"bias": state["bias"]} if state.get("bias") is not None else {}
            tensors |= {f"{name}.{key}": tensor for key, tensor in state.items()}
        return states, tensors
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    files = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    for file in files:
        tensors |= load_file(folder / file)
    for name in [key.removesuffix(".W_q") for key in tensors if key.endswith(".W_q")]:
        keys = [key for key in tensors if re.fullmatch(rf"{re.escape(name)}\.(?!bias$)\w+", key)]
        states[name] = {key.removeprefix(f"{name}."): tensors.pop(key) for key in keys}
    return states, tensors


def _layer(name: str, state: Mapping[str, Any], bias: torch.Tensor | None) -> Blocks | Numbers:
    """A linear layer, or the blocks of its matrix."""
    about = {key: _plain(key, value) for key, value in state.items()}
    packing = about.get("packing")
    if about.get("quant_scale") or about.get("quant_zero") or "zero_scale" in about or packing not in _PACKINGS:
        raise UsageError(
            f"{name} has scales or zeros in few bits, or numbers packed as {packing!r}, which is not taken",
            hint=f"HqqConfig's own settings are: {', '.join(_PACKINGS)}, with scales and zeros in floats.",
        )
    (rows, columns), bits = about["shape"], _PACKINGS[packing][0]
    numbers, scales, zeros = _numbers(about["W_q"], packing), about["scale"], about["zero"]
    across = scales.shape[0] == 1 and about["axis"] == 0
    size = rows * columns // (scales.numel() or 1)
    numbers = numbers[: size if across else scales.numel()]
    if numbers.numel() != rows * columns or zeros.shape != scales.shape:
        raise OnnxplugError(f"{name} has {numbers.numel()} numbers, and is said to be {rows} by {columns}")
    block = next((s for s in reversed(BLOCK_SIZES) if size % s == 0), None)
    if across or block is None or columns % size:
        return Numbers(numbers, bits, scales, zeros, (rows, columns), bias)
    numbers = numbers.reshape(rows, -1, block)
    scales, zeros = (x.reshape(rows, -1).repeat_interleave(size // block, 1) for x in (scales, zeros))
    return Blocks(Form(block, bits), {"numbers": numbers, "scales": scales, "zeros": zeros})


def _plain(key: str, value: Any) -> Any:
    """The plain value of an entry: safetensors has all entries as tensors, strings as their bytes."""
    if not isinstance(value, torch.Tensor) or key in ("W_q", "scale", "zero"):
        return value.detach() if isinstance(value, torch.Tensor) else value
    if key in ("packing", "unpack_view_dtype", "compute_dtype"):
        return bytes(value.tolist()).decode()
    return value.tolist()


def _numbers(packed: torch.Tensor, packing: str) -> torch.Tensor:
    """[rows, columns] bytes: first the numbers in the highest bits of all words, then in the next bits, and so on."""
    bits, length = _PACKINGS[packing]
    words = packed.view(torch.uint8) if length == 8 else packed.view(torch.int32)
    places = torch.arange(length - bits, -1, -bits, dtype=words.dtype)[:, None, None]
    return ((words >> places) & ((1 << bits) - 1)).flatten(0, 1).to(torch.uint8)
