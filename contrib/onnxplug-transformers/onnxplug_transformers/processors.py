"""Models with a tokenizer or image processor in front and labels behind, in one file, by onnxplug-extensions."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onnxplug import UsageError, string_tensor
from onnxplug_transformers.folders import preprocessor_of
from onnxplug_transformers.tasks import TaskExample

_TEXTS = ("A cat sleeps on the sofa.", "")


class _WithProcessor(nn.Module):
    """A model of one call with the processor of its inputs.

    Args:
        model: The model as it would be exported without a processor, which takes inputs by name and gives results by
            name.
        labels: The names of classes, for a result ``label`` beside ``logits``; none for a model that doesn't classify.
    """

    def __init__(self, model: nn.Module, labels: list[str] | None) -> None:
        from onnxplug_extensions import Labels

        super().__init__()
        self.model = model
        self.labels = Labels(labels) if labels else None

    def called(self, **inputs: torch.Tensor) -> dict[str, Any]:
        """The model's results, and the names of the classes with the largest logits."""
        results: dict[str, Any] = self.model(**inputs)
        return results if self.labels is None else {**results, "label": self.labels(results["logits"].argmax(-1))}


class WithTokenizer(_WithProcessor):
    """A model whose input is texts, a vector of strings.

    Args:
        takes: The names of the inputs that the model takes.
    """

    def __init__(self, model: nn.Module, labels: list[str] | None, takes: set[str], tokenizer: Any) -> None:
        from onnxplug_extensions import Tokenizer

        super().__init__(model, labels)
        longest = tokenizer.model_max_length
        self.tokenizer = Tokenizer(tokenizer, longest if longest < 10**9 else None)
        self._takes = takes

    def forward(self, texts: torch.Tensor) -> dict[str, Any]:
        """The results for each text."""
        inputs = self.tokenizer(texts)
        return self.called(**{name: value for name, value in inputs.items() if name in self._takes})


class WithPixels(_WithProcessor):
    """A model whose input is images, uint8 [batch, height, width, 3]."""

    def __init__(self, model: nn.Module, labels: list[str] | None, processor: Any) -> None:
        from onnxplug_extensions import Pixels

        super().__init__(model, labels)
        self.pixels = Pixels(processor)

    def forward(self, images: torch.Tensor) -> dict[str, Any]:
        """The results for each image."""
        return self.called(pixel_values=self.pixels(images))


def check_extensions() -> None:
    """Looks for onnxplug-extensions.

    Raises:
        UsageError: It is not installed.
    """
    if find_spec("onnxplug_extensions") is None:
        raise UsageError(
            "--with-processor needs onnxplug-extensions, which is not installed", hint="pip install onnxplug-extensions"
        )


def with_processor(model: nn.Module, original: Any, kind: str, folder: Path) -> tuple[nn.Module, TaskExample]:
    """A model of one call with tokenizer or image processor in front, labels behind if it classifies; and examples.

    Args:
        model: The model as it would be exported without a processor.
        folder: The folder of the tokenizer or the processor.
    """
    takes = set(inspect.signature(original.forward).parameters)
    inputs = takes & {"input_ids", "pixel_values"}
    if len(inputs) != 1 or original.main_input_name not in inputs:
        both = " and pixel_values" if len(inputs) > 1 else ""
        raise UsageError(
            f"--with-processor puts a tokenizer in front of a model of text, or an image processor in front of one of images, and "
            f"{type(original).__name__} takes {original.main_input_name}{both}"
        )
    check_extensions()
    labels = None
    if kind.endswith("-classification"):
        names = original.config.id2label
        labels = [str(names[n]) for n in range(len(names))]
    example = TaskExample()
    if original.main_input_name == "pixel_values":
        from transformers import AutoImageProcessor

        if not preprocessor_of(folder):
            raise UsageError(
                f"{folder} has no preprocessor_config.json",
                hint="AutoImageProcessor's save_pretrained(FOLDER) writes it.",
            )
        example.add("images", _images(), "batch", "height", "width", None)
        return WithPixels(model, labels, AutoImageProcessor.from_pretrained(folder)).eval(), example
    from transformers import AutoTokenizer

    example.add("texts", string_tensor(_TEXTS), "texts")
    return WithTokenizer(model, labels, takes, AutoTokenizer.from_pretrained(folder)).eval(), example


def _images() -> torch.Tensor:
    """Two images of one size, with all values of uint8."""
    return (torch.arange(2 * 48 * 64 * 3) * 7).remainder(256).to(torch.uint8).reshape(2, 48, 64, 3)
