"""``nn.Transformer`` and its layers during capture: no branch on a mask's values, and no operator that fuses a whole layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn.modules import transformer

from onnxplug.capture.eager import without_fast_path
from onnxplug.capture.patching import patched


def is_declared_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Whether the caller declares the mask causal; torch's own function compares the mask's values with a causal mask."""
    return is_causal is True


@contextlib.contextmanager
def attention_by_its_masks() -> Iterator[None]:
    """While it holds, attention is computed with its mask, whatever the mask's values are.

    ``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` test whether a mask is causal, which only lets PyTorch choose a
    faster kernel. The fast path of evaluation (``torch.backends.mha``) is one operator for a whole layer, which ONNX lacks.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_fast_path)
        if hasattr(transformer, "_detect_is_causal_mask"):
            stack.enter_context(patched(transformer, "_detect_is_causal_mask", is_declared_causal))
        yield
