"""Runs a library's tests with onnxplug in the place of ``torch.onnx.export``, for each version of torch.

``action.yml`` starts it. Inputs are environment variables. A table goes to ``GITHUB_STEP_SUMMARY``; the exit status is
1 where a test failed with any version.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

#: The version that stands for the present environment.
INSTALLED = "installed"


def main() -> int:
    """Runs the tests for each version, and writes the table."""
    versions = os.environ["ONNXPLUG_VERSIONS"].split() or [INSTALLED]
    lines = ["| torch | exports | failed | tests |", "|---|---|---|---|"]
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for version in versions:
            python = sys.executable if version == INSTALLED else _environment(Path(folder) / version, version)
            status, output = _run(python)
            failed |= status != 0
            counts = re.search(r"^onnxplug: (\d+) exports, (\d+) failed$", output, re.MULTILINE)
            last = output.strip().splitlines()[-1].strip("= ") if output.strip() else "nothing ran"
            lines.append(f"| {version} | {counts[1] if counts else '?'} | {counts[2] if counts else '?'} | {last} |")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        with open(summary, "a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
    return int(failed)


def _environment(folder: Path, version: str) -> str:
    """Makes an environment with a version of torch, the library and onnxplug; returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    pip = [python, "-m", "pip", "install", "--quiet"]
    index = ["--extra-index-url", os.environ["ONNXPLUG_INDEX"]] if os.environ["ONNXPLUG_INDEX"] else []
    needed = shlex.split(os.environ["ONNXPLUG_LIBRARY"]) + shlex.split(os.environ["ONNXPLUG_REQUIREMENTS"])
    subprocess.run([*pip, *index, f"torch=={version}", "pytest", *needed], check=True)
    return python


def _run(python: str) -> tuple[int, str]:
    """The exit status and the output of pytest."""
    tests, arguments = (shlex.split(os.environ[f"ONNXPLUG_{name}"]) for name in ("TESTS", "ARGUMENTS"))
    command = [python, "-m", "pytest", "--as-torch-onnx", *arguments, *tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    sys.stdout.write(done.stdout)
    sys.stdout.flush()
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
