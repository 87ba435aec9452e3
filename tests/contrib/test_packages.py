"""Every package under contrib/: its wheel holds what its entry point needs, importing it is cheap, its samples hold."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from tests.support.check import check
from tests.support.contrib import CONTRIB, plugged
from tests.support.scatter_kernels import define_scatter_kernels
from tests.support.vision_kernels import define_vision_kernels

PACKAGES = sorted(path.parent.name for path in CONTRIB.glob("*/pyproject.toml"))
#: Built and tested by suites of their own: a C++ library, and softcap by tests/test_contrib.py.
PLAIN = [name for name in PACKAGES if "cpp" not in name]


def project(name: str) -> dict[str, Any]:
    return tomllib.loads((CONTRIB / name / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PLAIN)
def test_wheel_builds_and_is_whole(name: str, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(CONTRIB / name, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", tmp_path, copy]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        points = next(archive.read(n).decode() for n in packed if n.endswith("entry_points.txt"))
    package = name.replace("-", "_")
    sources = {p.relative_to(CONTRIB / name).as_posix() for p in (CONTRIB / name / package).rglob("*.py")}
    assert sources
    assert {n for n in packed if ".dist-info/" not in n} == sources
    assert points.startswith("[onnxplug]")


@pytest.mark.parametrize("name", [n for n in PLAIN if n != "onnxplug-softcap"])
def test_entry_point_imports_nothing_heavy(name: str) -> None:
    (module,) = project(name)["project"]["entry-points"]["onnxplug"].values()
    code = f"""
import sys; sys.path.insert(0, {str(CONTRIB / name)!r})
import {module} as plugin
for hook in ("onnxplug_rules", "onnxplug_rewrites", "onnxplug_patches", "onnxplug_samples", "onnxplug_info"):
    list(getattr(plugin, hook, tuple)() or ()) if hook != "onnxplug_info" else plugin.onnxplug_info()
print({{"torch", "torchvision", "torch_geometric", "transformers", "onnx_ir", "onnxruntime"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


SAMPLES = [(name, index) for name in PLAIN for index in range(len(plugged(name)[1].samples()))]


@pytest.mark.parametrize(("name", "index"), SAMPLES)
def test_sample(name: str, index: int) -> None:
    define_vision_kernels()
    define_scatter_kernels()
    registry = plugged(name)
    sample = registry[1].samples()[index]
    namespace, _, op = sample.op.partition("::")
    operator = getattr(getattr(torch.ops, namespace), op)
    args, spec = _pytree.tree_flatten(tuple(sample.args() if callable(sample.args) else sample.args))
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]

    def model(*tensors: torch.Tensor) -> Any:
        given = list(args)
        for position, tensor in zip(where, tensors, strict=True):
            given[position] = tensor
        result = operator(*_pytree.tree_unflatten(given, spec), **sample.kwargs)
        # roi_pool's second result serves training alone.
        return result[0] if op == "roi_pool" else result

    for opset in sample.opsets or (13, 18, 21):
        # These inputs alone: others drawn at random, regions of an image that isn't there, mean nothing.
        check(model, *(args[i] for i in where), opset=opset, registry=registry, rtol=1e-4, atol=1e-4)
