"""float4_e2m1fn_x2: two numbers of four bits in a byte, which torch stores and views and computes nothing with."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch

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
