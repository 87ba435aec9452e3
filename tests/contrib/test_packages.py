"""Every package under contrib/: its wheel holds the files of its entry point, its import is cheap, it brings tests."""

from __future__ import annotations

import shutil
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import run_child
from tests.support.contrib import CONTRIB, plugged

PACKAGES = sorted(path.parent.name for path in CONTRIB.glob("*/pyproject.toml"))
#: Built and tested by suites of their own: a C++ library, and softcap by tests/test_contrib.py.
PLAIN = [name for name in PACKAGES if "cpp" not in name]


def project(name: str) -> dict[str, Any]:
    return tomllib.loads((CONTRIB / name / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PLAIN)
def test_wheel_builds_and_is_whole(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(CONTRIB / name, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    assert project(name)["build-system"]["build-backend"] == "setuptools.build_meta"
    code = (
        f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"  # pip takes three times as long
    )
    done = run_child("-c", code, cwd=copy)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        points = next(archive.read(n).decode() for n in packed if n.endswith("entry_points.txt"))
    package = name.replace("-", "_")
    files = (p for ending in ("py", "jinja", "json") for p in (CONTRIB / name / package).rglob(f"*.{ending}"))
    sources = {p.relative_to(CONTRIB / name).as_posix() for p in files}
    assert sources
    assert {n for n in packed if ".dist-info/" not in n} == sources
    assert points.startswith(("[onnxplug]", "[torch_dynamo_backends]"))


@pytest.mark.parametrize("name", [n for n in PLAIN if n != "onnxplug-softcap"])
def test_entry_point_imports_nothing_heavy(name: str) -> None:
    (module,) = project(name)["project"]["entry-points"].get("onnxplug", {"": name.replace("-", "_")}).values()
    code = f"""
import sys; sys.path.insert(0, {str(CONTRIB / name)!r})
import {module} as plugin
for hook in ("onnxplug_rules", "onnxplug_rewrites", "onnxplug_patches", "onnxplug_samples", "onnxplug_info"):
    list(getattr(plugin, hook, tuple)() or ()) if hook != "onnxplug_info" else getattr(plugin, hook, dict)()
print({{"torch", "bitsandbytes", "fbgemm_gpu", "torchvision", "torch_geometric", "transformers", "onnx_ir", "onnxruntime"}} & set(sys.modules))
"""
    done = run_child("-c", code)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_package_brings_its_tests(name: str) -> None:
    """contrib/conftest.py runs the tests; the tests of a plugin with samples check the samples."""
    texts = [path.read_text(encoding="utf-8") for path in (CONTRIB / name / "tests").rglob("test_*.py")]
    assert any("def test_" in text for text in texts)
    is_plugin = "onnxplug" in project(name)["project"]["entry-points"]
    if name in PLAIN and is_plugin and plugged(name)[1].samples():
        assert any("onnx_sample.check()" in text for text in texts)
    assert any(r.startswith("pytest") for r in project(name)["project"]["optional-dependencies"]["test"])
    assert "pytest tests" in (CONTRIB / name / "README.md").read_text(encoding="utf-8")
