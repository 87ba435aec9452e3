"""Plugins as real distributions: a project that pip builds and installs, into a folder put on the path."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{name}"
version = "{version}"
[project.entry-points.onnxplug]
{entry} = "{module}"
[tool.setuptools]
py-modules = [{modules}]
"""


@dataclass(frozen=True)
class Dist:
    """A distribution of one module.

    Attributes:
        name, version: The distribution.
        source: The module's text; ``None`` when another distribution brings the module.
        entry: Name of its entry point.
        module: Name of the module.
    """

    name: str
    source: str | None
    entry: str = "shop"
    module: str = ""
    version: str = "1.0"


def pip_install(folder: Path, *dists: Dist) -> None:
    """Builds distributions and installs them into ``folder``, by one pip."""
    with tempfile.TemporaryDirectory() as scratch:
        projects = []
        for dist in dists:
            project = Path(scratch, dist.name)
            project.mkdir()
            module = dist.module or dist.name.replace("-", "_")
            modules = f'"{module}"' if dist.source is not None else ""
            text = _PROJECT.format(
                name=dist.name, version=dist.version, entry=dist.entry, module=module, modules=modules
            )
            (project / "pyproject.toml").write_text(text, encoding="utf-8")
            if dist.source is not None:
                (project / f"{module}.py").write_text(dist.source, encoding="utf-8")
            projects.append(str(project))
        options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--upgrade"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(folder), *projects]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def run_python(folder: Path, *arguments: str, status: int | None = 0, **environment: str) -> str:
    """Runs Python with the distributions of ``folder`` installed; returns what it printed, errors included."""
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=folder, check=False
    )
    assert status is None or done.returncode == status, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
