"""Packages under ``contrib/`` without pip: each is put on the path, and its entry point is given to a plugin manager."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from onnxplug.plugin_api import ENTRY_POINT_GROUP
from onnxplug.plugins.manager import PluginManager
from onnxplug.plugins.records import BUILTIN, Selection
from onnxplug.registry.registry import OnnxRegistry

CONTRIB = Path(__file__).resolve().parents[2] / "contrib"


@cache
def modules_alone(folder: Path) -> Path:
    """A folder with the package's modules and nothing else.

    What a build leaves beside them (egg-info) would make every later test of the process see an installed plugin.
    """
    alone = Path(tempfile.mkdtemp(prefix="onnxplug-contrib-"))
    for module in folder.iterdir():
        if (module / "__init__.py").is_file():
            (alone / module.name).symlink_to(module)
    return alone


@cache
def plugged(*packages: str) -> tuple[OnnxRegistry, PluginManager]:
    """The builtin rules and those of the packages, as ``to_onnx`` takes them (``registry=``)."""
    points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == BUILTIN]
    for package in packages:
        folder = CONTRIB / package
        sys.path.insert(0, str(modules_alone(folder)))
        project: Any = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        points.extend(
            EntryPoint(name, value, ENTRY_POINT_GROUP)
            for name, value in project["entry-points"][ENTRY_POINT_GROUP].items()
        )
    manager = PluginManager(Selection(), points)
    builtin, plugin = manager.rules()
    assert [r.error for r in manager.records() if r.status != "loaded"] == []
    return OnnxRegistry(builtin, plugin), manager
