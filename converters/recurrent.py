"""Recurrent layers: LSTM, GRU and Elman networks, whole, over packed sequences, and one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from onnxplug.build.builder import GraphBuilder
from onnxplug.converters.helpers.axes import rank_of, squeeze, unsqueeze
from onnxplug.converters.helpers.dropout import randomly_dropped
from onnxplug.converters.helpers.dtypes import FLOAT, INT32, INT64
from onnxplug.converters.helpers.exactness import NAN_IS_LOST
from onnxplug.converters.helpers.fill import filled
from onnxplug.converters.helpers.products import product
from onnxplug.converters.helpers.promotion import wide
from onnxplug.converters.helpers.reductions import reduce
from onnxplug.converters.helpers.runtimes import has_kernel
from onnxplug.errors import Unsupported
from onnxplug.interpret.node import FxNode
from onnxplug.registry.rule import Converter, Rule

Step = Callable[[GraphBuilder, Value, Value, Sequence[Value]], list[Value]]


class Mode(NamedTuple):
    """One kind of recurrent layer.

    Attributes:
        op_type: The ONNX operator of a whole layer.
        gates: The index of torch's gate at each place of ONNX's order: torch has LSTM's as i, f, g, o and GRU's as r, z, n.
        states: How many states a step carries.
        step: The new states from the input's gates, the hidden state's gates, and the old states.
        activation: The activations attribute, when it isn't the default.
    """

    op_type: str
    gates: tuple[int, ...]
    states: int
    step: Step
    activation: str | None = None


class Weights(NamedTuple):
    """The parameters of one direction of one layer."""

    w_ih: Value
    w_hh: Value
    b_ih: Value | None
    b_hh: Value | None
    w_hr: Value | None


# -- one step ----------------------------------------------------------------------------------------------------------


def _gates(g: GraphBuilder, x: Value, count: int) -> list[Value]:
    """The gates, which are adjacent on the last axis."""
    total = x.shape[-1] if x.shape is not None else None
    if not isinstance(total, int):
        raise Unsupported("a recurrent layer whose hidden size is dynamic")
    sizes = g.const(np.full(count, total // count, dtype=np.int64))
    return list(g.op.Split(x, sizes, axis=-1, _outputs=count))


def lstm_step(g: GraphBuilder, inner: Value, hidden: Value, states: Sequence[Value]) -> list[Value]:
    """``c' = σ(f) c + σ(i) tanh(g)``, ``h' = σ(o) tanh(c')``."""
    i, f, c, o = _gates(g, g.op.Add(inner, hidden), 4)
    kept = g.op.Mul(g.op.Sigmoid(f), states[1])
    cell = g.op.Add(kept, g.op.Mul(g.op.Sigmoid(i), g.op.Tanh(c)))
    return [g.op.Mul(g.op.Sigmoid(o), g.op.Tanh(cell)), cell]


def gru_step(g: GraphBuilder, inner: Value, hidden: Value, states: Sequence[Value]) -> list[Value]:
    """``n = tanh(n_x + r n_h)``, ``h' = n + z (h - n)``: the reset gate acts on the hidden state's product."""
    r_x, z_x, n_x = _gates(g, inner, 3)
    r_h, z_h, n_h = _gates(g, hidden, 3)
    reset, update = g.op.Sigmoid(g.op.Add(r_x, r_h)), g.op.Sigmoid(g.op.Add(z_x, z_h))
    new = g.op.Tanh(g.op.Add(n_x, g.op.Mul(reset, n_h)))
    return [g.op.Add(g.op.Mul(g.op.Sub(states[0], new), update), new)]


def tanh_step(g: GraphBuilder, inner: Value, hidden: Value, states: Sequence[Value]) -> list[Value]:
    """``h' = tanh(x + h)``."""
    return [g.op.Tanh(g.op.Add(inner, hidden))]


def relu_step(g: GraphBuilder, inner: Value, hidden: Value, states: Sequence[Value]) -> list[Value]:
    """``h' = relu(x + h)``."""
    return [g.op.Relu(g.op.Add(inner, hidden))]


LSTM = Mode("LSTM", (0, 3, 1, 2), 2, lstm_step)
GRU = Mode("GRU", (1, 0, 2), 1, gru_step)
RNN_TANH = Mode("RNN", (0,), 1, tanh_step)
RNN_RELU = Mode("RNN", (0,), 1, relu_step, "Relu")


def _affine(g: GraphBuilder, x: Value, weight: Value, bias: Value | None) -> Value:
    result = product(g, x, g.op.Transpose(weight, perm=[1, 0]))
    return result if bias is None else g.op.Add(result, bias)


def cell(mode: Mode) -> Converter:
    """lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell: half types are computed in float."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        x, hx, *rest = node.args
        inner = wide(node.dtype)
        x, *states = (g.cast(v, inner) for v in (x, *(hx if mode.states > 1 else [hx])))
        w_ih, w_hh = (g.cast(w, inner) for w in rest[:2])
        b_ih, b_hh = (None if b is None else g.cast(b, inner) for b in rest[2:])
        results = mode.step(g, _affine(g, x, w_ih, b_ih), _affine(g, states[0], w_hh, b_hh), states)
        return [g.cast(v, node.dtype) for v in results]

    convert.__name__ = convert.__qualname__ = f"{mode.step.__name__.removesuffix('_step')}_cell"
    return convert


# -- one layer ---------------------------------------------------------------------------------------------------------


def _joined(g: GraphBuilder, values: Sequence[Value], axis: int = 0) -> Value:
    if len(values) == 1:
        return values[0]
    return g.op.Concat(*values, axis=axis)


def _arranged(g: GraphBuilder, mode: Mode, parts: Sequence[Sequence[Value]], hidden: int) -> Value:
    """Each direction's parts one after the other, directions on an axis in front, the gates as ONNX has them."""
    if len(mode.gates) == 1:
        return _joined(g, [unsqueeze(g, _joined(g, part), 0) for part in parts])
    count, blocks = len(mode.gates), len(parts[0])
    order = np.array(mode.gates)[None, :] + count * np.arange(blocks * len(parts))[:, None]
    rows = order.reshape(-1, 1) * hidden + np.arange(hidden)
    rows = rows.reshape(len(parts), blocks * count * hidden).astype(np.int64)
    return g.op.Gather(_joined(g, [v for part in parts for v in part]), rows, axis=0)


def _is_zero(g: GraphBuilder, x: Value) -> bool:
    known = g.constant(x)
    if known is not None:
        return not known.any()
    producer = x.producer()
    if producer is None or producer.domain or producer.op_type != "ConstantOfShape":
        return False
    fill = producer.attributes.get("value")
    return fill is None or not fill.as_tensor().numpy().any()


def _whole_layer(
    g: GraphBuilder,
    mode: Mode,
    x: Value,
    states: Sequence[Value],
    weights: Sequence[Weights],
    lengths: Value | None,
) -> tuple[Value, list[Value]]:
    """One layer as one node. Its result has an axis for the directions, which is merged into the features."""
    hidden = g.concrete_shape(weights[0].w_hh, "hidden size")[1]
    bias = None
    if weights[0].b_ih is not None:
        bias = _arranged(g, mode, [[v for v in (w.b_ih, w.b_hh) if v is not None] for w in weights], hidden)
    both = len(weights) == 2
    settings = {"linear_before_reset": 1} if mode.op_type == "GRU" else {}
    y, *finals = getattr(g.op, mode.op_type)(
        x,
        _arranged(g, mode, [[w.w_ih] for w in weights], hidden),
        _arranged(g, mode, [[w.w_hh] for w in weights], hidden),
        bias,
        lengths,
        # Absent, the initial states are zero.
        *(states if not all(_is_zero(g, s) for s in states) else ()),
        hidden_size=hidden,
        direction="bidirectional" if both else None,
        activations=[mode.activation] * len(weights) if mode.activation is not None else None,
        **settings,
        _outputs=1 + mode.states,
    )
    if not both:
        return squeeze(g, y, 1), finals
    y = g.op.Transpose(y, perm=[0, 2, 1, 3])
    return g.reshape(y, [g.dim(x, 0), g.dim(x, 1), 2 * hidden]), finals


def _formal(x: Value, dropped: int) -> tuple[ir.DataType, Sequence[Any] | None]:
    """Dtype and dimensions of the input of a Scan's body for a value."""
    assert x.dtype is not None
    return x.dtype, x.shape.dims[dropped:] if x.shape is not None else None


def _stepwise_layer(
    g: GraphBuilder,
    mode: Mode,
    x: Value,
    states: Sequence[Value],
    weights: Sequence[Weights],
    active: Value | None,
) -> tuple[Value, list[Value]]:
    """One layer as a Scan over time for each direction, for layers that ONNX's operators or the runtime's kernels lack.

    Steps that are not ``active`` keep the states.
    """
    outputs: list[Value] = []
    finals: list[list[Value]] = [[] for _ in states]
    for direction, w in enumerate(weights):
        starts = [squeeze(g, g.op.Slice(s, [direction], [direction + 1], [0]), 0) for s in states]
        inner = _affine(g, x, w.w_ih, w.b_ih)
        # Outside the body, so that the weights can be stored as they are read.
        w_hh = g.op.Transpose(w.w_hh, perm=[1, 0])
        w_hr = None if w.w_hr is None else g.op.Transpose(w.w_hr, perm=[1, 0])

        def body(*formals: Value, w: Weights = w, w_hh: Value = w_hh, w_hr: Value | None = w_hr) -> list[Value]:
            old, element = formals[: mode.states], formals[mode.states]
            hidden = g.op.MatMul(old[0], w_hh)
            new = mode.step(g, element, hidden if w.b_hh is None else g.op.Add(hidden, w.b_hh), old)
            if w_hr is not None:
                new[0] = g.op.MatMul(new[0], w_hr)
            if active is not None:
                new = [g.op.Where(formals[-1], n, o) for n, o in zip(new, old, strict=True)]
            return [*new, new[0]]

        scanned = [inner, *([active] if active is not None else [])]
        formals = [_formal(s, 0) for s in starts] + [_formal(v, 1) for v in scanned]
        *last, y = g.op.Scan(
            *starts,
            *scanned,
            body=g.subgraph(body, formals, name="step"),
            num_scan_inputs=len(scanned),
            scan_input_directions=[direction] * len(scanned),
            scan_output_directions=[direction],
            _outputs=mode.states + 1,
        )
        outputs.append(y)
        for position, value in enumerate(last):
            finals[position].append(unsqueeze(g, value, 0))
    return _joined(g, outputs, axis=2), [_joined(g, values) for values in finals]


# -- all layers --------------------------------------------------------------------------------------------------------


def _grouped(params: Sequence[Value], directions: int, layers: int, biases: bool) -> list[list[Weights]]:
    """The parameters by layer and direction."""
    size = len(params) // (directions * layers)
    result = []
    for start in range(0, len(params), size):
        group = params[start : start + size]
        b_ih, b_hh = group[2:4] if biases else (None, None)
        w_hr = group[-1] if size == (5 if biases else 3) else None
        result.append(Weights(group[0], group[1], b_ih, b_hh, w_hr))
    return [result[i : i + directions] for i in range(0, len(result), directions)]


class Options(NamedTuple):
    """The options that every overload has, in the schema's order."""

    biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool


def _network(
    g: GraphBuilder,
    mode: Mode,
    x: Value,
    states: Sequence[Value],
    params: Sequence[Value],
    options: Options,
    active: Value | None = None,
    exact: bool = False,
) -> tuple[Value, list[Value]]:
    """All layers over ``x`` (time, batch, features), and the last state of each layer and direction.

    ONNX has no projection: such layers, and dtypes without a kernel, run step by step. For an empty batch nothing is
    computed: ONNX Runtime's LSTM and GRU abort the process.

    Args:
        g: The builder.
        mode: The kind of layer.
        x: The input, in the dtype that is computed in.
        states: The initial states, each of (layers × directions, batch, size).
        params: The parameters in torch's order.
        options: The layers' options.
        active: The mask of active steps (time, batch, 1), the first steps of each sequence; all by default.
        exact: Whether NaN stays NaN, which takes the layers step by step.
    """
    directions = 2 if options.bidirectional else 1
    weights = _grouped(params, directions, options.layers, options.biases)
    if g.dim(x, 1) == 0:
        size = g.concrete_shape(states[0])[2]
        return filled(g, 0, [g.dim(x, 0), 0, directions * size], x.dtype or FLOAT), list(states)
    stepwise = exact or not has_kernel(g, mode.op_type, x.dtype or FLOAT) or weights[0][0].w_hr is not None
    lengths = None
    if active is not None and not stepwise:
        counted = reduce(g, "ReduceSum", g.cast(active, INT32), [0], keepdims=False)
        lengths = squeeze(g, counted, 1)
    by_layer = [_by_layer(g, s, options.layers, directions) for s in states]
    finals: list[list[Value]] = [[] for _ in states]
    for layer, own in enumerate(weights):
        if layer and options.train and options.dropout:
            x = randomly_dropped(g, x, options.dropout)[0]
        starts = [s[layer] for s in by_layer]
        if stepwise:
            x, last = _stepwise_layer(g, mode, x, starts, own, active)
        else:
            x, last = _whole_layer(g, mode, x, starts, own, lengths)
        for position, value in enumerate(last):
            finals[position].append(value)
    return x, [_joined(g, values) for values in finals]


def _by_layer(g: GraphBuilder, state: Value, layers: int, directions: int) -> Sequence[Value]:
    if layers == 1:
        return [state]
    if _is_zero(g, state):
        return [filled(g, 0, [directions, *g.dims(state)[1:]], state.dtype or FLOAT)] * layers
    return g.op.Split(state, np.full(layers, directions, dtype=np.int64), axis=0, _outputs=layers)


def _in_computed_dtype(
    g: GraphBuilder, mode: Mode, node: FxNode, x: Value, hx: Value | Sequence[Value], params: Sequence[Value]
) -> tuple[Value, list[Value], list[Value]]:
    """The tensors in the dtype of the computation.

    It is float for half types, whose rounding errors would accumulate over the steps.
    """
    if node.dtype.is_integer() or len(params) == 0:
        raise Unsupported("a recurrent layer of integers or without parameters")
    dtype = wide(node.dtype)
    states = [hx] if isinstance(hx, Value) else list(hx)
    return g.cast(x, dtype), [g.cast(s, dtype) for s in states], [g.cast(p, dtype) for p in params]


def over_input(mode: Mode, exact: bool = False) -> Converter:
    """lstm.input, gru.input, rnn_tanh.input, rnn_relu.input: a batch of sequences of one length."""

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        batch_first = node.args[8]
        x, states, params = _in_computed_dtype(g, mode, node, *node.args[:3])
        if rank_of(x) != 3:
            raise Unsupported(f"a recurrent layer over {rank_of(x)} dimensions")
        if batch_first:
            x = g.op.Transpose(x, perm=[1, 0, 2])
        y, finals = _network(g, mode, x, states, params, Options(*node.args[3:8]), exact=exact)
        if batch_first:
            y = g.op.Transpose(y, perm=[1, 0, 2])
        return [g.cast(v, node.dtype) for v in (y, *finals)]

    convert.__name__ = convert.__qualname__ = _name(mode, exact)
    return convert


def _name(mode: Mode, exact: bool) -> str:
    return f"{mode.step.__name__.removesuffix('_step')}{'_exact' if exact else ''}"


def over_packed(mode: Mode, exact: bool = False) -> Converter:
    """lstm.data, gru.data, rnn_tanh.data, rnn_relu.data: a packed sequence.

    The rows of every time step one after the other, ``batch_sizes`` of them each, longest sequences first: padded, run,
    and packed again.
    """

    def convert(g: GraphBuilder, node: FxNode) -> list[Value]:
        sizes = node.args[1]
        data, states, params = _in_computed_dtype(g, mode, node, node.args[0], *node.args[2:4])
        x, active = padded(g, data, sizes, g.dim(states[0], 1))
        y, finals = _network(g, mode, x, states, params, Options(*node.args[4:9]), unsqueeze(g, active, 2), exact)
        return [g.cast(v, node.dtype) for v in (packed(g, y, active), *finals)]

    convert.__name__ = convert.__qualname__ = f"packed_{_name(mode, exact)}"
    return convert


def padded(g: GraphBuilder, data: Value, sizes: Value, batch: int | Value) -> tuple[Value, Value]:
    """Packed rows as (time, batch, features), and the mask of active rows (time, batch). Inactive rows hold row 0."""
    places = g.op.Range(g.const(0), g.as_scalar(batch), g.const(1))
    active = g.op.Less(places, unsqueeze(g, sizes, 1))
    starts = g.op.CumSum(sizes, g.const(0), exclusive=1)
    rows = g.op.Where(active, g.op.Add(unsqueeze(g, starts, 1), places), g.const(0))
    return g.op.Gather(data, rows, axis=0), active


def packed(g: GraphBuilder, x: Value, active: Value) -> Value:
    """The rows of (time, batch, features) that are active, packed."""
    if x.shape is None or not isinstance(x.shape[-1], int):
        raise Unsupported("a packed sequence whose number of features is dynamic")
    rows = g.op.Reshape(x, g.const(np.array([-1, x.shape[-1]], dtype=np.int64)))
    flags = g.op.Reshape(active, g.const(np.array([-1], dtype=np.int64)))
    return g.op.Compress(rows, flags, axis=0)


def pack_padded_sequence(g: GraphBuilder, node: FxNode) -> list[Value]:
    """_pack_padded_sequence(Tensor input, Tensor lengths, bool batch_first) -> (Tensor, Tensor)

    The lengths are sorted, the longest first.
    """
    x, lengths, batch_first = node.args
    if batch_first:
        x = g.op.Transpose(x, perm=[1, 0, *range(2, rank_of(x))])
    steps = unsqueeze(g, g.op.Range(g.const(0), g.as_scalar(g.dim(x, 0)), g.const(1)), 1)
    active = g.op.Less(steps, lengths)
    rows = g.op.Reshape(x, g.vector([-1, *g.dims(x)[2:]]))
    data = g.op.Compress(rows, g.op.Reshape(active, g.const(np.array([-1], dtype=np.int64))), axis=0)
    sizes = reduce(g, "ReduceSum", g.cast(active, INT64), [1], keepdims=False)
    longest = reduce(g, "ReduceMax", lengths, [0], keepdims=True)
    return [data, g.op.Slice(sizes, [0], longest, [0])]


_MODES = {"lstm": LSTM, "gru": GRU, "rnn_tanh": RNN_TANH, "rnn_relu": RNN_RELU}
RULES: list[Rule] = [
    *[Rule(f"aten::{name}.input", over_input(mode)) for name, mode in _MODES.items()],
    *[Rule(f"aten::{name}.data", over_packed(mode)) for name, mode in _MODES.items()],
    *[
        Rule(f"aten::{name}.{overload}", convert(_MODES[name], exact=True), **NAN_IS_LOST)
        for name in ("lstm", "gru", "rnn_relu")
        for overload, convert in (("input", over_input), ("data", over_packed))
    ],
    Rule("aten::_pack_padded_sequence.default", pack_padded_sequence),
    *[Rule(f"aten::{name}_cell.default", cell(mode)) for name, mode in _MODES.items()],
]
