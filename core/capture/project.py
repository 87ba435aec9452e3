"""Names of source files in a model: relative to their project, so that no user's folders are shipped."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig

_FILE = re.compile(r'File "([^"]+)"')
_GENERATED = re.compile(r"^(<eval_with_key>)\.\d+$")
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")
#: Files that mark the root folder of a project.
_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git", ".hg")


@functools.lru_cache(maxsize=4096)
def relative_path(path: str) -> str:
    """A source file's path, relative to where its package is installed, to its project or to where Python finds modules.

    Never an absolute path, nor a path with ``..``: outside of these folders only the file's name. The name of generated code
    (``<string>``) stays, except for torch's number, which differs from run to run.

    Args:
        path: The path as a traceback has it.
    """
    if path.startswith("<"):
        return _GENERATED.sub(r"\1", path)
    path = os.path.abspath(path)
    installed = _INSTALLED.match(path)
    if installed is not None:
        return _slashed(path[installed.end() :])
    of_python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    root = _project_of(os.path.dirname(path))
    for folder in (*of_python, *([root] if root is not None else []), os.getcwd(), *sys.path):
        start = os.path.abspath(folder or ".").rstrip(os.sep) + os.sep
        if start != os.sep and path.startswith(start):
            return _slashed(path[len(start) :])
    return os.path.basename(path)


@functools.lru_cache(maxsize=1024)
def _project_of(folder: str) -> str | None:
    """The nearest folder upwards that is a project's root."""
    while True:
        above = os.path.dirname(folder)
        if above == folder:
            return None
        if any(os.path.exists(os.path.join(folder, mark)) for mark in _MARKS):
            return folder
        folder = above


def _slashed(path: str) -> str:
    return path.replace(os.sep, "/")


@functools.lru_cache(maxsize=65536)
def relative_line(location: str) -> str:
    """``FILE:LINE`` with the file as :func:`relative_path` names it."""
    file, colon, line = location.rpartition(":")
    return f"{relative_path(file)}:{line}" if colon else location


@functools.lru_cache(maxsize=65536)
def relative_trace(trace: str) -> str:
    """A stack trace with its files as :func:`relative_path` names them."""
    return _FILE.sub(lambda match: f'File "{relative_path(match[1])}"', trace)
