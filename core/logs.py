"""Logging: the loggers below ``onnxplug``, and ``ONNXPLUG_LOG``, which selects the shown messages."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
import threading
from typing import Any

from onnxplug.warn import warn

VARIABLE = "ONNXPLUG_LOG"
ROOT = "onnxplug"
#: The loggers, with the content of each; docs/profiling.md lists them.
LOGGERS = {
    "capture": "attempts at torch.export, and what each failed of; dynamic dimensions that came out static",
    "functionalize": "how in-place writes were made functional",
    "convert": "which rule translates each FX node, and why; decompositions",
    "rewrite": "which rewrite replaced which node",
    "finish": "calls of modules that became functions",
    "plugins": "which plugins were loaded, left out or refused",
    "run": "what runs a model: ONNX Runtime, or the evaluator and why",
    "verify": "the sizes and seeds that were compared, and the largest difference of each",
    "save": "files that are written",
}
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "off": logging.CRITICAL + 1}

# As usual for libraries: without a handler of the program's own nothing is printed.
logging.getLogger(ROOT).addHandler(logging.NullHandler())


class LogSettingWarning(UserWarning):
    """``ONNXPLUG_LOG`` can't be read; it is ignored."""


def logger(name: str) -> logging.Logger:
    """The logger of one of :data:`LOGGERS`."""
    assert name in LOGGERS
    return logging.getLogger(f"{ROOT}.{name}")


class _Handler(logging.Handler):
    """Writes to the present standard error, unless the program has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:  # the program's handlers get it as well
            return
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            sys.stderr.write(f"{self.format(record)}\n")


_lock = threading.Lock()
_read: str | None = None
_handler = _Handler()
_handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))


def configure() -> None:
    """Applies ``ONNXPLUG_LOG``, if it has changed since the last call. A value that can't be read gives a warning."""
    global _read
    text = os.environ.get(VARIABLE)
    if text == _read:
        return
    with _lock:
        before, _read = _read, text
    try:
        levels = parse(text or "")
    except ValueError as error:
        warn(f"{VARIABLE}={text!r} is ignored: {error}", LogSettingWarning)
        levels = {}
    root = logging.getLogger(ROOT)
    if before is not None or levels:
        for name in ("", *LOGGERS):
            (logger(name) if name else root).setLevel(levels.get(name, logging.NOTSET))
    if levels and _handler not in root.handlers:
        root.addHandler(_handler)
    elif not levels:
        root.removeHandler(_handler)


def parse(text: str) -> dict[str, int]:
    """The levels in a value of ``ONNXPLUG_LOG``: ``"debug"``, ``"capture=debug,rewrite=info"``, ``"info,plugins=off"``.

    Returns:
        Name of a logger to its level; the empty name is for all others.

    Raises:
        ValueError: A level or a logger is unknown, or named twice.
    """
    levels: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, level = part.rpartition("=")
        name, level = name.strip().removeprefix(f"{ROOT}."), level.strip().lower()
        name = "" if name == ROOT else name
        if separator and not name and part.partition("=")[0].strip() != ROOT:
            raise ValueError(f"{part!r} has no name before the =")
        if name and name not in LOGGERS:
            raise ValueError(f"there is no logger {name!r}; {_known(name, LOGGERS)}")
        if level not in LEVELS:
            raise ValueError(f"there is no level {level!r}; {_known(level, LEVELS)}")
        if name in levels:
            raise ValueError(f"the level of {name or 'all'} is given twice")
        levels[name] = LEVELS[level]
    return levels


def _known(name: str, names: Any) -> str:
    near = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
