"""The operators in PyTorch, and their rules: a processor, which each call names, has the kernel and the ONNX form."""

from __future__ import annotations

import json
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from onnxplug import Unsupported, string_array, string_tensor
from onnxplug_extensions.library import check_library


class Encoder(Protocol):
    """A tokenizer: the token numbers of texts, and the nodes that compute them."""

    #: The number of tokens that every text has, at its beginning and end.
    fewest: int

    def encode(self, texts: list[str], max_length: int) -> list[list[int]]:
        """The tokens of each text, at most ``max_length`` of them unless it is 0."""

    def emit(self, g: Any, texts: Any, max_length: int) -> tuple[Any, Any]:
        """The tokens of all texts, padded at the end, and the mask, as values of a model."""


#: The dtype of tensors of strings in PyTorch.
_STRING = torch.bits16
#: Processors by name, all of a name equal; each module keeps its own alive.
_processors: dict[str, WeakSet[Any]] = {}


class ProcessorModule(nn.Module):
    """A module whose operator finds its processor by a name, also once the module is copied or restored.

    Args:
        name: A name that equal processors share.
        processor: The processor.
    """

    def __init__(self, name: str, processor: Any) -> None:
        super().__init__()
        self._name, self._processor = name, processor
        register(name, processor)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register(self._name, self._processor)


def register(name: str, processor: Any) -> None:
    """Makes a processor known to the operators."""
    _processors.setdefault(name, WeakSet()).add(processor)


def _processor(name: str) -> Any:
    processor = next(iter(_processors.get(name, ())), None)
    if processor is None:
        raise Unsupported(f"the module with {name!r} is gone: keep it until the export is done")
    return processor


def padded(rows: list[list[int]], padding: int, fewest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of numbers, padded at the end to the longest row, and the mask: 1 for their places, 0 for padding.

    Each row has ``fewest`` numbers at least; so do the results of no rows.
    """
    longest = max(map(len, rows), default=fewest)
    tokens = np.full((len(rows), longest), padding, dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return torch.from_numpy(tokens), torch.from_numpy(mask)


@torch.library.custom_op("onnxplug_extensions::tokenize", mutates_args=())
def tokenize(texts: torch.Tensor, tokenizer: str, max_length: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token numbers of a vector of texts and the mask: int64, [texts, longest]."""
    processor = _processor(tokenizer)
    return padded(processor.encode(list(string_array(texts)), max_length), padding, processor.fewest)


@tokenize.register_fake
def _(texts: torch.Tensor, tokenizer: str, max_length: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch._check(texts.dim() == 1, lambda: f"tokenize: a vector of texts, not a tensor of {texts.dim()} axes")
    longest = torch.library.get_ctx().new_dynamic_size(min=_processor(tokenizer).fewest)
    made = [texts.new_empty((texts.shape[0], longest), dtype=torch.int64) for _ in range(2)]
    return made[0], made[1]


def convert_tokenize(g: Any, node: Any) -> Any:
    """tokenize(Tensor texts, str tokenizer, SymInt max_length, SymInt padding) -> (Tensor, Tensor)"""
    texts, name, max_length, padding = node.args
    check_library()
    tokens, mask = _processor(name).emit(g, texts, max_length)
    return g.op.Where(g.cast(mask, torch.bool), tokens, g.const(padding)), mask


@torch.library.custom_op("onnxplug_extensions::detokenize", mutates_args=())
def detokenize(ids: torch.Tensor, tokenizer: str) -> torch.Tensor:
    """Texts of rows of token numbers, [texts, length]."""
    return string_tensor(_processor(tokenizer).decode(ids.tolist())) if len(ids) else ids.new_empty(0, dtype=_STRING)


@detokenize.register_fake
def _(ids: torch.Tensor, tokenizer: str) -> torch.Tensor:
    torch._check(ids.dim() == 2, lambda: f"detokenize: rows of token numbers, not a tensor of {ids.dim()} axes")
    return ids.new_empty(ids.shape[:1], dtype=_STRING)


def convert_detokenize(g: Any, node: Any) -> Any:
    """detokenize(Tensor ids, str tokenizer) -> Tensor"""
    ids, name = node.args
    check_library()
    return _processor(name).emit(g, ids)


@torch.library.custom_op("onnxplug_extensions::named", mutates_args=())
def named(index: torch.Tensor, names: str) -> torch.Tensor:
    """The names that numbers stand for, from a list in JSON."""
    known = json.loads(names)
    return (
        string_tensor(np.array(known, dtype=object)[index.numpy()])
        if index.numel()
        else index.new_empty(index.shape, dtype=_STRING)
    )


@named.register_fake
def _(index: torch.Tensor, names: str) -> torch.Tensor:
    return index.new_empty(index.shape, dtype=_STRING)


def convert_named(g: Any, node: Any) -> Any:
    """named(Tensor index, str names) -> Tensor"""
    index, names = node.args
    return g.op.Gather(g.const(json.loads(names)), index, axis=0)
