"""Models with what is around them in the file: the tokenizer in front, labels behind. By onnxplug-extensions."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplug import UsageError, string_tensor
from onnxplug_transformers.tasks import TaskExample

_TEXTS = ("A cat sleeps on the sofa.", "")


class WithTokenizer(nn.Module):
    """A model of one call whose input is texts, a vector of strings.

    Args:
        model: The model as it would be exported without, which takes ``input_ids`` and gives results by name.
        takes: The names of the inputs that its own model takes.
        tokenizer: A tokenizer of transformers.
        labels: The names of classes, for a result ``label`` beside ``logits``; none for a model that doesn't classify.
    """

    def __init__(self, model: nn.Module, takes: set[str], tokenizer: Any, labels: list[str] | None) -> None:
        from onnxplug_extensions import Labels, Tokenizer

        super().__init__()
        longest = tokenizer.model_max_length
        self.tokenizer = Tokenizer(tokenizer, longest if longest < 10**9 else None)
        self.model = model
        self._takes = takes
        self.labels = Labels(labels) if labels else None

    def forward(self, texts: torch.Tensor) -> dict[str, Any]:
        """The model's results, and the names of the classes with the largest logits."""
        inputs = self.tokenizer(texts)
        results: dict[str, Any] = self.model(**{name: value for name, value in inputs.items() if name in self._takes})
        if self.labels is not None:
            results = {**results, "label": self.labels(results["logits"].argmax(-1))}
        return results


def with_processor(model: nn.Module, original: Any, kind: str, folder: Path) -> tuple[nn.Module, TaskExample]:
    """A model of one call with its tokenizer in front and, where it classifies, its labels behind; and example inputs.

    Args:
        model: The model as it would be exported without.
        original: The model of transformers.
        kind: Its task.
        folder: Where the tokenizer is.

    Raises:
        UsageError: Its input is no text, onnxplug-extensions is missing, or no operator does the same as the tokenizer.
    """
    takes = set(inspect.signature(original.forward).parameters)
    if original.main_input_name != "input_ids" or "pixel_values" in takes:
        raise UsageError(
            f"--with-processor puts a tokenizer in front of a model of text, and {type(original).__name__} takes "
            f"{original.main_input_name}" + (" and pixel_values" if "pixel_values" in takes else "")
        )
    if find_spec("onnxplug_extensions") is None:
        raise UsageError(
            "--with-processor needs onnxplug-extensions, which is not installed", hint="pip install onnxplug-extensions"
        )
    from transformers import AutoTokenizer

    labels = None
    if kind.endswith("-classification"):
        names = original.config.id2label
        labels = [str(names[n]) for n in range(len(names))]
    example = TaskExample()
    example.add("texts", string_tensor(_TEXTS), "texts")
    return WithTokenizer(model, takes, AutoTokenizer.from_pretrained(folder), labels).eval(), example
