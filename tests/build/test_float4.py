"""float4_e2m1fn_x2: two numbers of four bits in a byte, which torch stores and views and computes nothing with."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch

import onnxplug
from tests.support.check import check


class FourBitWeights(torch.nn.Module):
    """A product with weights of two numbers of four bits in a byte, as torch packs float4_e2m1fn."""

    def __init__(self) -> None:
        super().__init__()
        packed = torch.randint(0, 256, (4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        self.register_buffer("packed", packed.view(torch.float4_e2m1fn_x2))
        self.register_buffer("numbers", torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.packed.view(torch.uint8)
        halves = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
        return x @ torch.where(halves < 8, self.numbers[halves % 8], -self.numbers[halves % 8]).mT


def test_weights_of_float4(tmp_path: Path) -> None:
    program = check(FourBitWeights(), torch.randn(3, 16), others=[(torch.randn(3, 16),)])
    for external in (True, False):
        path = tmp_path / f"{external}.onnx"
        program.save(path, external_data=external)
        assert any(list(i.dims) == [4, 8] for i in onnx.load(path).graph.initializer)


def test_tensors_of_float4_are_bytes() -> None:
    x = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    check(lambda x: x.view(torch.float4_e2m1fn_x2).clone()[1:].view(torch.uint8) + 1, x, others=[(x * 7,)])
    check(
        lambda x: x.view(torch.uint8) * 2,
        x.view(torch.float4_e2m1fn_x2),
        others=[((x * 7).view(torch.float4_e2m1fn_x2),)],
    )


class Bytes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x.clone(), x[1:], x.view(torch.uint8) // 2


class Slice(torch.nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.float4_e2m1fn_x2)[self.start : self.start + 2]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_verification_of_float4(dynamic: bool) -> None:
    shapes = ({0: torch.export.Dim.DYNAMIC},) if dynamic else None
    x = torch.arange(32, dtype=torch.uint8).reshape(4, 8) * 7
    program = onnxplug.to_onnx(Bytes(), (x.view(torch.float4_e2m1fn_x2),), dynamic_shapes=shapes, verify=True)
    assert all(case.max_abs_difference == 0 for case in program.verify().cases)
    onnxplug.to_onnx(Slice(1), (x,), dynamic_shapes=shapes, verify=True)
    assert torch.equal(program(x.view(torch.float4_e2m1fn_x2))[1], x[1:])


def test_verification_of_float4_finds_differences() -> None:
    x = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    model = Slice(1)
    program = onnxplug.to_onnx(model, (x,))
    model.start = 0
    with pytest.raises(onnxplug.VerificationError, match="differs at index"):
        program.verify()
