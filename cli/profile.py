"""``--profile [FILE]``: where the time of a command goes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from onnxplug.cli.options import flag
from onnxplug.packages import load

#: What ``--profile`` stands for where no file follows it.
TABLE_ALONE = "-"

ProfileOption = Annotated[str | None, flag("profile")]


def with_value(arguments: Sequence[str]) -> list[str]:
    """A command line in which ``--profile`` always has a value: ``-`` where neither ``=`` nor the name of a .json file follows.

    So that it may stand before TARGET, which it would take for its file otherwise.
    """
    found: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[position:]]
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        found.append(argument)
        if argument == "--profile" and not following.lower().endswith(".json"):
            found[-1] = f"--profile={TABLE_ALONE}"
    return found


def profiled(asked: str | None) -> AbstractContextManager[None]:
    """Records what is done while the context lasts, and at its end prints it and writes the file, after an error too.

    Args:
        asked: The value of ``--profile``.

    Raises:
        UsageError: The file can't be written.
        MissingPackageError: The package that records is not installed.
    """
    if asked is None:
        return nullcontext()
    recording: AbstractContextManager[None] = load("--profile")(asked if asked != TABLE_ALONE else None)
    return recording
