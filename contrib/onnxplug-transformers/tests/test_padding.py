"""`onnxplug export transformers:FOLDER --fused`: rows of a batch may be padded on the left, on the right, or in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

PROMPTS = [[5, 6, 7, 8, 9, 10, 35, 21, 60], [11, 12, 13, 44, 51], [71, 22]]
#: Where the tokens of rows stand, 9 places each.
PADDINGS = {
    "left": ["111111111", "000011111", "000000011"],
    "right": ["111111111", "111110000", "110000000"],
    "mixed": ["111111111", "001101110", "100000001"],
}
STEPS = 12
LOOSER = {"fused": ({"rtol": 1e-4, "atol": 1e-4}, "one operator sums products and a softmax in another order")}
LONG = pytest.mark.long


class Steps:
    """A session that goes on with a text, batch by batch, in caches as long as all the tokens before."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        self.past = {
            value.name: np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
            for value in self.session.get_inputs()[2:]
        }

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, vocabulary], or [batch, 1, vocabulary]."""
        past = {name: value.repeat(len(tokens) // len(value), 0) for name, value in self.past.items()}
        logits, *present = self.session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy(), **past})
        self.past = dict(zip(self.past, present, strict=True))
        return torch.from_numpy(logits)


def padded(padding: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of the prompts; padding is a token that a prompt might have."""
    mask = torch.tensor([[int(place) for place in row] for row in padding])
    tokens = torch.full_like(mask, 33)
    tokens[mask == 1] = torch.tensor([token for prompt in PROMPTS for token in prompt])
    return tokens, mask


def check_text(folder: Path, padding: list[str], alone: Callable[[list[int]], torch.Tensor], last: bool) -> None:
    """Compares each step's logits with those of each row by itself, which never has any padding."""
    steps, (tokens, mask) = Steps(folder), padded(padding)
    rows = [list(prompt) for prompt in PROMPTS]
    logits = steps.logits(tokens, mask)
    ends = [0 if last else row.rindex("1") for row in padding]
    for row, prompt in enumerate(PROMPTS if not last else []):
        torch.testing.assert_close(logits[row][mask[row] == 1], alone(prompt), **LOOSER["fused"][0])
    found = torch.stack([logits[row, end] for row, end in enumerate(ends)])
    for _ in range(STEPS):
        exact = torch.stack([alone(row)[-1] for row in rows])
        torch.testing.assert_close(found, exact, **LOOSER["fused"][0])
        new = exact.argmax(-1)
        for row, token in zip(rows, new.tolist(), strict=True):
            row.append(token)
        mask = torch.cat([mask, torch.ones(len(rows), 1, dtype=torch.long)], 1)
        found = steps.logits(new[:, None], mask)[:, 0]
    assert len({token for row in rows for token in row[-STEPS:]}) > 4  # the text is not one token alone


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama_tied", ("--last-logits",)),
        ("gemma3", ()),
        *[pytest.param(name, (), marks=LONG) for name in ("llama", "qwen3", "mistral", "gpt2", "opt", "gpt_oss")],
    ],
)
@pytest.mark.long
def test_batches_of_unequal_rows(
    name: str, flags: tuple[str, ...], padding: str, saved: Callable[[str], Path], exported: Any
) -> None:
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    output = exported(folder, "--verify", "--fused", *flags)

    def alone(row: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([row])).logits[0]
        return logits

    check_text(output, PADDINGS[padding], alone, "--last-logits" in flags)


@pytest.mark.parametrize("name", ["llama_tied", pytest.param("qwen3", marks=LONG)])
@pytest.mark.long
def test_batches_in_four_bits(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """Each row has the logits that it has by itself in the folder without fused attention."""
    folder = saved(name)
    rounding = ("--int4", "--accuracy-level", "1")
    plain = onnxruntime.InferenceSession(str(exported(folder, *rounding) / "model.onnx"))

    def alone(row: list[int]) -> torch.Tensor:
        feeds: dict[str, Any] = {"input_ids": np.array([row]), "attention_mask": np.ones((1, len(row)), np.int64)}
        feeds["position_ids"] = np.arange(len(row))[None]
        for value in plain.get_inputs()[3:]:
            feeds[value.name] = np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
        return torch.from_numpy(plain.run(["logits"], feeds)[0][0])

    for padding in PADDINGS.values():
        check_text(exported(folder, *rounding, "--fused"), padding, alone, last=False)


@pytest.mark.parametrize("name", ["llama_tied", pytest.param("gemma3", marks=LONG)])
def test_tokens_of_a_batch_are_those_of_generate(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """The text is transformers' own, which pads on the left."""
    from transformers import AutoModelForCausalLM

    folder, (tokens, mask) = saved(name), padded(PADDINGS["left"])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        text = model.generate(tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
    steps = Steps(exported(folder, "--verify", "--fused", *(("--last-logits",) if name == "llama_tied" else ())))
    new = tokens
    for _ in range(STEPS):
        new = steps.logits(new, mask)[:, -1:].argmax(-1)
        tokens, mask = torch.cat([tokens, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    assert tokens.tolist() == text.tolist()


@pytest.mark.long
def test_padding_among_later_tokens(saved: Callable[[str], Path], exported: Any) -> None:
    """A row that goes on with several tokens, and padding among them: the tokens in the cache stay."""
    from transformers import AutoModelForCausalLM

    folder = saved("llama")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    steps = Steps(exported(folder, "--verify", "--fused"))
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 0, 1, 1]])
    tokens = torch.tensor([[33, 5, 6, 7, 33, 8, 33, 9, 10]])
    steps.logits(tokens[:, :4], mask[:, :4])
    later = steps.logits(tokens[:, 4:], mask)[0, mask[0, 4:] == 1]
    with torch.no_grad():
        exact = model(torch.tensor([[5, 6, 7, 8, 9, 10]])).logits[0, 3:]
    torch.testing.assert_close(later, exact, **LOOSER["fused"][0])
