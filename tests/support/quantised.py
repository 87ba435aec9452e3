"""Checks of eager-mode quantised models: PyTorch's integer kernels against the exported model, in quanta."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.ao.nn.quantized as nnq
from torch import nn
from torch.utils import _pytree

import onnxplug
from onnxplug import OnnxProgram

ROWS = {0: torch.export.Dim.DYNAMIC}


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Packs and computes with an engine while it holds; torch's warnings that this quantisation is deprecated are left out."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = before


class Quantised(nn.Module):
    """Inputs quantised by layers, a function or layer of quantised tensors, and its result in numbers."""

    def __init__(
        self, function: Callable[..., Any], inputs: int = 1, dtype: torch.dtype = torch.quint8, scale: float = 0.0317
    ) -> None:
        super().__init__()
        zero_point = 121 if dtype == torch.quint8 else -7
        self.inputs = nn.ModuleList(nnq.Quantize(scale * (1 + i), zero_point - 3 * i, dtype) for i in range(inputs))
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        found = self.function(*(layer(x) for layer, x in zip(self.inputs, tensors, strict=True)))
        return _pytree.tree_map(lambda x: x.dequantize() if getattr(x, "is_quantized", False) else x, found)


def check_quantised(
    model: nn.Module,
    args: Sequence[torch.Tensor],
    others: Sequence[Sequence[torch.Tensor]],
    *,
    quantum: float = 0.0,
    share: float = 0.0,
    dynamic: bool = True,
    **options: Any,
) -> OnnxProgram:
    """Exports a model and compares it with its own kernels.

    Args:
        model: The model; it must be as it was afterwards.
        args: Its inputs.
        others: Further inputs, of another number of rows.
        quantum: What a result may differ by, where a number lies halfway between two quanta.
        share: The share of results that may.
        dynamic: Whether the first axes are dynamic.
        options: Passed on to ``to_onnx``.
    """
    model = model.eval()
    state, text = copy.deepcopy(list(model.state_dict())), str(model)
    shapes: Any = tuple(ROWS for _ in args) if dynamic else None
    if dynamic and isinstance(model, Quantised):
        shapes = (shapes,)
    program = onnxplug.to_onnx(model, tuple(args), dynamic_shapes=shapes, **options)
    assert (list(model.state_dict()), str(model)) == (state, text)
    for inputs in (args, *others):
        expected = _pytree.tree_leaves(model(*inputs))
        got = program(*inputs)
        results = [got] if isinstance(got, torch.Tensor) else list(got)
        for wanted, result in zip(expected, results, strict=True):
            assert wanted.dtype == result.dtype
            assert wanted.shape == result.shape
            difference = (wanted.double() - result.double()).abs()
            size = 1e-6 * max(1.0, float(wanted.double().abs().max()))
            assert float(difference.max()) <= quantum * 1.001 + size
            assert int((difference > size).sum()) <= max(1.0 if share else 0.0, share * difference.numel())
    return program
