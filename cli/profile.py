"""``--profile [FILE]``: the profile of a command's time."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

from onnxplug.cli.options import flag
from onnxplug.packages import load

#: The value of ``--profile`` without a file.
TABLE_ALONE = "-"

ProfileOption = Annotated[str | None, flag("profile")]


def with_value(arguments: Sequence[str]) -> list[str]:
    """A command line in which ``--profile`` always has a value: ``-`` where neither ``=`` nor the name of a .json file follows.

    Then it may come before TARGET, which it would otherwise use as its file.
    """
    spelled: list[str] = []
    for position, argument in enumerate(arguments):
        if argument == "--":
            return [*spelled, *arguments[position:]]
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        spelled.append(argument)
        if argument == "--profile" and not following.lower().endswith(".json"):
            spelled[-1] = f"--profile={TABLE_ALONE}"
    return spelled


def profiled(file: str | None) -> AbstractContextManager[None]:
    """Records the command while the context lasts, and at its end prints the profile and writes the file, also after an error.

    Args:
        file: The value of ``--profile``.

    Raises:
        UsageError: The file can't be written.
        MissingPackageError: The package that records is not installed.
    """
    if file is None:
        return nullcontext()
    recording: AbstractContextManager[None] = load("--profile")(file if file != TABLE_ALONE else None)
    return recording
