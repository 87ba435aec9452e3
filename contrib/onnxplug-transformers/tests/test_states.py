"""`onnxplug export transformers:FOLDER` of models with states of recurrences and convolutions: prompts, steps, and padding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from onnxplug.cli.app import run

LOOSER = {
    "models": ({"rtol": 1e-3, "atol": 1e-4}, "states are handed on, and rounding adds up over the layers of a model")
}
og = pytest.importorskip("onnxruntime_genai")

STEPS = 8
PROMPTS = [[5, 6, 7, 8, 9, 10, 35, 21, 60], [11, 12, 13, 44, 51], [71, 22]]
#: Where the tokens of rows stand, 9 places each.
PADDINGS = {
    "left": ["111111111", "000011111", "000000011"],
    "right": ["111111111", "111110000", "110000000"],
    "mixed": ["111111111", "001101110", "100000001"],
}
LONG = pytest.mark.long
STATE_SPACES = ("mamba", "falcon_mamba", "mamba2")
HYBRIDS = (
    "jamba",
    "zamba",
    "zamba2",
    "nemotron_h",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "qwen3_5",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2_moe",
)
LATER = [pytest.param(name, marks=LONG) for name in (*STATE_SPACES[:2], *HYBRIDS)]


class Steps:
    """A session that goes on with a text, batch by batch."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_outputs()]
        self.past: dict[str, Any] = {}

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, vocabulary] of new tokens, for a mask of all."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        given = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        feed = {}
        for value in self.session.get_inputs():
            if value.name in given:
                feed[value.name] = given[value.name].numpy()
            else:
                sizes = [{"batch": len(tokens), "past": 0}.get(size, size) for size in value.shape]
                feed[value.name] = self.past.get(value.name, np.zeros(sizes, np.float32))
        results = dict(zip(self.names, self.session.run(self.names, feed), strict=True))
        self.past = {name.replace("present", "past_key_values"): value for name, value in results.items()}
        return torch.from_numpy(results["logits"])


def check_text(folder: Path, model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """Compares the text, and the logits of each step, with transformers' own."""
    settings = {"max_new_tokens": STEPS, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        exact = model.generate(tokens, attention_mask=mask, **settings)
    steps, new, text = Steps(folder), tokens, tokens
    for logits in exact.logits:
        actual = steps.logits(new, mask)[:, -1]
        torch.testing.assert_close(actual, logits, **LOOSER["models"][0])
        new = actual.argmax(-1, keepdim=True)
        text, mask = torch.cat([text, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    assert text.tolist() == exact.sequences.tolist()
    assert len({*text[:, tokens.shape[1] :].flatten().tolist()}) > 4  # no model that says one thing alone


def padded(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of the prompts; padding is a token that a prompt might have."""
    mask = torch.tensor([[int(place) for place in row] for row in PADDINGS[kind]])
    tokens = torch.full_like(mask, 33)
    tokens[mask == 1] = torch.tensor([token for prompt in PROMPTS for token in prompt])
    return tokens, mask


def check_padding(folder: Path, model: Any, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """Compares the logits of a prompt and two more tokens with those of each row by itself, without padding."""
    steps, more = Steps(folder), torch.randint(3, 100, (len(tokens), 2))
    logits = steps.logits(tokens, mask)
    for end in (1, 2):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        logits = torch.cat([logits, steps.logits(more[:, end - 1 : end], mask)], 1)
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            exact = model(torch.tensor([[*prompt, *more[row].tolist()]])).logits[0]
        torch.testing.assert_close(logits[row][mask[row] == 1], exact, **LOOSER["models"][0])


def continued(folder: Path, **search: Any) -> list[list[int]]:
    """The text that onnxruntime-genai writes after the prompts, which it pads on the right."""
    model, width = og.Model(str(folder)), max(map(len, PROMPTS))
    settings = og.GeneratorParams(model)
    settings.set_search_options(max_length=width + STEPS, batch_size=len(PROMPTS), **search)
    generator = og.Generator(model, settings)
    generator.append_tokens(np.array([p + [0] * (width - len(p)) for p in PROMPTS], dtype=np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [generator.get_sequence(row)[width:].tolist() for row in range(len(PROMPTS))]


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "lfm2", *LATER])
def test_text_is_that_of_transformers(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """Prompts that are shorter than the convolution, longer, and longer than a chunk, which they don't fill; padded ones."""
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--verify")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    for batch, length in ((2, 2), (1, 7), (2, 70)):
        tokens = torch.randint(3, 100, (batch, length))
        check_text(output, model, tokens, torch.ones_like(tokens))
    check_text(output, model, *padded("left"))
    for kind in PADDINGS:
        check_padding(output, model, *padded(kind))
    names = [str(value.name) for value in ir.load(output / "model.onnx").graph.inputs if "past" in str(value.name)]
    assert (output / "genai_config.json").exists() == (name != "kimi_linear")
    if name != "kimi_linear":
        tokens, mask = padded("left")
        with torch.no_grad():
            text = model.generate(tokens, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
        assert continued(output) == text[:, tokens.shape[1] :].tolist()
    assert names[0] == "past_key_values.0.conv_state"
    assert ("past_key_values.0.recurrent_state" in names) == ("lfm2" not in name)
    assert any(name.endswith("key") for name in names) == (name not in STATE_SPACES)


def test_bad_input(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    folder = saved("lfm2")
    for options, program in (
        (["--for", "optimum"], "optimum"),
        (["--static", "32,4"], "--static"),
        (["--with-processor"], "--with-processor"),
    ):
        assert run(["export", f"transformers:{folder}", "-o", str(tmp_path / "onnx"), *options]) == 2
        message = f"states of linear attention or convolutions in its cache; {program} takes keys and values alone"
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "onnx").exists()
