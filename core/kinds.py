"""Checks of the kind of an argument's value: they come before all others and need no imports."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.text import shortened


def check_kind(name: str, value: Any, kind: Any, text: str) -> None:
    """Checks an argument.

    Args:
        name: The argument.
        value: The argument's value.
        kind: A class, or several.
        text: The accepted values, in words.

    Raises:
        UsageError: It is of another kind.
    """
    if not isinstance(value, kind) or (
        isinstance(value, bool) and kind in (int, (int, type(None)), (int, float, type(None)))
    ):
        raise UsageError(f"{name}= takes {text}, got {shortened(repr(value), 200)}")


def check_flags(**flags: Any) -> None:
    """Checks arguments that are ``True`` or ``False``: Python would silently use the truth of any other value.

    Raises:
        UsageError: One is neither.
    """
    for name, value in flags.items():
        # NumPy has a bool of its own
        if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
            raise UsageError(f"{name}= takes True or False, got {shortened(repr(value), 200)}")


def check_mappings(**mappings: Any) -> None:
    """Checks arguments that are dicts or ``None``.

    Raises:
        UsageError: One is neither.
    """
    for name, value in mappings.items():
        check_kind(name, value, (Mapping, type(None)), "a dict")


def check_lists(**lists: Any) -> None:
    """Checks arguments that are lists, or other collections that are no text.

    Raises:
        UsageError: One is not.
    """
    for name, value in lists.items():
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise UsageError(f"{name}= takes a list, got {shortened(repr(value), 200)}")


def check_path(name: str, value: Any) -> None:
    """Checks an argument that is the path of a file or folder.

    Raises:
        UsageError: It is none.
    """
    if not isinstance(value, str | bytes | os.PathLike):
        raise UsageError(f"{name} is the path of a file, got {shortened(repr(value), 200)}")


def check_seeds(seeds: Any) -> None:
    """Checks seeds of random numbers.

    Raises:
        UsageError: They are not a list of integers.
    """
    check_lists(seeds=seeds)
    for seed in seeds:
        check_kind("seeds", seed, int, "a list of integers")
