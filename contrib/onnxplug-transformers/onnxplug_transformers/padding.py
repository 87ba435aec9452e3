"""Padding moved in front of the tokens that it is among, for layers that hand states on from token to token.

In front of a text it leaves states of zeros as they are; elsewhere it would be a part of the text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from onnxplug.torch_private import pytree
from onnxplug_transformers.fused import rows_at

_MASKS = ("attention_mask", "conv_mask")


def layers_with_states(model: nn.Module) -> list[nn.Module]:
    """The modules that hand on states: all of them begin with a convolution over tokens."""
    return [
        module
        for module in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in module.children())
        and "hidden_states" in inspect.signature(module.forward).parameters
    ]


@contextmanager
def padding_in_front(layers: Sequence[nn.Module], mask: torch.Tensor) -> Iterator[None]:
    """Holds while a model is called: layers see the tokens of each row behind its padding, and results are moved back.

    Args:
        layers: The layers, whose results have the axes batch and sequence in front.
        mask: [batch, sequence], 0 for padding among the new tokens.
    """
    order = mask.argsort(dim=1, stable=True)
    back = order.argsort(dim=1)
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(_moved(order), with_kwargs=True),
            layer.register_forward_hook(_moved_back(back)),
        )
    ]
    try:  # the capture can't know that an ExitStack suppresses no errors
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _moved(order: torch.Tensor) -> Callable[..., Any]:
    def hook(layer: Any, args: Any, kwargs: Any) -> Any:
        call = inspect.signature(layer.forward).bind(*args, **kwargs)
        call.arguments["hidden_states"] = rows_at(call.arguments["hidden_states"], order)
        for name in _MASKS:
            if call.arguments.get(name) is not None:
                call.arguments[name] = call.arguments[name].gather(1, order)
        return call.args, call.kwargs

    return hook


def _moved_back(order: torch.Tensor) -> Callable[..., Any]:
    return lambda _, __, results: pytree.tree_map(lambda x: rows_at(x.flatten(2), order).view_as(x), results)
