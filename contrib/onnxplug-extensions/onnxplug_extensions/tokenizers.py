"""A tokenizer as a module: texts to token numbers, by transformers in PyTorch and by onnxruntime-extensions in ONNX."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from onnxplug import UsageError
from onnxplug_extensions.byte_pairs import CLIP, GPT2
from onnxplug_extensions.operators import Encoder, ProcessorModule, register
from onnxplug_extensions.sentencepiece import Llama
from onnxplug_extensions.wordpiece import WordPiece

#: Type of a tokenizer's model to its encoders; the first that does not refuse the tokenizer is taken.
_ENCODERS: dict[str, tuple[Any, ...]] = {"WordPiece": (WordPiece,), "BPE": (GPT2, CLIP, Llama)}


class Tokenizer(ProcessorModule):
    """Texts to the inputs of a language model.

    In PyTorch the numbers are transformers' own. The package's README lists the differences of onnxruntime-extensions.

    Args:
        tokenizer: A tokenizer of transformers: BERT's WordPiece, GPT-2's, RoBERTa's and CLIP's byte pairs, Llama's
            SentencePiece.
        max_length: The most tokens of a text, tokens of its beginning and end included; ``None``: as many as it has.

    Raises:
        UsageError: onnxruntime-extensions has no operator that does the same.
    """

    def __init__(self, tokenizer: Any, max_length: int | None = None) -> None:
        encoder, name = encoder_of(tokenizer)
        super().__init__(name, encoder)
        if max_length is not None and max_length <= encoder.fewest:
            raise UsageError(f"max_length={max_length} leaves no token of the text")
        self._max_length = max_length or 0
        self._padding = tokenizer.pad_token_id or 0
        self._kinds = "token_type_ids" in tokenizer.model_input_names

    def forward(self, texts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Token numbers and mask, padded at the end to the longest text.

        Args:
            texts: A vector of strings, of ``onnxplug.string_tensor``.

        Returns:
            ``input_ids``, ``attention_mask`` and, where the model takes them, ``token_type_ids``: int64, [texts, longest].
        """
        ids, mask = torch.ops.onnxplug_extensions.tokenize(texts, self._name, self._max_length, self._padding)
        inputs = {"input_ids": ids, "attention_mask": mask}
        return {**inputs, "token_type_ids": torch.zeros_like(ids)} if self._kinds else inputs


def encoder_of(tokenizer: Any) -> tuple[Encoder, str]:
    """The encoder of a tokenizer of transformers, and the name by which operators call it.

    Raises:
        UsageError: onnxruntime-extensions has no operator that does the same.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(f"{type(tokenizer).__name__} is no tokenizer of transformers that has a tokenizer.json")
    if tokenizer.padding_side != "right" or tokenizer.truncation_side != "right":
        raise UsageError(
            "onnxruntime-extensions pads and cuts at the end, and this tokenizer at the beginning",
            hint='Set tokenizer.padding_side = tokenizer.truncation_side = "right".',
        )
    text = backend.to_str()
    about = json.loads(text)
    kind = about["model"]["type"]
    reasons = []
    for encoder in _ENCODERS.get(kind, ()):
        try:
            made: Encoder = encoder(tokenizer, about)
        except UsageError as error:
            reasons.append(error.message)
            continue
        name = f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        register(name, made)
        return made, name
    raise UsageError(
        f"onnxruntime-extensions has no operator for this tokenizer: {'; '.join(reasons) or f'its model is {kind}'}",
        hint="README of onnxplug-extensions lists the tokenizers that it can be.",
    )
