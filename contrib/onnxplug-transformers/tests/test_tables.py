"""SLANet and SLANeXt: as many steps as the tokens of a table, which end when each row of the batch has had the last token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug

LOOSER = {"steps": ({"rtol": 1e-3, "atol": 1e-4}, "a recurrence over ten steps behind a network of convolutions")}


def head_of(name: str, **changes: Any) -> nn.Module:
    """The head of a model, whose tokens differ between rows."""
    import importlib

    module = importlib.import_module(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    configuration = importlib.import_module(f"transformers.models.{name.lower()}.configuration_{name.lower()}")
    sizes = {"post_conv_out_channels": 12, "hidden_size": 16, "out_channels": 3, "max_text_length": 11}
    config = getattr(configuration, f"{name}Config")(**{**sizes, **changes})
    torch.manual_seed(3)
    head: nn.Module = getattr(module, f"{name}SLAHead")(config).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.9)
    return head


class Probabilities(nn.Module):
    """The probabilities alone."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(hidden).last_hidden_state
        return result


@pytest.mark.parametrize("name", ["SLANet", "SLANeXt"])
def test_as_many_steps_as_tokens(name: str) -> None:
    model = Probabilities(head_of(name))
    sizes = ({0: "batch", 1: "places"},)
    program = onnxplug.to_onnx(model, (torch.randn(2, 5, 12),), dynamic_shapes=sizes)
    assert program.statistics.operators["Loop"] == 1
    counts = set()
    for seed, (batch, places) in enumerate([(2, 5), (1, 1), (1, 9), (1, 4), (3, 7), (1, 6), (2, 3)]):
        hidden = torch.randn(batch, places, 12, generator=torch.Generator().manual_seed(seed)) * 2
        program.verify(args=(hidden,), seeds=(), **LOOSER["steps"][0])
        counts.add(model(hidden).shape[1])
    assert len(counts) > 2, counts
    assert max(counts) == 12  # no row has the last token: the loop ends by its number


def test_a_list_of_steps_is_refused() -> None:
    """Their number is no number of outputs."""
    model = head_of("SLANet", output_hidden_states=True)
    with pytest.raises(onnxplug.CaptureError, match="depends on values"):
        onnxplug.to_onnx(model, (torch.randn(2, 5, 12),))
