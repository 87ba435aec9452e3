"""Normalisations of com.microsoft, with a sum before them."""

from __future__ import annotations

import numpy as np

from onnxplug_reference.kernels import Kernel, microsoft
from onnxplug_reference.numeric import normalized, typed

#: The normalised sum, the mean or None, 1 over the deviation, and the sum itself.
Results = tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]


def _summed(x: np.ndarray, skip: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    return x + skip if bias is None else x + skip + bias


def skip_layer_normalization(
    x: np.ndarray,
    skip: np.ndarray,
    gamma: np.ndarray,
    beta: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    epsilon: float = 1e-12,
) -> Results:
    """x + skip + bias normalised along the last axis; skip may lack the batch axis."""
    total = _summed(x, skip, bias)
    result, mean, scale = normalized(total.astype(np.float64), (-1,), epsilon)
    result = result * gamma if beta is None else result * gamma + beta
    return typed(result, x), mean.astype(np.float32), scale.astype(np.float32), typed(total, x)


def skip_simplified_layer_normalization(
    x: np.ndarray, skip: np.ndarray, gamma: np.ndarray, bias: np.ndarray | None = None, *, epsilon: float = 1e-12
) -> Results:
    """x + skip + bias divided by the root of its mean square along the last axis."""
    total = _summed(x, skip, bias)
    result, scale = _root_mean_square(total, gamma, epsilon, (-1,))
    return typed(result, x), None, scale.astype(np.float32), typed(total, x)


def simplified_layer_normalization(
    x: np.ndarray, gamma: np.ndarray, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """x divided by the root of its mean square along ``axis`` and all later axes."""
    axes = tuple(range(axis % x.ndim, x.ndim))
    result, scale = _root_mean_square(x, gamma, epsilon, axes)
    return typed(result, x), scale.astype(np.float32)


def _root_mean_square(
    x: np.ndarray, gamma: np.ndarray, epsilon: float, axes: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    wide = x.astype(np.float64)
    scale = 1 / np.sqrt((wide * wide).mean(axes, keepdims=True) + epsilon)
    return wide * scale * gamma, scale


def embed_layer_normalization(
    input_ids: np.ndarray,
    segment_ids: np.ndarray | None,
    word_embedding: np.ndarray,
    position_embedding: np.ndarray,
    segment_embedding: np.ndarray | None,
    gamma: np.ndarray,
    beta: np.ndarray,
    mask: np.ndarray | None = None,
    position_ids: np.ndarray | None = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The normalised sum of the embeddings of words, positions and segments; the mask's number of words; the sum."""
    places = np.arange(input_ids.shape[1])[None] if position_ids is None else position_ids
    total = word_embedding[input_ids] + position_embedding[places]
    if segment_ids is not None and segment_embedding is not None:
        total = total + segment_embedding[segment_ids]
    result = normalized(total.astype(np.float64), (-1,), epsilon)[0] * gamma + beta
    batch = input_ids.shape[0]
    counts = np.zeros(batch, np.int32) if mask is None else (mask == 1).sum(-1).astype(np.int32)
    return typed(result, word_embedding), counts, typed(total, word_embedding)


KERNELS = [
    microsoft("SkipLayerNormalization", skip_layer_normalization),
    microsoft("SkipSimplifiedLayerNormalization", skip_simplified_layer_normalization),
    microsoft("SimplifiedLayerNormalization", simplified_layer_normalization),
    Kernel("SimplifiedLayerNormalization", simplified_layer_normalization),  # ONNX Runtime has it in ONNX's own domain
    microsoft("EmbedLayerNormalization", embed_layer_normalization),
]
