"""``--profile [FILE]``: where the time of a command goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from onnxplug.cli.options import flag
from onnxplug.errors import SaveError, UsageError

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


@contextlib.contextmanager
def profiled(asked: str | None) -> Iterator[None]:
    """Records what is done while the context lasts, and at its end prints it and writes the file, after an error too.

    Args:
        asked: The value of ``--profile``.

    Raises:
        UsageError: The file can't be written.
    """
    if asked is None:
        yield
        return
    path = None if asked == TABLE_ALONE else Path(asked)
    if path is not None and (not asked or path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"--profile: there can be no file {asked!r}", hint="Name one in a folder that is there.")
    from onnxplug.cli.report import err, failure, out
    from onnxplug.observers import observed
    from onnxplug.packages import load

    recorder = load("profile=", "--profile")(True)
    with observed(recorder):
        done = False
        try:
            yield
            done = True
        finally:
            profile = recorder.everything()
            console = out if done else err
            console.print(profile)
            if path is not None:
                try:
                    profile.save(path)
                    console.print(f"written: {path}", markup=False)
                except SaveError as error:
                    if done:
                        raise
                    failure(error.message)
