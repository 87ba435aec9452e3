"""Attention that is in both directions or causal by its layers alone, with the masks that it has outside of an export.

transformers gives PyTorch's attention no mask where no token is padding, and the layers' ``is_causal`` decides: in Gemma and
Gemma 2 (PaliGemma, ColPali) with ``use_bidirectional_attention``, and in AIMv2's texts, each token sees all others; in Phi-4's
images each patch sees those before it. In an export it makes a mask, in both directions for Phi-4 and causal for the others, and
the results differ.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import in_use

#: Types of models in which the layers alone read ``use_bidirectional_attention``, as ``is_causal``.
_TYPES = frozenset({"gemma", "gemma2"})
#: Types of models with causal masks and layers that are never causal themselves.
_TYPES_OF_BOTH = frozenset({"aimv2_text_model"})
#: The functions that make masks.
_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask")
#: Types of models with masks for both directions and layers whose ``is_causal`` says otherwise.
_CAUSAL_TYPES = frozenset({"phi4_multimodal_vision"})


@contextlib.contextmanager
def masks_of_both_directions() -> Iterator[None]:
    """Holds while a model is captured."""
    with ExitStack() as stack:
        for maker in _MAKERS:
            for owner, name, before in in_use(maker):
                stack.enter_context(patched(owner, name, _of_both_directions(before, "sliding" in maker)))
        yield


@contextlib.contextmanager
def masks_that_are_causal() -> Iterator[None]:
    """Holds while a model is captured."""
    with ExitStack() as stack:
        for owner, name, before in in_use("create_bidirectional_mask"):
            stack.enter_context(patched(owner, name, _causal(before)))
        yield


def _of_both_directions(make: Callable[..., Any], is_sliding: bool) -> Callable[..., Any]:
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if mask is None or not _may_be_left_out(given):
            return mask
        inputs, padding = given["inputs_embeds"], given.get("attention_mask")
        length = inputs.shape[1]
        if padding is not None:
            kept = padding.bool()
            is_left_out = kept[:, :length].all() & ~kept[:, length:].any()
        elif (positions := given.get("position_ids")) is not None:
            is_left_out = (positions.diff(dim=-1) == 1).all()  # one sequence a row; otherwise the rows are packed
        else:
            is_left_out = torch.ones((), dtype=torch.bool, device=inputs.device)
        if is_sliding:
            is_left_out = is_left_out & (torch.full((), mask.shape[-1]) < given["config"].sliding_window)
        return mask | is_left_out.to(mask.device)

    return made


def _causal(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a causal mask where its padding mask, [batch, tokens], hides nothing."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        mask = make(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        config, padding = given["config"], given.get("attention_mask")
        is_concerned = getattr(config, "model_type", None) in _CAUSAL_TYPES and config._attn_implementation == "sdpa"
        if mask is None or not is_concerned:
            return mask
        places = torch.arange(mask.shape[-1], device=mask.device)
        before = places <= places[:, None]
        return mask & (before if padding is None else before | ~padding.bool().all())

    return made


def _may_be_left_out(given: dict[str, Any]) -> bool:
    """Whether transformers makes no mask for a call outside of an export, where the values of its masks allow that."""
    config, padding = given["config"], given.get("attention_mask")
    kind, chosen = getattr(config, "model_type", None), getattr(config, "use_bidirectional_attention", False)
    overlays = ("past_key_values", "or_mask_function", "and_mask_function", "block_sequence_ids")
    return (
        (kind in _TYPES_OF_BOTH or (kind in _TYPES and bool(chosen)))
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and getattr(config, "is_causal", True)
        and all(given.get(name) is None for name in overlays)
        and given.get("allow_is_causal_skip", True)
        and (padding is None or (isinstance(padding, Tensor) and padding.ndim == 2))
    )
