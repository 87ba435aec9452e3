"""Dynamically quantised layers: operands and results are numbers, and the scale of activations is from their range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from onnxplug.errors import CaptureError
from onnxplug.torch_private import scan
from onnxplug_quantized.tensor import QTensor
from onnxplug_quantized.weighted import convolution, linear
from onnxplug_quantized.weights import Cell, Packed

Function = Callable[..., Any]
_OPS = torch.ops.quantized_decomposed
#: The least scale that torch's kernels choose.
_LEAST = 6.1e-5


def range_of(x: Tensor, reduce_range: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of 256 steps, or 128 with ``reduce_range``, from the least to the greatest number and 0."""
    parameters: tuple[Tensor, Tensor] = _OPS.choose_qparams.tensor(
        x, 0, 127 if reduce_range else 255, _LEAST, torch.uint8
    )
    return parameters


def _rounded(x: Tensor, scale: Tensor, zero_point: Tensor, reduced: bool = False) -> Tensor:
    return QTensor.of(x, scale, zero_point, torch.quint8).restored(reduced=reduced)


def _operand(x: Tensor, reduced: bool) -> Tensor:
    """An operand rounded to 7 or 8 bits of its own range."""
    return _rounded(x, *range_of(x, reduced), reduced)


def _product(x: Tensor, packed: Packed, reduce_range: bool) -> Tensor:
    halves = packed.dtype == torch.float16
    return linear(x if halves else _operand(x, reduce_range and packed.heeds_range), packed)


def _linear(relu: bool) -> Function:
    def convert(_: Function, x: Tensor, packed: Packed, reduce_range: bool = False) -> Tensor:
        y = _product(x, packed, reduce_range)
        return y.relu() if relu else y

    return convert


def _convolution(_: Function, x: Tensor, packed: Packed, reduce_range: bool = False) -> Tensor:
    """The kernel quantises its result with the scale of the operand, and so limits it to the operand's range."""
    reduced = reduce_range and packed.heeds_range
    parameters = range_of(x, reduced)
    return _rounded(convolution(_rounded(x, *parameters, reduced), packed), *parameters)


# -- recurrent layers --------------------------------------------------------------------------------------------------

Tensors = list[Tensor]
#: ``(gates of the input, gates of the state, state) -> state``; the first tensor of a state is the output.
Step = Callable[[Tensor, Tensor, Tensors], Tensors]


def _lstm_step(inputs: Tensor, hidden: Tensor, state: Tensors) -> Tensors:
    i, f, g, o = (inputs + hidden).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def _gru_step(inputs: Tensor, hidden: Tensor, state: Tensors) -> Tensors:
    (r, z, n), (hidden_r, hidden_z, hidden_n) = inputs.chunk(3, -1), hidden.chunk(3, -1)
    r, z = (r + hidden_r).sigmoid(), (z + hidden_z).sigmoid()
    n = (n + r * hidden_n).tanh()
    return [(state[0] - n) * z + n]


def _direction(x: Tensor, cell: Cell, step: Step, state: Tensors, reverse: bool) -> tuple[Tensor, Tensors]:
    """One direction of one layer: its outputs, in the order of the input, and its last state.

    The input has one scale for the whole sequence, the state a scale at each step.
    """
    inputs = _product(x, cell.ih, cell.reduce_range)
    weight, bias, halves = cell.hh.numbers, cell.hh.bias, cell.hh.dtype == torch.float16
    reduced = cell.reduce_range and cell.hh.heeds_range

    def advance(sofar: Tensors, gates: Tensor) -> tuple[Tensors, Tensor]:
        hidden = sofar[0] if halves else _operand(sofar[0], reduced)
        new = step(gates, F.linear(hidden, weight, bias), sofar)
        return new, new[0].clone()

    inputs = inputs.flip(0) if reverse else inputs
    last, outputs = scan(advance, state, inputs, dim=0)
    return (outputs.flip(0) if reverse else outputs), list(last)


def _recurrent(step: Step, states: int) -> Function:
    """The function of ``quantized_lstm`` or ``quantized_gru``, with ``states`` tensors of state."""

    def convert(
        _: Function, x: Tensor, hx: Any, params: Any, has_biases: bool, layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, **options: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        if not isinstance(has_biases, bool) or (train and dropout):
            raise CaptureError(
                "a quantised recurrent layer of packed sequences, or with dropout in training, can't be exported"
            )
        x, initial, directions = (
            x.transpose(0, 1) if batch_first else x,
            list(hx) if states > 1 else [hx],
            1 + bidirectional,
        )
        last: list[Tensors] = []
        for layer in range(layers):
            outputs = []
            for place in range(layer * directions, (layer + 1) * directions):
                state = [h[place] for h in initial]
                output, state = _direction(x, params[place], step, state, place % directions == 1)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        return (x.transpose(0, 1) if batch_first else x, *(torch.stack(list(s)) for s in zip(*last, strict=True)))

    return convert


def _cell(step: Step, states: int) -> Function:
    """The function of a cell such as ``quantized_lstm_cell_dynamic``, with 7 bits; packed weights have the biases."""

    def convert(_: Function, x: Tensor, hx: Any, ih: Packed, hh: Packed, *biases: Any) -> Any:
        state = list(hx) if states > 1 else [hx]
        new = step(_product(x, ih, True), _product(state[0], hh, True), state)
        return tuple(new) if states > 1 else new[0]

    return convert


def _plain_step(activation: Function) -> Step:
    return lambda inputs, hidden, state: [activation(inputs + hidden)]


TABLE: dict[str, Function] = {
    **{f"quantized::linear_dynamic{half}": _linear(False) for half in ("", "_fp16")},
    **{f"quantized::linear_relu_dynamic{half}": _linear(True) for half in ("", "_fp16")},
    **{f"quantized::conv{kind}{n}d_dynamic": _convolution for kind in ("", "_transpose") for n in (1, 2, 3)},
    "quantized_lstm": _recurrent(_lstm_step, 2),
    "quantized_gru": _recurrent(_gru_step, 1),
    "quantized::quantized_lstm_cell_dynamic": _cell(_lstm_step, 2),
    "quantized::quantized_gru_cell_dynamic": _cell(_gru_step, 1),
    "quantized::quantized_rnn_tanh_cell_dynamic": _cell(_plain_step(torch.tanh), 1),
    "quantized::quantized_rnn_relu_cell_dynamic": _cell(_plain_step(torch.relu), 1),
}
