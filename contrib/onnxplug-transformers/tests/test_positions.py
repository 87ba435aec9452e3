"""Positions of Funnel and the mask of CPM-Ant at any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onnxplug


@pytest.mark.parametrize("of_class", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_distances_are_those_of_transformers(of_class: bool, cut: bool) -> None:
    from onnxplug_transformers.positions import get_position_embeds
    from transformers.models.funnel import modeling_funnel

    config = modeling_funnel.FunnelConfig(
        d_model=8, block_sizes=[1, 1, 1], separate_cls=of_class, truncate_seq=cut, attention_type="relative_shift"
    )
    structure = modeling_funnel.FunnelAttentionStructure(config).eval()
    for length in range(9, 24):
        known = torch.float32, torch.device("cpu")
        expected = structure.get_position_embeds(length, *known)
        torch.testing.assert_close(get_position_embeds(structure, length, *known), expected)


def _funnel(attention: str, of_class: bool) -> nn.Module:
    from transformers.models.funnel import modeling_funnel

    sizes = {"vocab_size": 99, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "num_decoder_layers": 1}
    settings = {"attention_type": attention, "separate_cls": of_class, "block_sizes": [1, 1, 1]}
    return modeling_funnel.FunnelModel._from_config(modeling_funnel.FunnelConfig(**sizes, **settings))


def _cpmant() -> nn.Module:
    from transformers.models.cpmant import modeling_cpmant

    sizes = {"vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2, "dim_head": 8, "dim_ff": 32}
    settings = {"num_hidden_layers": 1, "prompt_length": 4, "prompt_types": 4, "use_cache": False}
    return modeling_cpmant.CpmAntModel._from_config(modeling_cpmant.CpmAntConfig(**sizes, **settings))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (_funnel, ("relative_shift", True)),
        pytest.param(_funnel, ("relative_shift", False), marks=pytest.mark.long),
        (_cpmant, ()),
    ],
)
def test_texts_of_any_length(make: Any, settings: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    model = make(*settings).eval()
    program = onnxplug.to_onnx(
        model,
        kwargs={"input_ids": torch.randint(1, 99, (2, 9))},
        dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}},
    )
    for size in ((2, 9), (3, 14), (1, 21)):
        ids = torch.randint(1, 99, size)
        ids[-1, :2] = 0  # padding on the left
        with torch.no_grad():
            expected = model(input_ids=ids)[0]
        torch.testing.assert_close(program(input_ids=ids)[0], expected)
