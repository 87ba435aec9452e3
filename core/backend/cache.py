"""Converted graphs, kept: sessions in this process by structure, models on disk for later ones."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

_sessions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def session_for(key: str, make: Callable[[], Any]) -> Any:
    """The session of a graph's digest, made when no compiled graph holds one."""
    with _lock:
        found = _sessions.get(key)
    if found is None:
        made = make()
        with _lock:
            found = _sessions.setdefault(key, made)
    return found


def forget_sessions() -> None:
    """Forgets every session, so that graphs that are compiled from now on make their own."""
    with _lock:
        _sessions.clear()


def stored_model(folder: str | os.PathLike[str], key: str, make: Callable[[], bytes]) -> bytes:
    """A model from a folder, made and stored there when it is missing.

    Processes may share the folder: a file appears complete or not at all. One that can't be written leaves the model unstored.
    """
    path = Path(folder) / f"{key}.onnx"
    try:
        return path.read_bytes()
    except OSError:
        made = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{key}.", suffix=".part")
    except OSError:
        return made
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
    return made
