"""`--static LENGTH,PROMPT`: two models without dynamic sizes write transformers' text, by the README's loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.external_data_helper import ExternalDataInfo

from onnxplug.cli.app import run
from onnxplug.runtime import inference_session

LENGTH, PIECE, STEPS = 40, 6, 14
PROMPTS = ([5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23])


def generated(folder: Path, prompt: list[int]) -> list[int]:
    """The text after a prompt, greedily: the prompt by pieces, then token by token."""
    prefill, decode = (inference_session(folder / f"{name}.onnx") for name in ("prefill", "decode"))
    assert all(isinstance(size, int) for value in (*prefill.get_inputs(), *decode.get_inputs()) for size in value.shape)
    outputs = [value.name for value in decode.get_outputs()]
    buffers = {v.name: np.zeros(v.shape, "f4") for v in decode.get_inputs() if v.name.startswith("past_key_values.")}

    def step(session: Any, tokens: list[int], size: int, past: int) -> np.ndarray[Any, Any]:
        ids = np.array([tokens + [0] * (size - len(tokens))])
        found = session.run(outputs, {"input_ids": ids, "past_length": np.array([past]), **buffers})
        results = dict(zip(outputs, found, strict=True))
        buffers.update({name: results[name.replace("past_key_values", "present")] for name in buffers})
        return results["logits"][0, len(tokens) - 1]

    past, text = 0, []
    for start in range(0, len(prompt), PIECE):
        piece = prompt[start : start + PIECE]
        logits = step(prefill, piece, PIECE, past)
        past += len(piece)
    for _ in range(STEPS):
        text.append(int(logits.argmax()))
        logits = step(decode, text[-1:], 1, past)
        past += 1
    return text


def export(folder: Path, output: Path, *flags: str) -> int:
    return run(["export", f"transformers:{folder}", "-o", str(output), "--static", f"{LENGTH},{PIECE}", *flags])


LONG = pytest.mark.long
CASES = [
    pytest.param("llama", ("--opset", "24"), id="llama at opset 24"),
    pytest.param("gemma3", (), id="gemma3, windows in some layers"),
    *[pytest.param(name, (), marks=LONG) for name in ("gpt2", "qwen3", "phi3", "mistral", "gpt_oss", "qwen3_moe")],
    pytest.param("mistral", ("--opset", "24"), marks=LONG, id="mistral at opset 24"),
]


@pytest.mark.parametrize(("name", "flags"), CASES)
@pytest.mark.long
def test_text(name: str, flags: tuple[str, ...], saved: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder, output = saved(name), tmp_path / "onnx"
    assert export(folder, output, "--verify", *flags) == 0
    operators = {node.op_type for node in onnx.load(output / "decode.onnx").graph.node}
    assert ("TensorScatter" if flags else "ScatterElements") in operators
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    for prompt in PROMPTS:
        with torch.no_grad():
            exact = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False)[0, len(prompt) :]
        assert generated(output, prompt) == exact.tolist()
    assert len(set(exact.tolist())) > 3  # the text is not one token alone


@pytest.mark.long
def test_weights_are_stored_once(saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Weights of 4 bits too are stored once."""
    output = tmp_path / "onnx"
    assert export(saved("llama"), output, "--external-data", "--int4") == 0
    assert [path.name for path in sorted(output.glob("*.data"))] == ["prefill.onnx.data"]
    model = onnx.load(output / "decode.onnx", load_external_data=False)
    places = {ExternalDataInfo(tensor).location for tensor in model.graph.initializer if tensor.external_data}
    assert places == {"prefill.onnx.data"}
    first, second = (onnx.load(output / f"{name}.onnx") for name in ("prefill", "decode"))
    weights = [{t.name: onnx.numpy_helper.to_array(t) for t in m.graph.initializer} for m in (first, second)]
    shared = [name for name in weights[0] if name.endswith(".levels")]
    assert len(shared) > 8
    for name in shared:
        np.testing.assert_array_equal(*(tensors[name] for tensors in weights))
    assert len(generated(output, PROMPTS[0])) == STEPS


BAD: dict[str, tuple[str, list[str], str]] = {
    "no numbers": ("llama", ["--static", "many"], "--static 'many' is not LENGTH,PROMPT"),
    "a long piece": ("llama", ["--static", "8,9"], "is not LENGTH,PROMPT"),
    "nothing": ("llama", ["--static", "8,0"], "is not LENGTH,PROMPT"),
    "longer than texts": ("llama", ["--static", "65,4"], "have 64 tokens at most"),
    "beside fused": ("llama", ["--static", "32,4", "--fused"], "--static and --fused exclude one another"),
    "another layout": ("llama", ["--static", "32,4", "--for", "optimum"], "--static is for --for genai"),
    "positions by the mask": ("bloom", ["--static", "32,4"], "computes positions from a mask over the whole cache"),
    "attention of its own": (
        "gpt_neo_windows",
        ["--static", "40,7"],
        "gives other logits over buffers of a fixed length",
    ),
    "attention of its own, and one piece": (
        "gpt_neo_windows",
        ["--static", "40,40"],
        "gives other logits over buffers",
    ),
    "attention of its own in halves": (
        "gpt_neo_windows",
        ["--static", "40,40", "--dtype", "float16"],
        "gives other logits over buffers",
    ),
    "another task": ("llama", ["--static", "32,4", "--task", "feature-extraction"], "--static is for text generation"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str, saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    name, arguments, message = BAD[case]
    assert run(["export", f"transformers:{saved(name)}", "-o", str(tmp_path / "onnx"), *arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "onnx").exists()
