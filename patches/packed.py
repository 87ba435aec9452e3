"""Packed sequences during capture, with symbolic numbers of rows and steps where torch requires plain numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.rnn import PackedSequence

from onnxplug import torch_private
from onnxplug.capture.patching import patched
from onnxplug.plugin_api import Mentions
from onnxplug.torch_private import detect_fake_mode

_OP = torch.ops.aten._pack_padded_sequence.default
_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
_PACKING = frozenset(
    (
        "PackedSequence pack_padded_sequence pack_sequence pad_packed_sequence unpack_sequence _pack_padded_sequence "
        "_pad_packed_sequence"
    ).split()
)


class _Source(NamedTuple):
    """The lengths and the batch that a packed sequence was made from: its own tensors no longer show them."""

    batch_sizes: torch.Tensor
    lengths: torch.Tensor
    batch: Any


def _packed_shapes(mode: Any, func: Any, x: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
    """The total number of rows, and a batch size for each step of the longest sequence."""
    env: ShapeEnv | None = mode.shape_env
    if env is None or not env.allow_dynamic_output_shape_ops:
        raise torch_private.DynamicOutputShapeException(func)
    batch, steps = x.shape[:2] if batch_first else x.shape[:2][::-1]
    rows, longest = env.create_unbacked_symint(), env.create_unbacked_symint()
    for size, limit in ((rows, batch * steps), (longest, steps)):
        torch._check(size >= 1)
        torch._check(size <= limit)
    return x.new_empty((rows, *x.shape[2:])), torch.empty_like(lengths, dtype=torch.int64).new_empty((longest,))


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt) and bool(a.node.expr == b.node.expr)


def _beside(data: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the device of another."""
    return tensor if tensor.device == data.device else tensor.to(data.device)


class _Patches:
    """Stand-ins for torch's functions; each leaves real tensors and unknown sequences to the original."""

    def __init__(self) -> None:
        self.sources: dict[int, _Source] = {}

    def source(self, batch_sizes: Any) -> _Source | None:
        return self.sources.get(id(batch_sizes))

    def pack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
            data, batch_sizes = original(x, lengths, batch_first)
            if detect_fake_mode((x, lengths)) is not None:
                self.sources[id(batch_sizes)] = _Source(batch_sizes, lengths, x.shape[0 if batch_first else 1])
            return data, batch_sizes

        return _pack_padded_sequence

    def pad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _pad_packed_sequence(
            data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: Any, total: Any
        ) -> Any:
            source = self.source(batch_sizes)
            if source is None:
                return original(data, batch_sizes, batch_first, padding, total)
            # PyTorch keeps lengths on the CPU where the sequences are on a GPU.
            lengths, batch_sizes = _beside(data, source.lengths), _beside(data, batch_sizes)
            if not _same(total, batch_sizes.shape[0]):
                steps = torch.arange(total, device=lengths.device).unsqueeze(1)
                batch_sizes = (steps < lengths).sum(1)
            places = torch.arange(source.batch, device=batch_sizes.device)
            active = places < batch_sizes.unsqueeze(1)
            starts = batch_sizes.cumsum(0) - batch_sizes
            rows = torch.where(active, starts.unsqueeze(1) + places, 0)
            mask = active.reshape(*active.shape, *[1] * (data.dim() - 1))
            padded = torch.where(mask, data[rows], padding)
            return padded.transpose(0, 1) if batch_first else padded, _beside(source.lengths, active.sum(0))

        return _pad_packed_sequence

    def forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: Any, input: Any, hx: Any = None) -> Any:
            source = self.source(input.batch_sizes) if isinstance(input, PackedSequence) else None
            if source is None or hx is not None:
                return original(module, input, hx)
            count = module.num_layers * (2 if module.bidirectional else 1)
            sizes = [module.proj_size or module.hidden_size, module.hidden_size]
            zeros = [input.data.new_zeros((count, source.batch, size)) for size in sizes]
            return original(module, input, tuple(zeros) if module.mode == "LSTM" else zeros[0])

        return forward

    def expected_size(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_expected_size(module: Any, input: Any, batch_sizes: Any) -> Any:
            source = self.source(batch_sizes)
            if source is None:
                return original(module, input, batch_sizes)
            # The sequence's batch size replaces the size that is read from its tensor.
            batched = input.new_empty((source.batch, 1) if module.batch_first else (1, source.batch))
            return original(module, batched, None)

        return get_expected_size


def _is_packing(name: str) -> bool:
    return name in _PACKING


@contextlib.contextmanager
def packed_sequences(mentions: Mentions) -> Iterator[None]:
    """While it holds, tracing gets through packed sequences and the recurrent layers over them.

    torch.export knows neither how many rows a packed sequence has nor, from the sequence alone, how many sequences there
    are, and its functions need both numbers. Nothing is patched for a model that packs no sequences.
    """
    if not mentions(_is_packing):
        yield
        return
    patches = _Patches()
    planned: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch_private.VF, "_pack_padded_sequence", patches.pack),
        (torch_private.VF, "_pad_packed_sequence", patches.pad),
        (nn.RNNBase, "get_expected_hidden_size", patches.expected_size),
        (nn.LSTM, "get_expected_cell_size", patches.expected_size),
        *[(layer, "forward", patches.forward) for layer in _LAYERS],
    ]
    table: dict[Any, Any] = torch_private.fake_implementations
    shapes = table.get(_OP)
    with contextlib.ExitStack() as stack:
        for owner, name, patch in planned:
            stack.enter_context(patched(owner, name, patch(getattr(owner, name))))
        table[_OP] = _packed_shapes
        try:
            yield
        finally:
            if shapes is not None:
                table[_OP] = shapes
            else:
                del table[_OP]
