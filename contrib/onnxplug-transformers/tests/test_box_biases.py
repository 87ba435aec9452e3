"""SAM 3's boxes: their attention has a bias for each place of an image of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import onnxplug


class Boxes(nn.Module):
    """The decoder of SAM 3 or of its light version; it takes a map of features, [batch, channels, rows, columns], and a text's."""

    def __init__(self, family: str) -> None:
        import transformers
        from transformers.models import sam3, sam3_lite_text

        super().__init__()
        folder = {"Sam3": sam3.modeling_sam3, "Sam3LiteText": sam3_lite_text.modeling_sam3_lite_text}[family]
        config = getattr(transformers, f"{family}DETRDecoderConfig")(
            hidden_size=16, num_layers=2, num_queries=5, num_attention_heads=2, intermediate_size=24
        )
        self.decoder = getattr(folder, f"{family}DetrDecoder")(config)

    def forward(self, features: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        places = features.flatten(2).transpose(1, 2)
        sizes = torch.tensor([features.shape[2:]])
        found = self.decoder(places, text, places.cos(), spatial_shapes=sizes)
        return found.intermediate_hidden_states, found.reference_boxes


@pytest.mark.parametrize("family", ["Sam3", "Sam3LiteText"])
def test_images_of_any_size(family: str) -> None:
    torch.manual_seed(0)
    model = Boxes(family).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    example = torch.randn(2, 16, 4, 6), torch.randn(2, 7, 16)
    program = onnxplug.to_onnx(
        model, example, dynamic_shapes=({0: "batch", 2: "rows", 3: "columns"}, {0: "batch", 1: "tokens"})
    )
    for batch, rows, columns, tokens in ((2, 4, 6, 7), (1, 3, 5, 2), (3, 1, 1, 9)):
        program.verify(args=(torch.randn(batch, 16, rows, columns), torch.randn(batch, tokens, 16)), seeds=())
