"""The documentation as a site."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_builds_without_a_warning(tmp_path: Path) -> None:
    """The site has no dead link, no page outside the navigation, and each public name in the reference."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    reference = (tmp_path / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert 'id="onnxplug.to_onnx"' in reference
    assert ":class:" not in reference
    commands = (tmp_path / "reference" / "command-line" / "index.html").read_text(encoding="utf-8")
    assert all(f"onnxplug {name}" in commands for name in ("export", "verify", "diagnose", "plugins"))
    assert 'id="onnxplug.errors.CaptureError"' in (tmp_path / "reference" / "errors" / "index.html").read_text("utf-8")
    hooks = (tmp_path / "reference" / "hooks" / "index.html").read_text(encoding="utf-8")
    assert "def onnxplug_sources() -&gt; Iterable[ModelSource]:" in hooks
