"""Stamps of plugins' code: a model kept on disk is used only with the code that made it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement


def stamp_of(point: EntryPoint, loaded: float) -> str | None:
    """A digest of the code behind an entry point and of the versions of the distributions that its own distribution requires.

    A distribution states the digests of its files in ``RECORD``. The files of an editable install, or of another install without
    digests, are identified by size and time of change.

    Args:
        point: The entry point of a plugin that is loaded.
        loaded: When it was loaded, in seconds since the epoch.

    Returns:
        ``None`` when the code that runs is not known: it is not in files, or these have changed since it was loaded.
    """
    record = _read(point.dist, "RECORD")
    if record is None or _is_editable(point.dist):
        record = _state_of_files(point, loaded)
        if record is None:
            return None
    text = "\n".join([record, *_required(point.dist)])
    return hashlib.sha256(text.encode()).hexdigest()


def _read(dist: Any, name: str) -> str | None:
    read_text = getattr(dist, "read_text", None)
    text: str | None = read_text(name) if read_text is not None else None
    return text


def _is_editable(dist: Any) -> bool:
    try:
        origin = json.loads(_read(dist, "direct_url.json") or "{}")
    except ValueError:
        return True
    return bool(origin.get("dir_info", {}).get("editable"))


def _state_of_files(point: EntryPoint, loaded: float) -> str | None:
    top_levels = {point.module.partition(".")[0], *(_read(point.dist, "top_level.txt") or "").split()}
    files = sorted({file for name in top_levels for file in _files(name)})
    states = [(file, file.stat()) for file in files if file.is_file()]
    if not states or any(state.st_mtime > loaded for _, state in states):
        return None
    return "\n".join(f"{file} {state.st_size} {state.st_mtime_ns}" for file, state in states)


def _files(top_level: str) -> Iterator[Path]:
    """The source files of a module or package; parts of a package may lie in folders of their own."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and (name == top_level or name.startswith(f"{top_level}."))
    ]
    # Not by attribute: the module onnxplug.testing gets its attributes, and so __path__, from another package.
    folders = {Path(folder) for module in modules for folder in vars(module).get("__path__", ())}
    for folder in folders:
        if folders.isdisjoint(folder.parents):
            for parent, _, names in os.walk(folder, followlinks=True):  # an editable install may hold links
                yield from (Path(parent, name) for name in names if name.endswith(".py"))
    for module in modules:
        if "__path__" not in vars(module) and (file := getattr(module, "__file__", None)) is not None:
            yield Path(file)


def _required(dist: Any) -> list[str]:
    requirements = []
    for text in getattr(dist, "requires", None) or ():
        try:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                requirements.append(f"{requirement.name} {version(requirement.name)}")
        except (InvalidRequirement, PackageNotFoundError):
            continue
    return sorted(requirements)
