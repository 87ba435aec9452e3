"""LSTM, GRU and Elman networks: layers, packed sequences, cells."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import onnxplug
from tests.support.check import check
from tests.support.sampling import rotated
from tests.support.tolerances import looser

AUTO = torch.export.Dim.AUTO
#: torch rounds every operation of a layer in a half type, the exported model only the results.
HALF = looser("recurrent, float16")


def tensor(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm_deep": (nn.LSTM, {"num_layers": 3}),
    "lstm_both": (nn.LSTM, {"bidirectional": True}),
    "lstm_deep_both_batch_first": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "lstm_no_bias": (nn.LSTM, {"bias": False, "num_layers": 2}),
    "lstm_projected": (nn.LSTM, {"proj_size": 2}),
    "lstm_projected_deep": (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True, "bias": False}),
    "lstm_dropout_in_eval": (nn.LSTM, {"num_layers": 2, "dropout": 0.5}),
    "gru": (nn.GRU, {}),
    "gru_deep_both": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "gru_no_bias_batch_first": (nn.GRU, {"bias": False, "batch_first": True}),
    "rnn": (nn.RNN, {}),
    "rnn_deep_both": (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
    "rnn_relu_deep_both": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2, "bidirectional": True, "bias": False}),
}


def layer(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> nn.RNNBase:
    torch.manual_seed(3)
    kind, options = LAYERS[name]
    return kind(3, 5, **options, **more).to(dtype).eval()


def states(module: nn.RNNBase, batch: int | None, dtype: torch.dtype, seed: int = 7) -> Any:
    count = module.num_layers * (2 if module.bidirectional else 1)
    middle = () if batch is None else (batch,)
    h = tensor(count, *middle, module.proj_size or module.hidden_size, seed=seed).to(dtype)
    return (h, tensor(count, *middle, module.hidden_size, seed=seed + 1).to(dtype)) if module.mode == "LSTM" else h


@pytest.mark.parametrize(
    ("name", "dtype"), rotated(LAYERS, [torch.float32, torch.float64, torch.float16, torch.bfloat16], every=2)
)
def test_layer(name: str, dtype: torch.dtype) -> None:
    module = layer(name, dtype)
    inputs = [tensor(*shape, 3, seed=s).to(dtype) for s, shape in enumerate([(4, 6), (9, 2), (1, 1), (2, 17)])]
    # Without saturation, sums of large numbers that cancel differ by their order.
    inputs.append(tensor(3, 3, 3, scale=1.0 if "relu" in name else 1e4).to(dtype))
    tolerance = HALF if dtype == torch.float16 else looser("recurrent, bfloat16") if dtype == torch.bfloat16 else {}
    check(module, inputs[0], others=[(x,) for x in inputs[1:]], dynamic=({0: AUTO, 1: AUTO},), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_initial_states(name: str, dtype: torch.dtype) -> None:
    module = layer(name, dtype)

    def inputs(steps: int, batch: int, seed: int) -> tuple[Any, ...]:
        shape = (batch, steps) if module.batch_first else (steps, batch)
        return tensor(*shape, 3, seed=seed).to(dtype), states(module, batch, dtype, seed)

    state = {1: AUTO}
    dynamic = ({0: AUTO, 1: AUTO}, (state, state) if module.mode == "LSTM" else state)
    check(module, *inputs(5, 4, 1), others=[inputs(1, 2, 2), inputs(7, 1, 3)], dynamic=dynamic)


@pytest.mark.parametrize("opset", [13, 17, 22, 26])
@pytest.mark.parametrize("name", ["lstm_deep_both_batch_first", "lstm_projected", "gru_deep_both", "rnn_relu"])
def test_opsets(name: str, opset: int) -> None:
    check(layer(name), tensor(4, 6, 3), others=[(tensor(2, 1, 3),)], dynamic=({0: AUTO, 1: AUTO},), opset=opset)


@pytest.mark.parametrize("name", ["lstm_both", "lstm_projected", "gru_deep_both", "rnn"])
def test_unbatched(name: str) -> None:
    module = layer(name)
    check(module, tensor(5, 3), others=[(tensor(1, 3),)], dynamic=({0: AUTO},))
    check(module, tensor(5, 3), states(module, None, torch.float32))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["lstm_both", "gru_deep_both", "rnn", "rnn_relu", "lstm_projected"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_that_are_not_finite(name: str, dtype: torch.dtype, exact: bool) -> None:
    def inputs(steps: int, batch: int) -> torch.Tensor:
        x = tensor(steps, batch, 3).to(dtype)
        x[1, 1, 0], x[2, 2, 2] = float("inf"), float("-inf")
        # ONNX Runtime's LSTM and GRU clip the inputs of a gate, and its ReLU is a maximum: NaN becomes a number.
        x[2, 0, 1] = float("nan") if exact or dtype == torch.float64 or name in ("rnn", "lstm_projected") else 1.0
        return x

    dynamic = ({0: AUTO, 1: AUTO},)
    check(layer(name, dtype), inputs(5, 4), others=[(inputs(3, 6),)], dynamic=dynamic, exact=exact)


@pytest.mark.parametrize("name", ["lstm_both", "gru_deep_both"])
def test_packed_values_that_are_not_finite(name: str) -> None:
    def inputs(*lengths: int) -> tuple[Any, ...]:
        rows = nn.utils.rnn.pack_sequence([tensor(n, 3, seed=n) for n in lengths])
        rows.data[1, 1] = float("nan")
        return rows.data, rows.batch_sizes, states(module, len(lengths), torch.float32)

    module, state = layer(name), {1: AUTO}
    dynamic = ({0: AUTO}, {0: AUTO}, (state, state) if module.mode == "LSTM" else state)
    check(Packed(module), *inputs(5, 3, 2), others=[inputs(4, 1), inputs(2, 2, 1)], dynamic=dynamic, exact=True)


@pytest.mark.parametrize("name", ["lstm_both", "gru_deep_both", "rnn"])
def test_empty_batch(name: str) -> None:
    check(layer(name), tensor(4, 0, 3))


def test_one_node_a_layer() -> None:
    """A layer is one node also for many steps, and where the number of steps is dynamic by name."""
    steps = torch.export.Dim("steps", min=2)
    for name, op_type in (("lstm_deep_both_batch_first", "LSTM"), ("gru_deep_both", "GRU"), ("rnn_deep_both", "RNN")):
        module = layer(name)
        dynamic = ({1: steps},) if module.batch_first else ({0: steps},)
        program = check(module, tensor(300, 300, 3), dynamic=dynamic)
        counts = Counter(node.op_type for node in program.model.graph)
        assert counts[op_type] == 2
        assert sum(counts.values()) <= 30


def test_dropout_between_layers() -> None:
    """Dropout in training is random; with a probability of one the result is determined."""
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="training mode"):
        check(nn.GRU(3, 5, num_layers=2, dropout=1.0), tensor(4, 2, 3))
    module = nn.LSTM(3, 5, num_layers=3, dropout=0.25)
    with pytest.warns(UserWarning, match="training mode"):
        program = onnxplug.to_onnx(module, (tensor(4, 2, 3),))
    assert [node.op_type for node in program.model.graph].count("RandomUniformLike") == 2
    with torch.no_grad():
        ours = torch.stack([program(tensor(4, 2, 3))[0] for _ in range(300)])
        theirs = torch.stack([module(tensor(4, 2, 3))[0] for _ in range(300)])
    assert not torch.equal(ours[0], ours[1])
    # Means of 300 draws, and their spread.
    deviation = theirs.std(0)
    assert bool(((ours.mean(0) - theirs.mean(0)).abs() <= 6 * deviation * (2 / 300) ** 0.5 + 1e-6).all())
    assert bool((ours.std(0) / deviation).log().abs().max() < 0.5)


class Packed(nn.Module):
    """A layer over packed rows, as torch's own modules call it."""

    def __init__(self, module: nn.RNNBase) -> None:
        super().__init__()
        self.module = module

    def forward(self, data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any) -> Any:
        m = self.module
        function = {"LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu}[
            m.mode
        ]
        rest = (m._flat_weights, m.bias, m.num_layers, m.dropout, m.training, bool(m.bidirectional))
        return function(data, batch_sizes, hx, *rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", [name for name in LAYERS if "batch_first" not in name and name != "rnn_relu"])
def test_packed(name: str, dtype: torch.dtype) -> None:
    module = layer(name, dtype)

    def inputs(lengths: list[int], seed: int) -> tuple[Any, ...]:
        sequences = [tensor(n, 3, seed=seed + n).to(dtype) for n in lengths]
        rows = nn.utils.rnn.pack_sequence(sequences)
        return rows.data, rows.batch_sizes, states(module, len(lengths), dtype, seed)

    state = {1: AUTO}
    dynamic = ({0: AUTO}, {0: AUTO}, (state, state) if module.mode == "LSTM" else state)
    others = [inputs([6, 6, 6], 1), inputs([9, 1], 2), inputs([1, 1], 3), inputs([4], 4), inputs([8, 5, 5, 2, 1, 1], 5)]
    check(
        Packed(module),
        *inputs([5, 3, 3, 2], 0),
        others=others,
        dynamic=dynamic,
        **(HALF if dtype == torch.float16 else {}),
    )


CELLS = {
    "lstm": lambda bias: nn.LSTMCell(3, 5, bias=bias),
    "gru": lambda bias: nn.GRUCell(3, 5, bias=bias),
    "rnn": lambda bias: nn.RNNCell(3, 5, bias=bias),
    "rnn_relu": lambda bias: nn.RNNCell(3, 5, bias=bias, nonlinearity="relu"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    module = CELLS[name](bias).to(dtype)
    tolerance = HALF if dtype == torch.float16 else looser("recurrent, bfloat16") if dtype == torch.bfloat16 else {}

    def inputs(batch: int, seed: int) -> tuple[Any, ...]:
        h = tensor(batch, 5, seed=seed + 1).to(dtype)
        return tensor(batch, 3, seed=seed).to(dtype), (
            h,
            tensor(batch, 5, seed=seed + 2).to(dtype),
        ) if name == "lstm" else h

    state = {0: AUTO}
    dynamic = (state, (state, state) if name == "lstm" else state)
    others = [inputs(1, 1), inputs(0, 2), (tensor(3, 3, scale=1e3).to(dtype), inputs(3, 3)[1])]
    check(module, *inputs(4, 0), others=others, dynamic=dynamic, **tolerance)
    check(module, tensor(3).to(dtype), **tolerance)


def test_loop_over_a_cell() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = c = torch.zeros(x.shape[1], 5)
            for step in x:
                h, c = self.cell(step, (h, c))
            return h

    torch.manual_seed(1)
    check(Unrolled(), tensor(4, 2, 3), others=[(tensor(4, 5, 3, seed=1),)], dynamic=({1: AUTO},))
