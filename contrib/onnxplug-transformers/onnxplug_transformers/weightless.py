"""Loads models by transformers without some of their weights, which are never made in floats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

_METHOD = "onnxplug_weightless"


def load_around(
    kind: Any, config: Any, tensors: Mapping[str, torch.Tensor], names: Iterable[str], dtype: torch.dtype
) -> tuple[Any, dict[str, Any]]:
    """A model with the given tensors.

    Args:
        names: Linear layers and embeddings whose weights are not among the tensors. In the place of each linear layer
            is a module with its bias alone, and the embeddings have weights of no elements.
        dtype: Element type of the tensors once they are loaded.

    Returns:
        The model, and transformers' information on the loading.
    """
    without = list(names)
    config.quantization_config = {"quant_method": _METHOD, "layers": without}
    # the initialisation of models reads each weight
    state = {**tensors, **{f"{name}.weight": torch.empty(0) for name in without}}
    loaded: tuple[Any, dict[str, Any]] = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
    )
    return loaded


@register_quantization_config(_METHOD)
class _Config(QuantizationConfigMixin):
    def __init__(self, layers: list[str], **_: Any) -> None:
        self.quant_method: Any = _METHOD
        self.layers = layers


class _Weightless(nn.Module):
    """Stands for a linear layer while transformers loads the other tensors."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(0)), linear.bias


class LoadingQuantizer(HfQuantizer):
    """Changes a model as it is loaded; it is neither stored nor trained."""

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


@register_quantizer(_METHOD)
class _Quantizer(LoadingQuantizer):
    """Makes the weights that are not given empty."""

    quantization_config: Any

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        for name in self.quantization_config.layers:
            module, (owner, _, attribute) = model.get_submodule(name), name.rpartition(".")
            if isinstance(module, nn.Embedding):
                module.weight = nn.Parameter(torch.empty(0))
            else:
                setattr(model.get_submodule(owner), attribute, _Weightless(module))
        return model
