"""``ONNXPLUG_LOG``: the levels at which the loggers below ``onnxplug`` write to standard error."""

from __future__ import annotations

import contextlib
import difflib
import logging
import sys
from typing import Any

from onnxplug.logs import LOGGERS, ROOT, VARIABLE, LogSettingWarning, logger
from onnxplug.warn import warn

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "off": logging.CRITICAL + 1}


class _Handler(logging.Handler):
    """Writes to the present standard error, unless the program has set up logging itself."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:  # the program's handlers get it as well
            return
        with contextlib.suppress(OSError, ValueError):  # standard error is closed
            sys.stderr.write(f"{self.format(record)}\n")


_handler = _Handler()
_handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))


def show(text: str) -> None:
    """Applies a value of ``ONNXPLUG_LOG``; a value that can't be read gives a warning and no levels."""
    try:
        levels = parse(text)
    except ValueError as error:
        warn(f"{VARIABLE}={text!r} is ignored: {error}", LogSettingWarning)
        levels = {}
    root = logging.getLogger(ROOT)
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
