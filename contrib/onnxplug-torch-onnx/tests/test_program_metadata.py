"""Full metadata: the text of FX nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from onnxplug_torch_onnx.program_metadata import FullMetadata

from onnxplug.capture.signature import Captured
from onnxplug.functionalize.prepare import prepare

PROGRAMS: dict[str, Callable[[torch.Tensor], object]] = {
    "lists": lambda x: torch.nn.functional.pad(x, [1, 1, 0, 2]).permute(1, 0),
    "keyword arguments": lambda x: torch.sum(x.to(torch.float64), dim=[0], keepdim=True, dtype=torch.float16),
    "texts and None": lambda x: (
        torch.einsum("ij,kj->ik", x, x),
        torch.div(x, 2, rounding_mode="floor"),
        x[None, :, 1:],
    ),
    "lists of nodes": lambda x: torch.cat([x, x * 2.5, torch.full_like(x, float("inf"))], dim=-1),
    "an index": lambda x: x[:, torch.tensor([0, 1])] + x[x > 0].sum(),
    "several results": lambda x: torch.topk(x, 2, dim=1, largest=False)[1] + torch.split(x, [1, 3], 1)[0].long().sum(),
    "a branch": lambda x: torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: -x, (x,)),
    "numbers": lambda x: x.clamp(min=-1e-07, max=10**12) ** True,
}


class Model(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_line_agrees_with_torchs(name: str) -> None:
    rows = torch.export.Dim("rows", min=3)
    captured = torch.export.export(Model(PROGRAMS[name]), (torch.randn(3, 4),), dynamic_shapes=({0: rows},))
    for program in (captured, captured.run_decompositions()):
        lines = [str(fx.format_node()) for fx in program.graph.nodes if fx.op != "output"]
        metadata = FullMetadata(program, prepare(Captured(program)))
        assert [metadata.line(fx) for fx in program.graph.nodes if fx.op != "output"] == lines
        assert metadata.listing() == "\n".join(["graph():", *(f"    {line}" for line in lines)])
