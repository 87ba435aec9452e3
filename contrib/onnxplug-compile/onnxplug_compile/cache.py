"""Converted graphs, kept: sessions in this process by structure, models on disk for later ones."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxplug.run.files import write_whole
from onnxplug.run.save import LARGE_MODEL_BYTES, to_bytes, weight_bytes

_sessions: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def session_for(key: str, make: Callable[[], tuple[Any, bool]]) -> Any:
    """The session of a graph's digest.

    Args:
        make: Makes the session when no compiled graph holds it; also returns whether equal graphs may share it.
    """
    with _lock:
        session = _sessions.get(key)
    if session is None:
        session, is_shared = make()
        if is_shared:
            with _lock:
                session = _sessions.setdefault(key, session)
    return session


def forget_sessions() -> None:
    """Forgets every session, so that graphs that are compiled from now on make their own."""
    with _lock:
        _sessions.clear()


def path_of(folder: str | os.PathLike[str], key: str) -> Path:
    """The file in which the model of a graph's digest is kept."""
    return Path(folder) / f"{key}.onnx"


def read_model(path: Path) -> bytes | None:
    """A model that an earlier process kept; ``None`` when there is none."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_model(path: Path, model: ir.Model) -> None:
    """Keeps a model for later processes; they may share the folder: the file appears complete or not at all.

    A model is not kept where the folder can't be written to, or one file can't hold it: it is made anew next time.
    """
    if weight_bytes(model) > LARGE_MODEL_BYTES:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda file: file.write(to_bytes(model)))
    except OSError:
        return
