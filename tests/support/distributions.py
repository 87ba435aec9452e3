"""Plugins as real distributions, in a folder put on the path: built and installed by pip, or the same files written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from tests.support.child import run_fork

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


def place(folder: Path, *dists: Dist) -> None:
    """Writes the files that ``pip_install`` leaves in ``folder``: the module and its metadata, without building.

    A pip takes two seconds; tests/plugins/test_manager.py compares the files of both.
    """
    for dist in dists:
        stem = dist.name.replace("-", "_")
        module = dist.module or stem
        info = f"{stem}-{dist.version}.dist-info"
        files = {
            f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {dist.name}\nVersion: {dist.version}\n",
            f"{info}/entry_points.txt": f"[onnxplug]\n{dist.entry} = {module}\n",
            f"{info}/top_level.txt": (module if dist.source is not None else "") + "\n",
            f"{info}/INSTALLER": "pip\n",
        }
        if dist.source is not None:
            files[f"{module}.py"] = dist.source
        files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        (folder / info).mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")


def copy_source(folder: Path) -> Path:
    """Copies what onnxplug is built of; building in the checkout would leave build/ and an egg-info there."""
    checkout = Path(__file__).resolve().parents[2]
    folder.mkdir()
    for layer in ("core", "converters", "operators", "rewrites", "verification", "patches", "plugins", "cli", "src"):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(checkout / layer, folder / layer, ignore=ignored, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(checkout / name, folder / name)
    return folder


def environment(folder: Path) -> Path:
    """A clean virtual environment that sees our packages (torch takes long to install); returns its Python.

    It has no pip: ``pip_of`` uses the pip of the current environment.
    """
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    here = next(p for p in sys.path if p.endswith("site-packages"))
    (site / "parent.pth").write_text(f"import site; site.addsitedir({here!r})\n", encoding="utf-8")
    return folder / "bin" / "python"


def pip_of(python: Path, *arguments: str) -> None:
    """Runs pip on the environment of ``python``: ``install`` without an index, or ``uninstall``."""
    options = ["--no-index", "--no-build-isolation", "--no-deps"] if arguments[0] == "install" else ["--yes"]
    command = [sys.executable, "-m", "pip", "--python", str(python), arguments[0], "--quiet", *options, *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def run_python(folder: Path, *arguments: str, status: int | None = 0, fresh: bool = False, **environment: str) -> str:
    """Runs Python with the distributions of ``folder`` installed; returns what it printed, errors included.

    Args:
        folder: The working folder, and the first on the path after it.
        arguments: The interpreter's: ``"-c", code`` or ``"-m", module``, further arguments, and ``-W`` before them.
        status: The expected exit status; ``None``: any.
        fresh: Whether to run a new process, which imports torch itself, and not a fork of a process with torch imported
            (``tests.support.forking``). Several new processes may run at the same time.
        environment: Environment variables beside those of this process.
    """
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **environment}
    if fresh:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=env, cwd=folder, check=False
        )
    else:
        done = run_fork(*arguments, env=env, cwd=folder)
    assert status is None or done.returncode == status, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr
