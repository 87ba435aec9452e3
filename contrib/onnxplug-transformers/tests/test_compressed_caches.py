"""Folders of models whose keys and values have several shapes: DeepSeek's compressed ones, by the loop that the README shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from onnxplug.cli.app import run


def test_the_readme_shows_the_loop(saved: Callable[[str], Path], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """With --fused too, which leaves the attention as it is."""
    from transformers import AutoModelForCausalLM

    folder = saved("deepseek_v3")
    output = tmp_path / "DIR"
    assert run(["export", f"transformers:{folder}", "-o", str(output), "--fused", "--verify"]) == 0
    notes = " ".join(capsys.readouterr().err.split())
    assert "keys and values have several shapes, and onnxruntime-genai takes one: the loop is yours" in notes
    assert "the attention is not fused: DeepseekV3ForCausalLM has keys and values of several shapes" in notes
    assert not (output / "genai_config.json").exists()
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
