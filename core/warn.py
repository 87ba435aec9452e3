"""Warnings that name the user's line."""

from __future__ import annotations

import os
import sys
import warnings

#: The folder of onnxplug, whose lines are not the user's.
_PACKAGE = os.path.join(os.path.dirname(__file__), "")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the first line up the stack that is not onnxplug's own.

    Args:
        text: What is to be said.
        category: The class of the warning.
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)
