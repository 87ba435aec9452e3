"""Packages under ``contrib/`` without pip: each is put on the path, and its entry point is given to a plugin manager."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from onnxplug.plugin_api import ENTRY_POINT_GROUP
from onnxplug.plugins.manager import PluginManager
from onnxplug.plugins.records import BUILTIN, Selection
from onnxplug.registry.registry import OnnxRegistry
from onnxplug.testing import IsolatedRegistry

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"
#: Packages that import torchvision, which on this machine may lack its compiled kernels.
VISION = (
    "onnxplug-bitsandbytes",
    "onnxplug-diffusers",
    "onnxplug-extensions",
    "onnxplug-torchvision",
    "onnxplug-transformers",
)
#: Folders that go when the process ends.
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@cache
def modules_alone(folder: Path) -> Path:
    """A folder with the package's modules and nothing else.

    Files that a build leaves beside them (egg-info) would make every later test of the process see an installed plugin.
    """
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="onnxplug-contrib-"))
    alone = Path(_FOLDERS[-1].name)
    for module in folder.iterdir():
        if (module / "__init__.py").is_file():
            (alone / module.name).symlink_to(module)
    return alone


def is_installed(package: str) -> bool:
    """Whether a package is importable as it is: `make` installs some."""
    return find_spec(package.replace("-", "_")) is not None


def _project(package: str) -> Any:
    return tomllib.loads((CONTRIB / package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@contextmanager
def installed(*packages: str) -> Iterator[None]:
    """As if pip had installed these packages, whose modules are on the path, their dependencies, and no other plugin.

    Packages that are no plugins change nothing.
    """
    if all(ENTRY_POINT_GROUP not in _project(package)["entry-points"] for package in packages):
        yield
        return
    needed = {item for package in packages for item in _project(package)["dependencies"]}
    packages = (*packages, *sorted(item for item in needed if (CONTRIB / item).is_dir() and item not in packages))
    projects = {package: _project(package) for package in packages}
    registry = IsolatedRegistry()
    for package, project in projects.items():
        for entry, module in project["entry-points"].get(ENTRY_POINT_GROUP, {}).items():
            registry.add_plugin(import_module(module), name=entry, distribution=package, version=project["version"])
        if package in VISION:
            from tests.support.vision_kernels import define_vision_kernels

            define_vision_kernels()
    with registry.active():
        yield


@cache
def plugged(*packages: str) -> tuple[OnnxRegistry, PluginManager]:
    """The builtin rules and those of the packages, as ``to_onnx`` takes them (``registry=``)."""
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == BUILTIN]
    for package in packages:
        if not is_installed(package):
            sys.path.insert(0, str(modules_alone(CONTRIB / package)))
        points.extend(
            EntryPoint(name, value, ENTRY_POINT_GROUP)
            for name, value in _project(package)["entry-points"][ENTRY_POINT_GROUP].items()
        )
    manager = PluginManager(Selection(), points)
    builtin, plugin = manager.rules()
    assert [r.error for r in manager.records() if r.status != "loaded"] == []
    return OnnxRegistry(builtin, plugin), manager
