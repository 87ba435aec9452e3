"""Parts of a tokenizer.json, and the functions that all kinds of tokenizers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from onnxplug import UsageError

About = Mapping[str, Any]


class TransformersEncoder:
    """A tokenizer of transformers: it gives the numbers of texts in PyTorch.

    Attributes:
        before, after: Tokens at the beginning and at the end of every text.
    """

    def __init__(self, tokenizer: Any, about: About) -> None:
        self._tokenizer = tokenizer
        self.before, self.after = surrounding(about)

    @property
    def fewest(self) -> int:
        """The number of tokens that every text has."""
        return len(self.before) + len(self.after)

    def encode(self, texts: list[str], max_length: int) -> list[list[int]]:
        """The tokens of each text."""
        if not texts:
            return []
        options = {"truncation": True, "max_length": max_length} if max_length else {}
        rows: list[list[int]] = self._tokenizer(texts, **options)["input_ids"]
        return rows


def refuse(condition: bool, reason: str) -> None:
    """Refuses a tokenizer or processor on a condition by which it differs from the operators.

    Raises:
        UsageError: The condition holds.
    """
    if condition:
        raise UsageError(reason)


def vocabulary(about: About) -> list[str]:
    """The tokens of a model in the order of their numbers.

    Raises:
        UsageError: The numbers have gaps.
    """
    tokens = sorted(about["model"]["vocab"].items(), key=lambda item: item[1])
    refuse([number for _, number in tokens] != list(range(len(tokens))), "its vocabulary has gaps")
    return [token for token, _ in tokens]


def added(about: About) -> dict[str, Mapping[str, Any]]:
    """The tokens that are found in a text before any others, by their content."""
    return {token["content"]: token for token in about["added_tokens"]}


def sequence(part: Any) -> list[Mapping[str, Any]]:
    """The members of a normalizer, pre-tokenizer, post-processor or decoder; the part alone where it is no sequence."""
    if part is None:
        return []
    for members in ("normalizers", "pretokenizers", "processors", "decoders"):
        if part["type"] == "Sequence" and members in part:
            return [inner for member in part[members] for inner in sequence(member)]
    return [part]


def surrounding(about: About) -> tuple[list[int], list[int]]:
    """The tokens that a post-processor puts before and after a text."""
    before: list[int] = []
    after: list[int] = []
    for part in sequence(about["post_processor"]):
        if part["type"] in ("BertProcessing", "RobertaProcessing"):
            return [part["cls"][1]], [part["sep"][1]]
        if part["type"] == "TemplateProcessing":
            return _template(part)
        refuse(part["type"] != "ByteLevel", f"its post-processor is {part['type']}")
    return before, after


def _template(part: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    sides: tuple[list[int], list[int]] = ([], [])
    place = 0
    for piece in part["single"]:
        if "Sequence" in piece:
            place = 1
        else:
            sides[place].extend(part["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return sides


def typed(value: Any, dtype: ir.DataType, rank: int = 1) -> Any:
    """A result of an operator without a schema, with its element type and rank."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape([ir.SymbolicDim(None)] * rank)
    return value


def framed(
    g: Any, tokens: Any, mask: Any, max_length: int, before: Sequence[int], after: Sequence[int]
) -> tuple[Any, Any]:
    """Rows of tokens and their mask, cut to ``max_length``, with the tokens that begin and end every text."""
    if max_length:
        kept = g.const([max_length - len(before) - len(after)])
        tokens, mask = (g.op.Slice(rows, g.const([0]), kept, g.const([1])) for rows in (tokens, mask))
    if not before and not after:
        return tokens, mask
    lengths = g.op.Add(g.op.ReduceSum(mask, g.const([1]), keepdims=1), g.const(len(before)))
    pads = g.const([0, len(before), 0, len(after)])
    tokens = g.op.Pad(tokens, pads, g.const(0))
    places = g.op.Range(g.const(0), g.as_scalar(g.dim(tokens, 1)), g.const(1))
    for place, token in enumerate(before):
        tokens = g.op.Where(g.op.Equal(places, g.const(place)), g.const(token), tokens)
    for place, token in enumerate(after):
        tokens = g.op.Where(g.op.Equal(places, g.op.Add(lengths, g.const(place))), g.const(token), tokens)
    return tokens, g.cast(g.op.Less(places, g.op.Add(lengths, g.const(len(after)))), torch.int64)
