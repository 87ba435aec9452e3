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

#: Shapes of a batch of sequences, images and volumes of 4 channels.
SEQUENCE, IMAGE, VOLUME = (3, 4, 11), (2, 4, 9, 8), (2, 4, 5, 6, 5)
#: Scale and zero point of a layer's result.
SCALE, ZERO = 0.0513, 101
ROWS = {0: torch.export.Dim.DYNAMIC}


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Packs and computes with an engine, without torch's warnings that this quantisation is deprecated."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.quantized.engine = before


def weighted(layer: Any, by_channel: bool = True) -> Any:
    """A layer with new packed weights."""
    weight, bias = layer.weight(), layer.bias()
    numbers = torch.randn(weight.shape) * 0.3
    if by_channel:
        scales = torch.rand(weight.shape[0]).double() * 0.01 + 0.003
        weight = torch.quantize_per_channel(numbers, scales, torch.zeros(len(scales)).long(), 0, torch.qint8)
    else:
        weight = torch.quantize_per_tensor(numbers, 0.0098, 0, torch.qint8)
    layer.set_weight_bias(weight, None if bias is None else torch.randn(bias.shape) * 0.3)
    layer.scale, layer.zero_point = SCALE, ZERO
    return layer


class Quantised(nn.Module):
    """Inputs quantised by layers, a function or layer of quantised tensors, and its result in numbers.

    Bytes stay within 7 bits but for QNNPACK, as observers choose them: beyond, the sums of PyTorch's other kernels saturate on
    processors without VNNI.
    """

    def __init__(
        self, function: Callable[..., Any], inputs: int = 1, dtype: torch.dtype = torch.quint8, scale: float = 0.0317
    ) -> None:
        super().__init__()
        reduced = dtype == torch.quint8 and torch.backends.quantized.engine != "qnnpack"
        zero_point = 61 if reduced else 121 if dtype == torch.quint8 else -7
        self.highest = (127 - zero_point) * scale if reduced else None
        self.inputs = nn.ModuleList(nnq.Quantize(scale * (1 + i), zero_point - 3 * i, dtype) for i in range(inputs))
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        if self.highest is not None:
            tensors = tuple(x.clamp(max=self.highest) for x in tensors)
        result = self.function(*(layer(x) for layer, x in zip(self.inputs, tensors, strict=True)))
        return _pytree.tree_map(lambda x: x.dequantize() if getattr(x, "is_quantized", False) else x, result)


def check_quantised(
    model: nn.Module,
    args: Sequence[torch.Tensor],
    others: Sequence[Sequence[torch.Tensor]],
    *,
    quantum: float = 0.0,
    share: float = 0.0,
    dynamic: bool = True,
    shapes: Any = None,
    **options: Any,
) -> OnnxProgram:
    """Exports a model and compares it with its own kernels.

    Args:
        model: The model; it must be unchanged afterwards.
        args: Its inputs.
        others: Further inputs, of another number of rows.
        quantum: The most by which a result may differ, where a number lies halfway between two quanta.
        share: The share of results that may differ.
        dynamic: Whether the first axes are dynamic.
        shapes: The dynamic axes, where they are not the first ones.
        options: Passed on to ``to_onnx``.
    """
    model = model.eval()
    state, text = copy.deepcopy(list(model.state_dict())), str(model)
    if shapes is None and dynamic:
        shapes = tuple(ROWS for _ in args)
    if shapes and isinstance(model, Quantised):
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
