"""`onnxplug export transformers:FOLDER` of models with states of recurrences and convolutions: prompts, steps, and padding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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
LATER = [pytest.param(name, marks=LONG) for name in (*STATE_SPACES[1:], *HYBRIDS)]


class Steps:
    """A session that goes on with a text, batch by batch."""

    def __init__(self, folder: Path) -> None:
        self.session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_outputs()]
        self.past: dict[str, Any] = {}

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The logits of new tokens, [batch, sequence, vocabulary], for a mask of all tokens."""
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
    assert len({*text[:, tokens.shape[1] :].flatten().tolist()}) > 4  # the text is not one token alone


def padded(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask of the prompts; padding is a token that a prompt might have."""
    mask = torch.tensor([[int(place) for place in row] for row in PADDINGS[kind]])
    tokens = torch.full_like(mask, 33)
    tokens[mask == 1] = torch.tensor([token for prompt in PROMPTS for token in prompt])
    return tokens, mask


def check_padding(folder: Path, tokens: torch.Tensor, mask: torch.Tensor) -> None:
    """Compares the logits of a prompt and of two more tokens with those of each row by itself, without padding."""
    more = torch.randint(3, 100, (len(tokens), 2))

    def logits(tokens: torch.Tensor, mask: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        steps = Steps(folder)
        results = [steps.logits(tokens, mask)]
        for new in more.split(1, dim=1):
            mask = torch.cat([mask, torch.ones_like(new)], 1)
            results.append(steps.logits(new, mask))
        return torch.cat(results, 1)

    padded, shown = logits(tokens, mask, more), torch.cat([mask, torch.ones_like(more)], 1) == 1
    for row, prompt in enumerate(PROMPTS):
        alone = torch.tensor([prompt])
        exact = logits(alone, torch.ones_like(alone), more[row : row + 1])
        torch.testing.assert_close(padded[row][shown[row]], exact[0], **LOOSER["models"][0])


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


@pytest.mark.parametrize("name", ["mamba", "qwen3_next", "lfm2", *LATER])
@pytest.mark.long
def test_text_is_that_of_transformers(name: str, saved: Callable[[str], Path], exported: Any) -> None:
    """Prompts shorter than the convolution, longer, and longer than a chunk without filling it; padded prompts."""
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
        check_padding(output, *padded(kind))
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


@pytest.mark.parametrize(
    ("name", "options"),
    [("mamba", ()), pytest.param("qwen3_next", ("--int4-keep", "*.experts"), marks=LONG)],
)
@pytest.mark.long
def test_four_bits(
    name: str, options: tuple[str, ...], saved: Callable[[str], Path], exported: Any, restore: Any
) -> None:
    """All weights are rounded but those that a layer reads by itself: Mamba's dt_proj."""
    from transformers import AutoModelForCausalLM

    folder = saved(name)
    output = exported(folder, "--int4", "--accuracy-level", "1", "--verify", *options)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model.generation_config.eos_token_id = None
    restore(model, output / "model.onnx")
    tokens = torch.randint(3, 100, (2, 7))
    check_text(output, model, tokens, torch.ones_like(tokens))


def refused(folder: Path, *options: str) -> bool:
    """Whether an export ends with an error, and nothing is left behind."""
    output = folder.with_name("onnx")
    return run(["export", f"transformers:{folder}", "-o", str(output), *options]) == 2 and not output.exists()


def test_states_that_do_not_go_on_are_refused(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """transformers' own Mamba begins from zeros with several tokens."""
    monkeypatch.setattr("onnxplug_transformers.decoders.state_spaces_go_on", lambda _: nullcontext())
    assert refused(saved("mamba"))
    assert "MambaForCausalLM gives other logits for a text that comes in pieces" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("Rwkv", {"attention_hidden_size": 32}, "takes no cache of transformers, which text generation hands on"),
        (
            "RecurrentGemma",
            {"block_types": ["recurrent", "attention"], "lru_width": 32},
            "keeps states elsewhere than in its",
        ),
        ("MiniMax", {"layer_types": ["linear_attention", "full_attention"]}, "does not take a DynamicCache, which"),
        ("xLSTM", {"num_heads": 4, "num_blocks": 2, "embedding_dim": 32}, "does not take a DynamicCache, which"),
        ("Roberta", {}, "keeps states elsewhere than in its"),  # it is an encoder
    ],
)
def test_states_elsewhere_are_refused(
    kind: str, settings: dict[str, Any], words: str, tmp_path: Path, capsys: Any
) -> None:
    import transformers

    sizes = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": [f"{kind}ForCausalLM"]}
    getattr(transformers, f"{kind}Config")(**sizes, **heads | settings).save_pretrained(tmp_path / "model")
    for options in ((), ("--int4", "--block-size", "16")):
        assert refused(tmp_path / "model", "--random", "--no-tokenizer", *options)
        assert f"{kind}ForCausalLM {words}" in " ".join(capsys.readouterr().err.split())


def test_bad_input(saved: Callable[[str], Path], capsys: Any) -> None:
    folder = saved("lfm2")
    for options, program in (
        (["--for", "optimum"], "optimum"),
        (["--for", "transformers.js"], "transformers.js"),
        (["--static", "32,4"], "--static"),
        (["--with-processor"], "--with-processor"),
    ):
        assert refused(folder, *options)
        message = f"states of linear attention or convolutions in its cache; {program} takes keys and values alone"
        assert message in " ".join(capsys.readouterr().err.split())
