"""Folders of models whose cache is not keys and values of one shape alone, by the loop that the README shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onnxplug.cli.app import run

SEVERAL = "has keys and values of several shapes; {} takes one for all layers"
STATES = "has states of linear attention or convolutions in its cache; {} takes keys and values alone"


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["deepseek_v3", "mamba", *(pytest.param(n, marks=pytest.mark.long) for n in ("qwen3_next", "kimi_linear"))]
)
def test_the_readme_shows_the_loop(
    name: str, saved: Callable[[str], Path], tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """With --fused too, which leaves the attention as it is."""
    from transformers import AutoModelForCausalLM

    folder, several = saved(name), name in ("deepseek_v3", "kimi_linear")
    reason, output = SEVERAL if several else STATES, tmp_path / "DIR"
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--fused", "--verify"]) == 0
    notes = " ".join(capsys.readouterr().err.split())
    assert "the attention is not fused: " in notes
    assert reason.format("GroupQueryAttention") in notes
    assert (f"{reason.format('onnxruntime-genai')}: the loop is yours" in notes) == several
    assert ("states of recurrences by beams: num_beams has to be 1" in notes) == (not several)
    assert (output / "genai_config.json").exists() == (not several)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "text = new" in block]
    shown: dict[str, Any] = {}
    exec(code, shown)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        text = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=37, do_sample=False)
    assert len({*shown["text"][3:]}) > 4
    assert shown["text"] == text[0].tolist()


def test_bad_input(saved: Callable[[str], Path], tmp_path: Path, capsys: Any) -> None:
    folder = saved("deepseek_v3")
    for options, program in ((["--for", "optimum"], "optimum"), (["--static", "32,4"], "--static")):
        assert run(["export", f"transformers:{folder}", "-o", str(tmp_path / "onnx"), *options]) == 2
        message = f"keys and values of several shapes; {program} takes one for all layers"
        assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "onnx").exists()
