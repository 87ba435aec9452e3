"""Every Python block in README and docs runs, each file's blocks one after the other in a folder of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(
    page: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sources = tmp_path_factory.mktemp("sources")  # torch.jit.script reads the source of what it compiles
    namespace: dict[str, object] = {"__name__": "docs"}
    for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8"))):
        source = sources / f"{page.name} block {number}"
        source.write_text(code, encoding="utf-8")
        exec(compile(code, str(source), "exec", dont_inherit=True), namespace)


def test_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.splitlines()[2:5] == [
        "```bash",
        "make demo   # a pretrained sentence encoder: PyTorch to ONNX, verified, then used from the ONNX file alone",
        "make test   # the tests",
    ]
