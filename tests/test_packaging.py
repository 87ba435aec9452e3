"""A source distribution and the wheel made of it, installed and used outside of the checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.distributions import copy_source, environment, pip_of

SMOKE = """
import sys
import torch
import onnxplug

place = onnxplug.__file__
assert "site-packages" in place and place.startswith(sys.prefix), place
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 2)).eval()
program = onnxplug.to_onnx(model, (torch.randn(3, 8),), "model.onnx", dynamic_shapes=({0: "batch"},), verify=True)
print(tuple(program(torch.randn(5, 8))[0].shape))
"""


def _run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_sdist_and_wheel(tmp_path: Path) -> None:
    source = copy_source(tmp_path / "source")
    made = tmp_path / "made"
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", made, source, cwd=tmp_path)
    (archive,) = made.glob("onnxplug-*.tar.gz")
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        packed.extractall(tmp_path, filter="data")
    assert {"pyproject.toml", "README.md", "LICENSE", "src/onnxplug/exporter.py", "src/onnxplug/py.typed"} <= names
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", made, folder, cwd=tmp_path)
    (wheel,) = made.glob("onnxplug-*.whl")

    python = environment(tmp_path / "env")
    pip_of(python, "install", str(wheel))
    away = tmp_path / "away"
    away.mkdir()
    assert _run(python, "-c", SMOKE, cwd=away).split("\n")[-2] == "(5, 2)"
    command = python.parent / "onnxplug"
    assert "onnxplug 0." in _run(command, "--version", cwd=away)
    assert "Gemm 2" in " ".join(_run(command, "inspect", "model.onnx", cwd=away).split())
    assert "aten::gelu.default" in _run(command, "why", "aten::gelu", cwd=away)
    _run(command, "plugins", "new", "onnxplug-acme", "--op", "acme::soft_clip", cwd=away)
    assert (away / "onnxplug-acme" / "pyproject.toml").is_file()
