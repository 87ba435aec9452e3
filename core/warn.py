"""Warnings that name the user's line."""

from __future__ import annotations

import re
import sys
import warnings

#: Names of the modules of onnxplug and its plugins, whose lines are not the user's.
OWN = re.compile(r"onnxplug(_|\.|$)")
_WAY = re.compile(rf"{OWN.pattern}|contextlib$")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of onnxplug and of the context managers that lead to it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _WAY.match(str(frame.f_globals.get("__name__"))):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
