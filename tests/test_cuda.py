"""Models on a GPU: exported, saved and verified as on the CPU. A machine without a GPU skips these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug
from tests.support.check import Call, check

AUTO = torch.export.Dim.AUTO

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def _drawn(model: nn.Module) -> nn.Module:
    """A model for inference on the GPU, with random weights instead of ones and zeros."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) * 0.5 + 0.1)
    return model.eval().cuda()


def _convolutions(channels: int = 8) -> nn.Module:
    layers = [nn.Conv2d(3, channels, 3, bias=False), nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3)]
    return _drawn(nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU()))


def _verified(model: Any, *args: Tensor, dynamic: Any = None) -> onnxplug.OnnxProgram:
    module = model if isinstance(model, nn.Module) else Call(model)
    program = onnxplug.to_onnx(module, args, dynamic_shapes=dynamic)
    program.verify()
    return program


@pytest.mark.parametrize("channels", [8, 1200], ids=["small", "large"])
def test_weights_of_norms_go_into_convolutions(channels: int, seeded: None, tmp_path: Path) -> None:
    model, x = _convolutions(channels), torch.randn(2, 3, 9, 9, device="cuda")
    program = _verified(model, x)
    assert not [node for node in program.model.graph if node.op_type == "BatchNormalization"]
    onnxplug.to_onnx(model, (x,), tmp_path / "model.onnx", external_data=True, verify=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_that_are_given_later(device: str, seeded: None) -> None:
    model, other, x = _convolutions(), _convolutions(), torch.randn(2, 3, 9, 9, device="cuda")
    program = onnxplug.to_onnx(model, (x,))
    program.apply_weights({name: tensor.to(device) for name, tensor in other.state_dict().items()})
    assert torch.equal(program(x)[0], onnxplug.to_onnx(other, (x,))(x)[0])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_tf32_is_no_difference(layer: type[nn.Module], seeded: None) -> None:
    model = layer(8, 16, 2, batch_first=True).cuda()
    _verified(model, torch.randn(3, 7, 8, device="cuda"), dynamic=({0: AUTO, 1: AUTO},))


def test_code_that_asks_for_the_device(seeded: None) -> None:
    program = _verified(lambda x: x * 2 if x.is_cuda else x * 3, torch.randn(3, 4, device="cuda"))
    x = torch.randn(3, 4, device="cuda")
    torch.testing.assert_close(program(x)[0], x.cpu() * 2)


def test_choices_among_equal_elements(seeded: None) -> None:
    def model(x: Tensor) -> tuple[Tensor, ...]:
        return torch.sort(x, 1)[1], torch.topk(x, 3, 1)[1], x.argmax(1), torch.unique(x, return_inverse=True)[1]

    _verified(model, (torch.randn(4, 50, device="cuda") * 3).round(), dynamic=(({0: AUTO, 1: AUTO},),))


def test_sizes_beyond_a_table_leave_the_gpu_usable(seeded: None) -> None:
    """On a GPU, an index beyond a table is an error of the whole process."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table(torch.arange(x.shape[1], device=x.device))

    _verified(Positions().cuda(), torch.randn(2, 7, 4, device="cuda"), dynamic=({1: AUTO},))
    assert torch.ones(3, device="cuda").sum() == 3


def test_packed_sequences(seeded: None) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 5, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)

    x, lengths = torch.randn(3, 6, 4, device="cuda"), torch.tensor([2, 6, 3])
    check(
        Packed().cuda(),
        x,
        lengths,
        others=[(x[:2].flip(0), torch.tensor([6, 1]))],
        dynamic=({0: "b", 1: "t"}, {0: "b"}),
    )


def test_halves_and_autocast(seeded: None) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return self.layers(x).float()

    _verified(Halves().cuda(), torch.randn(3, 16, device="cuda"), dynamic=({0: AUTO},))
