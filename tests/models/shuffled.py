"""Models whose results PyTorch gives in another order at each run, with sorted results, which can be compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class Shuffled(nn.Module):
    """ViLT, which shuffles an image's patches: each channel of their states is sorted, and all numbers are still compared.

    The states of the text and of the whole image stand before those of the patches, and don't depend on their order.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        states, pooled = self.module(input_ids=input_ids, pixel_values=pixel_values, **options)[:2]
        first = input_ids.shape[1] + 1
        return states[:, :first], states[:, first:].sort(1).values, pooled


#: The wrapper in which a model is measured, by the model's class.
SORTED: Mapping[str, Callable[[nn.Module], nn.Module]] = {"ViltModel": Shuffled}
