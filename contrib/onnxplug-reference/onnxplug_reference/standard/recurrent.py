"""RNN, GRU and LSTM: both directions, sequences of several lengths, peepholes, clipping, and every activation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from onnxplug.errors import EvaluationError
from onnxplug_reference.kernels import Kernel
from onnxplug_reference.numeric import sigmoid, softplus

Activation = Callable[[np.ndarray], np.ndarray]
#: Activations of (x, alpha, beta), and the defaults of alpha and beta.
_ACTIVATIONS: dict[str, tuple[Callable[[np.ndarray, float, float], np.ndarray], float, float]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), 0, 0),
    "tanh": (lambda x, a, b: np.tanh(x), 0, 0),
    "sigmoid": (lambda x, a, b: sigmoid(x), 0, 0),
    "affine": (lambda x, a, b: a * x + b, 1, 0),
    "leakyrelu": (lambda x, a, b: np.where(x >= 0, x, a * x), 0.01, 0),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0), 1, 0),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), 1, 1),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda x, a, b: np.where(x >= 0, x, a * np.expm1(np.minimum(x, 0))), 1, 0),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), 0, 0),
    "softplus": (lambda x, a, b: softplus(x), 0, 0),
}


class Layer(NamedTuple):
    """What the recurrent operators share.

    Attributes:
        direction: ``"forward"``, ``"reverse"`` or ``"bidirectional"``.
        layout: 0: [steps, batch, ...]; 1: [batch, steps, ...].
        clip: Sums before activations are kept within ± this.
        activations: Of each direction.
    """

    direction: str
    layout: int
    clip: float | None
    activations: list[list[Activation]]


def _layer(
    direction: str,
    layout: int,
    clip: float | None,
    names: Sequence[str],
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
) -> Layer:
    """Reads the attributes. The values of alpha and beta go, in order, to the activations that take one."""
    if direction not in ("forward", "reverse", "bidirectional"):
        raise EvaluationError(f"unknown direction {direction!r}")
    count = 2 if direction == "bidirectional" else 1
    left, right = list(alphas or ()), list(betas or ())
    activations_: list[Activation] = []
    for name in names:
        entry = _ACTIVATIONS.get(name.lower())
        if entry is None:
            raise EvaluationError(f"unknown activation {name!r}; there are {', '.join(_ACTIVATIONS)}")
        function, alpha, beta = entry
        alpha = left.pop(0) if alpha and left else alpha
        takes_beta = name.lower() in ("affine", "scaledtanh", "hardsigmoid")
        beta = right.pop(0) if takes_beta and right else beta
        activations_.append(partial(_applied, function, alpha, beta))
    each = len(activations_) // count
    if not each or len(activations_) != each * count:
        raise EvaluationError(f"{len(activations_)} activations for {count} directions")
    return Layer(direction, layout, clip, [activations_[i * each : (i + 1) * each] for i in range(count)])


def _applied(
    function: Callable[[np.ndarray, float, float], np.ndarray], alpha: float, beta: float, x: np.ndarray
) -> np.ndarray:
    return function(x, alpha, beta)


#: One step of a direction: the input, the states, to the new states; the first one is the output.
Cell = Callable[[np.ndarray, list[np.ndarray]], list[np.ndarray]]


def _run(
    layer: Layer,
    x: np.ndarray,
    lengths: np.ndarray | None,
    initial: Sequence[np.ndarray | None],
    width: int,
    cell: Callable[[int], Cell],
) -> tuple[np.ndarray, ...]:
    """Runs all directions: outputs of all steps, then each state after each sequence's last step."""
    x = x.swapaxes(0, 1) if layer.layout else x
    steps, batch = x.shape[:2]
    counts = np.full(batch, steps) if lengths is None else np.asarray(lengths).astype(np.int64)
    results, ends = [], []
    for number in range(len(layer.activations)):
        backwards = layer.direction == "reverse" or number == 1
        states = [_initial(s, layer, number, (batch, width), x.dtype) for s in initial]
        outputs = np.zeros((steps, batch, width), x.dtype)
        step = cell(number)
        for t in range(int(counts.max(initial=0))):
            rows = np.nonzero(counts > t)[0]
            places = counts[rows] - 1 - t if backwards else np.full(rows.size, t)
            new = step(x[places, rows], [s[rows] for s in states])
            for state, value in zip(states, new, strict=True):
                state[rows] = value
            outputs[places, rows] = new[0]
        results.append(outputs)
        ends.append(states)
    every = np.stack(results, 1)  # [steps, directions, batch, width]
    last = [np.stack(column) for column in zip(*ends, strict=True)]
    if layer.layout:
        return every.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in last)
    return every, *last


def _initial(state: np.ndarray | None, layer: Layer, number: int, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    if state is None:
        return np.zeros(shape, dtype)
    return np.array(state[:, number] if layer.layout else state[number])


def _clipped(layer: Layer, value: np.ndarray) -> np.ndarray:
    return value if layer.clip is None else np.clip(value, -layer.clip, layer.clip)


def _biases(b: np.ndarray | None, number: int, gates: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Biases of inputs and of states, [gates * width] each."""
    if b is None:
        return np.zeros(gates * width), np.zeros(gates * width)
    first, second = np.split(b[number], 2)
    return first, second


def rnn(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None = None,
    sequence_lens: np.ndarray | None = None,
    initial_h: np.ndarray | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] = ("Tanh", "Tanh"),
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[np.ndarray, ...]:
    """h = f(x W' + h R' + b)."""
    names = _per_direction(activations, direction, 1)
    layer = _layer(direction, layout, clip, names, activation_alpha, activation_beta)
    width = r.shape[-1]

    def cell(number: int) -> Cell:
        (f,) = layer.activations[number]
        bias = sum(_biases(b, number, 1, width))

        def step(x: np.ndarray, states: list[np.ndarray]) -> list[np.ndarray]:
            return [f(_clipped(layer, x @ w[number].T + states[0] @ r[number].T + bias)).astype(x.dtype)]

        return step

    return _run(layer, x, sequence_lens, [initial_h], width, cell)


def gru(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None = None,
    sequence_lens: np.ndarray | None = None,
    initial_h: np.ndarray | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[np.ndarray, ...]:
    """Gates in the order update, reset, hidden; ``linear_before_reset`` says where the reset gate is applied."""
    names = _per_direction(activations or ("Sigmoid", "Tanh"), direction, 2)
    layer = _layer(direction, layout, clip, names, activation_alpha, activation_beta)
    width = r.shape[-1]

    def cell(number: int) -> Cell:
        f, g = layer.activations[number]
        of_inputs, of_states = _biases(b, number, 3, width)
        gates, hidden = slice(None, 2 * width), slice(2 * width, None)

        def step(x: np.ndarray, states: list[np.ndarray]) -> list[np.ndarray]:
            h = states[0]
            inputs = x @ w[number].T + of_inputs
            both = inputs[:, gates] + h @ r[number][gates].T + of_states[gates]
            update, reset = np.split(f(_clipped(layer, both)), 2, -1)
            if linear_before_reset:
                extra = reset * (h @ r[number][hidden].T + of_states[hidden])
            else:
                extra = (reset * h) @ r[number][hidden].T + of_states[hidden]
            new = g(_clipped(layer, inputs[:, hidden] + extra))
            return [((1 - update) * new + update * h).astype(x.dtype)]

        return step

    return _run(layer, x, sequence_lens, [initial_h], width, cell)


def lstm(
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None = None,
    sequence_lens: np.ndarray | None = None,
    initial_h: np.ndarray | None = None,
    initial_c: np.ndarray | None = None,
    p: np.ndarray | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[np.ndarray, ...]:
    """Gates in the order input, output, forget, cell; ``input_forget`` couples the forget gate to the input gate."""
    names = _per_direction(activations or ("Sigmoid", "Tanh", "Tanh"), direction, 3)
    layer = _layer(direction, layout, clip, names, activation_alpha, activation_beta)
    width = r.shape[-1]

    def cell(number: int) -> Cell:
        f, g, h_ = layer.activations[number]
        bias = sum(_biases(b, number, 4, width))
        peep_i, peep_o, peep_f = np.split(p[number], 3) if p is not None else (0.0, 0.0, 0.0)

        def step(x: np.ndarray, states: list[np.ndarray]) -> list[np.ndarray]:
            h, c = states
            i, o, forget, new = np.split(x @ w[number].T + h @ r[number].T + bias, 4, -1)
            i = f(_clipped(layer, i + peep_i * c))
            forget = 1 - i if input_forget else f(_clipped(layer, forget + peep_f * c))
            cells = forget * c + i * g(_clipped(layer, new))
            o = f(_clipped(layer, o + peep_o * cells))
            return [(o * h_(cells)).astype(x.dtype), cells.astype(x.dtype)]

        return step

    return _run(layer, x, sequence_lens, [initial_h, initial_c], width, cell)


def _per_direction(names: Sequence[str], direction: str, each: int) -> list[str]:
    """The names of the activations; those of one direction serve both, and what RNN's default has too many is left out."""
    count = each * (2 if direction == "bidirectional" else 1)
    activations = list(names)
    return (
        (activations * 2)[:count]
        if len(activations) == each
        else activations[:count]
        if len(activations) > count
        else activations
    )


KERNELS = [
    Kernel("RNN", rnn, since=7),
    Kernel("GRU", gru, since=7),
    Kernel("LSTM", lstm, since=7),
]
