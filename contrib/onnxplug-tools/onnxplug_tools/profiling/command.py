"""``--profile [FILE]`` of commands: where their time goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from onnxplug.cli.report import err, failure, out
from onnxplug.errors import SaveError, UsageError
from onnxplug.observers import observed
from onnxplug_tools.profiling.observer import ProfileObserver


@contextlib.contextmanager
def profiled(file: str | None) -> Iterator[None]:
    """Records while the context lasts; at its end prints the profile and writes the file, after an error too.

    Args:
        file: The file; ``None`` for none.
    """
    path = Path(file) if file is not None else None
    if path is not None and (not file or path.is_dir() or not path.parent.is_dir()):
        raise UsageError(f"--profile: there can be no file {file!r}", hint="Name one in a folder that is there.")
    recorder = ProfileObserver()
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
