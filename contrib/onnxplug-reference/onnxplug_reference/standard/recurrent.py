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


#: One step of a direction: input and states to new states, of which the first is the output.
Cell = Callable[[np.ndarray, list[np.ndarray]], list[np.ndarray]]


class Direction(NamedTuple):
    """The parameters of a cell in one direction.

    Attributes:
        w, r: The weights of inputs and of states, [gates * width, ...].
        b: Both biases, [2 * gates * width].
        p: The weights of peepholes, [3 * width].
        clip: The bound, on both sides, of sums before activations.
    """

    w: np.ndarray
    r: np.ndarray
    b: np.ndarray
    p: np.ndarray | None
    activations: list[Activation]
    clip: float | None

    def clipped(self, value: np.ndarray) -> np.ndarray:
        """A sum before an activation, within the bound."""
        return value if self.clip is None else np.clip(value, -self.clip, self.clip)


def _activations(
    names: Sequence[str], alphas: Sequence[float] | None, betas: Sequence[float] | None
) -> list[Activation]:
    """Activations by their names. The values of alpha and beta go, in order, to activations that take them."""
    left, right = list(alphas or ()), list(betas or ())
    activations: list[Activation] = []
    for name in names:
        entry = _ACTIVATIONS.get(name.lower())
        if entry is None:
            raise EvaluationError(f"unknown activation {name!r}; there are {', '.join(_ACTIVATIONS)}")
        function, alpha, beta = entry
        alpha = left.pop(0) if alpha and left else alpha
        takes_beta = name.lower() in ("affine", "scaledtanh", "hardsigmoid")
        beta = right.pop(0) if takes_beta and right else beta
        activations.append(partial(_applied, function, alpha, beta))
    return activations


def _applied(
    function: Callable[[np.ndarray, float, float], np.ndarray], alpha: float, beta: float, x: np.ndarray
) -> np.ndarray:
    return function(x, alpha, beta)


def _run(
    cell: Callable[[Direction], Cell],
    defaults: Sequence[str],
    initial: Sequence[np.ndarray | None],
    x: np.ndarray,
    w: np.ndarray,
    r: np.ndarray,
    b: np.ndarray | None,
    lengths: np.ndarray | None,
    p: np.ndarray | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[np.ndarray, ...]:
    """Runs all directions: the outputs of all steps, and each state after the last step of each sequence.

    Args:
        initial: The states before the first step.
        layout: 0 for [steps, batch, ...], 1 for [batch, steps, ...].
    """
    if direction not in ("forward", "reverse", "bidirectional"):
        raise EvaluationError(f"unknown direction {direction!r}")
    count, each = 2 if direction == "bidirectional" else 1, len(defaults)
    names = list(activations or defaults)
    names = (names * 2 if len(names) == each else names)[: each * count]  # RNN's default: 2 names for 1 direction too
    if len(names) != each * count:
        raise EvaluationError(f"{len(names)} activations for {count} directions")
    functions = _activations(names, activation_alpha, activation_beta)
    x = x.swapaxes(0, 1) if layout else x
    (steps, batch), width = x.shape[:2], r.shape[-1]
    counts = np.full(batch, steps) if lengths is None else np.asarray(lengths).astype(np.int64)
    results, ends = [], []
    for number in range(count):
        biases = np.zeros(2 * w.shape[1]) if b is None else b[number]
        peepholes = None if p is None else p[number]
        own = functions[number * each : (number + 1) * each]
        step = cell(Direction(w[number], r[number], biases, peepholes, own, clip))
        backwards = direction == "reverse" or number == 1
        states = [_initial(s, layout, number, (batch, width), x.dtype) for s in initial]
        outputs = np.zeros((steps, batch, width), x.dtype)
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
    if layout:
        return every.transpose(2, 0, 1, 3), *(s.swapaxes(0, 1) for s in last)
    return every, *last


def _initial(state: np.ndarray | None, layout: int, number: int, shape: tuple[int, int], dtype: Any) -> np.ndarray:
    if state is None:
        return np.zeros(shape, dtype)
    return np.array(state[:, number] if layout else state[number])


def rnn(x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None, **attributes: Any) -> Any:
    """h = f(x W' + h R' + b)."""

    def cell(d: Direction) -> Cell:
        bias = sum(np.split(d.b, 2))
        return lambda x, states: [d.activations[0](d.clipped(x @ d.w.T + states[0] @ d.r.T + bias)).astype(x.dtype)]

    return _run(cell, ["Tanh"], [h], x, w, r, b, lengths, **attributes)


def gru(
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h: Any = None,
    *,
    linear_before_reset: int = 0,
    **attributes: Any,
) -> Any:
    """Gates in the order update, reset, hidden; ``linear_before_reset`` applies the reset gate after the product."""
    width = r.shape[-1]
    gates, hidden = slice(None, 2 * width), slice(2 * width, None)

    def cell(d: Direction) -> Cell:
        of_inputs, of_states = np.split(d.b, 2)

        def step(x: np.ndarray, states: list[np.ndarray]) -> list[np.ndarray]:
            h = states[0]
            inputs = x @ d.w.T + of_inputs
            both = inputs[:, gates] + h @ d.r[gates].T + of_states[gates]
            update, reset = np.split(d.activations[0](d.clipped(both)), 2, -1)
            if linear_before_reset:
                extra = reset * (h @ d.r[hidden].T + of_states[hidden])
            else:
                extra = (reset * h) @ d.r[hidden].T + of_states[hidden]
            new = d.activations[1](d.clipped(inputs[:, hidden] + extra))
            return [((1 - update) * new + update * h).astype(x.dtype)]

        return step

    return _run(cell, ["Sigmoid", "Tanh"], [h], x, w, r, b, lengths, **attributes)


def lstm(
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h: Any = None,
    c: Any = None,
    p: Any = None,
    *,
    input_forget: int = 0,
    **attributes: Any,
) -> Any:
    """Gates in the order input, output, forget, cell; ``input_forget`` couples the forget gate to the input gate."""

    def cell(d: Direction) -> Cell:
        (f, g, h_), bias = d.activations, sum(np.split(d.b, 2))
        peep_i, peep_o, peep_f = np.split(d.p, 3) if d.p is not None else (0.0, 0.0, 0.0)

        def step(x: np.ndarray, states: list[np.ndarray]) -> list[np.ndarray]:
            h, c = states
            i, o, forget, new = np.split(x @ d.w.T + h @ d.r.T + bias, 4, -1)
            i = f(d.clipped(i + peep_i * c))
            forget = 1 - i if input_forget else f(d.clipped(forget + peep_f * c))
            cells = forget * c + i * g(d.clipped(new))
            o = f(d.clipped(o + peep_o * cells))
            return [(o * h_(cells)).astype(x.dtype), cells.astype(x.dtype)]

        return step

    return _run(cell, ["Sigmoid", "Tanh", "Tanh"], [h, c], x, w, r, b, lengths, p, **attributes)


KERNELS = [
    Kernel("RNN", rnn, since=7),
    Kernel("GRU", gru, since=7),
    Kernel("LSTM", lstm, since=7),
]
