"""Warnings that name the user's line."""

from __future__ import annotations

import sys
import warnings

from onnxplug.packages import PACKAGES

#: onnxplug and its packages, whose lines are not the user's.
_OWN = {"onnxplug", *(place.partition(":")[0].partition(".")[0] for place in PACKAGES.values())}


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first line up the stack that is not onnxplug's own.

    Args:
        text: What is to be said.
        category: The class of the warning.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
