"""Dynamically quantised layers and quantised embeddings: operands and results are ordinary tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.quantized.dynamic as nniqd
import torch.ao.nn.quantized as nnq
import torch.ao.nn.quantized.dynamic as nnqd
from torch import nn
from torch.ao import quantization as tq

import onnxplug
from onnxplug.errors import CaptureError
from tests.support.quantised import IMAGE, ROWS, SEQUENCE, VOLUME, check_quantised, engine, weighted

#: Inputs with both signs, all positive, all zero, and so small that the scale has its least value.
SETS = [(torch.randn(7, 8) * 3,), (torch.rand(4, 8) + 1,), (torch.zeros(2, 8),), (torch.randn(3, 8) * 1e-3,)]


@pytest.fixture(autouse=True, params=["fbgemm", "qnnpack", "onednn"])
def packer(request: pytest.FixtureRequest, seeded: None) -> Iterator[str]:
    if request.param not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no such engine here")
    with engine(request.param):
        yield request.param


def test_linear() -> None:
    model = tq.quantize_dynamic(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), {nn.Linear})
    check_quantised(model, (torch.randn(5, 8),), SETS, quantum=0.02, share=0.05)


def test_linear_relu() -> None:
    check_quantised(weighted(nniqd.LinearReLU(8, 4)), (torch.randn(5, 8),), SETS, quantum=0.02, share=0.05, verify=True)


def test_an_export_leaves_the_kernels_as_they_were() -> None:
    model, x = weighted(nniqd.LinearReLU(8, 4)), torch.randn(1, 8) * 5
    onnxplug.to_onnx(model, (torch.randn(5, 8),))
    assert float(model(x).min()) >= 0  # oneDNN's weights keep the kernel of their first call
    assert torch.equal(model(x), copy.deepcopy(model)(x))


@pytest.mark.parametrize("at_export", ["fbgemm", "qnnpack", "onednn", "x86"])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_the_engine_that_packed_decides(kind: str, at_export: str, packer: str) -> None:
    """QNNPACK quantises activations to 8 bits, the other engines to 7, whatever engine is current at the export."""
    if at_export not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no such engine here")
    layer, x = (
        (nnqd.Linear(8, 4), torch.randn(5, 8)) if kind == "linear" else (nnqd.Conv2d(4, 6, 3), torch.randn(IMAGE))
    )
    model = weighted(layer)
    quantum = 0.0 if kind == "linear" else float(x.max() - x.min()) * 3 / 127
    with engine(at_export):
        check_quantised(model, (x,), [(torch.cat([x, x[:1]]) * 3,)], quantum=quantum, share=0.02)
        assert torch.backends.quantized.engine == at_export


def test_linear_of_halves(packer: str) -> None:
    if packer != "fbgemm":
        pytest.skip("only FBGEMM packs halves")
    model = tq.quantize_dynamic(nn.Sequential(nn.Linear(8, 4)), {nn.Linear}, dtype=torch.float16)
    check_quantised(model, (torch.randn(5, 8),), SETS)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolution(dims: int, transposed: bool, packer: str) -> None:
    if packer == "qnnpack" and dims == 3:
        pytest.skip("PyTorch can't read these weights back")
    if packer == "onednn" and transposed:
        pytest.skip("PyTorch 2.13's oneDNN computes something else than FBGEMM and than the definition")
    shape = {1: SEQUENCE, 2: IMAGE, 3: VOLUME}[dims]
    layer = getattr(nnqd, f"Conv{'Transpose' if transposed else ''}{dims}d")(4, 6, 3, padding=1)
    model = weighted(layer, by_channel=not transposed)
    x = torch.randn(shape)
    # The result has the scale of the operand.
    quantum = float(x.max() - x.min()) * 3 / 127
    check_quantised(model, (x,), [(torch.cat([x, x[:1]]) * 3,)], quantum=quantum, share=0.02)


def embeddings(dtype: torch.dtype) -> tuple[Any, Any]:
    setting = (
        tq.float_qparams_weight_only_qconfig_4bit if dtype == torch.quint4x2 else tq.float_qparams_weight_only_qconfig
    )
    single, bag = nn.Embedding(10, 6), nn.EmbeddingBag(10, 6, mode="sum", include_last_offset=True)
    single.qconfig = bag.qconfig = setting
    single, bag = tq.convert(tq.prepare(nn.ModuleList([single, bag])))
    for layer in (single, bag):
        layer.dtype = dtype  # convert leaves it at quint8
    return single, bag


@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2], ids=str)
def test_embedding(dtype: torch.dtype, packer: str) -> None:
    single, bag = embeddings(dtype)
    check_quantised(single, (torch.arange(8).view(2, 4),), [(torch.tensor([[9, 0, 5, 5]]).repeat(5, 1),)])
    others = [(torch.tensor([9, 0, 5, 5, 1, 2, 3, 4]), torch.tensor([0, 0, 8]))]
    check_quantised(bag, (torch.arange(8), torch.tensor([0, 3, 8])), others, dynamic=False)


def test_bags_of_one_length() -> None:
    bag: Any = nnq.EmbeddingBag(10, 6, mode="sum", include_last_offset=False)
    weight = torch.randn(10, 6)
    scales, zeros = torch.rand(10) * 0.01 + 0.005, torch.rand(10) * 255
    bag.set_weight(torch.quantize_per_channel(weight, scales, zeros, 0, torch.quint8))
    check_quantised(bag, (torch.arange(8).view(2, 4),), [(torch.arange(3, 7).repeat(3, 1),)])


CELLS = {name: getattr(nnqd, name) for name in ("LSTMCell", "GRUCell")}
CELLS |= {
    f"RNNCell_{name}": (lambda *sizes, name=name: nnqd.RNNCell(*sizes, nonlinearity=name)) for name in ("tanh", "relu")
}


@pytest.mark.parametrize("name", CELLS)
def test_cell(name: str, packer: str) -> None:
    if packer == "onednn":
        pytest.skip("packed as with FBGEMM")
    check_quantised(CELLS[name](8, 4), (torch.randn(5, 8),), SETS, quantum=0.02, share=0.05)


class Outputs(nn.Module):
    """A recurrent layer with flat results, with or without an initial state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *state: torch.Tensor) -> Any:
        inputs = (state if len(state) > 1 else state[0]) if state else None
        output, last = self.layer(x, inputs)
        return (output, *last) if isinstance(last, tuple) else (output, last)


@pytest.mark.parametrize(
    "settings", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=["one", "four"]
)
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.long
def test_recurrent(kind: Any, dtype: torch.dtype, settings: dict[str, Any], packer: str) -> None:
    if packer == "onednn" or (packer == "qnnpack" and dtype == torch.float16):
        pytest.skip("packed as with FBGEMM, or not at all")
    model = Outputs(tq.quantize_dynamic(nn.Sequential(kind(6, 5, **settings)), {kind}, dtype=dtype)[0])
    others = [(torch.randn(9, 3, 6) * 2,), (torch.randn(1, 3, 6),), (torch.zeros(2, 3, 6),)]
    program = check_quantised(model, (torch.randn(7, 3, 6),), others)
    assert "Scan" in {node.op_type for node in program.model.graph}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.long
def test_recurrent_with_a_state(kind: Any, dynamic: bool, packer: str) -> None:
    if packer == "onednn":
        pytest.skip("packed as with FBGEMM")
    model = Outputs(tq.quantize_dynamic(nn.Sequential(kind(6, 5, 2)), {kind})[0])
    count = 2 if kind is nn.LSTM else 1
    lengths = [7, 4, 1] if dynamic else [7, 7, 7]
    sets = [(torch.randn(n, 3, 6), *[torch.randn(2, 3, 5) for _ in range(count)]) for n in lengths]
    shapes = (ROWS, ({},) * count) if dynamic else None
    check_quantised(model, sets[0], sets[1:], dynamic=dynamic, shapes=shapes)


@pytest.mark.parametrize("lead", [(5,), (3, 5), (2, 3, 5)], ids=lambda lead: f"{len(lead) + 1}d")
def test_linear_of_static_shape(lead: tuple[int, ...]) -> None:
    """A linear layer with static sizes, for which ONNX Runtime takes another kernel."""
    model = tq.quantize_dynamic(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), {nn.Linear})
    sets = [(torch.randn(*lead, 8) * 3,) for _ in range(3)]
    check_quantised(model, sets[0], sets[1:], quantum=0.02, share=0.05, dynamic=False)


def test_packed_sequences_are_refused(packer: str) -> None:
    class Packs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = tq.quantize_dynamic(nn.Sequential(nn.GRU(6, 5)), {nn.GRU})[0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 2])))[1]

    with pytest.raises(CaptureError):
        onnxplug.to_onnx(Packs().eval(), (torch.randn(4, 2, 6),))
