"""SAM 3's biases of attention from boxes to places of an image, while a model is captured: images have any size.

transformers computes a bias for each place from a tensor with the numbers of rows and columns, so that torch does not know that
there are as many as places of the image. Here a check says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug_transformers.exchanged import in_use


@contextlib.contextmanager
def boxes_of_any_image() -> Iterator[None]:
    """Holds while a model is captured."""
    with contextlib.ExitStack() as stack:
        for family in ("Sam3", "Sam3LiteText"):
            for owner, name, before in in_use(f"{family}DetrDecoderLayer.forward"):
                stack.enter_context(patched(owner, name, _with_a_bias_for_each_place(before)))
        yield


def _with_a_bias_for_each_place(before: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        biases, features = kwargs.get("vision_cross_attn_mask"), kwargs.get("vision_features")
        if biases is not None and features is not None:
            torch._check(biases.shape[-1] == features.shape[1])
        return before(self, *args, **kwargs)

    return forward
