"""Models whose results have a list with one tensor for each image, without this list, so that their batch can be dynamic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class WithoutList(nn.Module):
    """A model without the result that has one tensor for each image; it returns all other results, by name.

    An ONNX model has a fixed number of outputs, so that such a list fixes the batch at the example's. Its tensors are written into the
    embeddings of the text, so that wrong ones show in the logits.
    """

    def __init__(self, module: nn.Module, place: str) -> None:
        super().__init__()
        self.module = module
        self.place = place.split(".")

    def forward(self, **inputs: Any) -> dict[str, Any]:
        return _without(self.module(**inputs), self.place)


def _without(results: Mapping[str, Any], place: list[str]) -> dict[str, Any]:
    name, *inner = place
    kept = dict(results)
    left_out = kept.pop(name, None)  # transformers 5.24 returns no list with some models
    if inner and isinstance(left_out, Mapping):
        kept[name] = _without(left_out, inner)
    return kept


#: The result without which a model is measured, by the model's class; for SmolVLM it is a result of the encoder.
LISTS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "DeepseekOcr2ForConditionalGeneration",
            "MiniMaxM3SparseForConditionalGeneration",
            "Step3p7ForConditionalGeneration",
            "UnlimitedOcrForConditionalGeneration",
        ),
        "image_hidden_states",
    ),
    "Granite4VisionForConditionalGeneration": "deepstack_features",
    "SmolVLMForConditionalGeneration": "image_hidden_states.pooler_output",
}
