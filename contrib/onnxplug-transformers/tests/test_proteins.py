"""Evolla's adapters, with masks of proteins whose values only a call knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onnxplug

_KINDS = ("protein", "structure", "msa")


class Adapter(nn.Module):
    """An adapter that reads proteins, structures and alignments."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.evolla import modeling_evolla

        settings = {
            "hidden_size": 16,
            "num_attention_heads": 2,
            "aligner_num_add_layers": 1,
            "aligner_enable_bias": True,
            "aligner_ffn_mult": 2,
            "aligner_attention_probs_dropout_prob": 0.0,
        }
        config: Any = SimpleNamespace(**settings)
        made: Any = modeling_evolla.EvollaSequenceAlignerCrossAttention
        self.adapter = made(config, protein_encoder_dim=8, structure_encoder_dim=6, msa_encoder_dim=4)
        with torch.no_grad():
            self.adapter.gate_attention.fill_(0.7)
            self.adapter.gate_ffw.fill_(-0.4)

    def forward(self, text: Tensor, mask: Tensor, protein: Tensor, structure: Tensor, msa: Tensor, **given: Any) -> Any:
        return self.adapter(text, protein, structure, msa, mask, **given)


def _case(batch: int, tokens: int, places: int, masks: str, share: float) -> dict[str, Tensor]:
    case = {"text": torch.randn(batch, tokens, 16), "mask": (torch.rand(batch, tokens) < 0.8).long()}
    for kind, width in zip(_KINDS, (8, 6, 4), strict=True):
        case[kind] = torch.randn(batch, places, width)
        if masks == "places":
            case[f"{kind}_kv_attn_mask"] = (torch.rand(batch, places) < share).float()
        else:
            case[f"{kind}_batch_mask"] = torch.rand(batch) < share
    return case


@pytest.mark.parametrize("masks", ["places", "batch"])
def test_masks_with_and_without_places(masks: str) -> None:
    """If no mask shows a place, the text's states stay as they are."""
    torch.manual_seed(0)
    model = Adapter().eval()
    example = _case(2, 5, 3, masks, 0.5)
    axes = {"text": ("batch", "tokens"), "mask": ("batch", "tokens")}
    dynamic = {name: dict(enumerate(axes.get(name, ("batch", "places")[: x.dim()]))) for name, x in example.items()}
    program = onnxplug.to_onnx(model, kwargs=example, dynamic_shapes=dynamic)
    for share in (0.0, 0.3, 1.0):
        program.verify(kwargs=_case(3, 4, 6, masks, share), seeds=())
    case = _case(1, 7, 2, masks, 0.0)
    torch.testing.assert_close(program(**case)[0], case["text"], rtol=0, atol=0)


def test_patched_results_are_those_of_transformers() -> None:
    from onnxplug_transformers.proteins import proteins_read_by_masks

    torch.manual_seed(0)
    model = Adapter().eval()
    cases = [_case(2, 3, 4, masks, share) for masks in ("places", "batch") for share in (0.0, 0.1, 0.2, 0.5, 1.0)]
    with torch.no_grad():
        expected = [model(**case) for case in cases]
        with proteins_read_by_masks():
            got = [model(**case) for case in cases]
            alone = model.adapter(cases[0]["text"], None, None, None, cases[0]["mask"])
    torch.testing.assert_close(got, expected)
    assert alone is cases[0]["text"]
