"""OmDet-Turbo's texts of classes and tasks, of which there may be any number, while a model is captured.

transformers looks up each text among the texts of earlier calls, and regroups the images' classes by a loop. In the
exported model all texts are computed, as by a model that is called for the first time, and the classes' places follow
from their numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onnxplug_transformers.exchanged import exchanged, never


@contextlib.contextmanager
def texts_without_a_cache() -> Iterator[None]:
    """Holds while a model is captured."""
    methods = get_cached_class_embeddings, get_cached_task_embeddings, get_language_embedding
    with exchanged({f"OmDetTurboPreTrainedModel.{method.__name__}": (method, never) for method in methods}):
        yield


def get_cached_class_embeddings(self: Any, classes_input_ids: Tensor, classes_attention_mask: Tensor) -> Any:
    """A vector for each class, [classes, width]."""
    return self.language_backbone(classes_input_ids, encode_type="class")


def get_cached_task_embeddings(self: Any, tasks_input_ids: Tensor, tasks_attention_mask: Tensor) -> Any:
    """The states of each task's tokens, [tokens, batch, width], and their mask [batch, tokens]; tokens of the longest task."""
    return self.language_backbone(tasks_input_ids, mask=tasks_attention_mask, encode_type="task")


def get_language_embedding(
    self: Any,
    classes_input_ids: Tensor,
    classes_attention_mask: Tensor,
    tasks_input_ids: Tensor,
    tasks_attention_mask: Tensor,
    classes_structure: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors of each image's classes, [classes, batch, width], with zeros behind them, and the states and mask of the tasks.

    Args:
        classes_structure: The number of each image's classes, [batch]; the classes of all images stand in one row.
            Where the row is too short, transformers takes the classes in it, if all images then lack the same number,
            as a single image does. Other numbers, which transformers refuses, are an index out of range in the exported
            model.
    """
    embeddings = self.get_cached_class_embeddings(classes_input_ids, classes_attention_mask)
    starts = classes_structure.cumsum(0) - classes_structure
    counts = torch.minimum(classes_structure, (embeddings.shape[0] - starts).clamp(min=0))
    lacking = classes_structure - counts
    fits = (classes_structure >= 0).all() & (lacking == lacking.min()).all()
    images = torch.arange(counts.shape[0], device=counts.device)
    number = torch.arange((classes_structure.max() - lacking.min()).item(), device=counts.device)[:, None]
    is_there = number < counts[images.where(fits, counts.shape[0])]
    classes = embeddings[(starts + number).where(is_there, 0)].where(is_there[:, :, None], 0)
    return classes, *self.get_cached_task_embeddings(tasks_input_ids, tasks_attention_mask)
