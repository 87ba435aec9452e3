"""``profile=``: where the time of an export goes."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxplug.errors import SaveError, UsageError
from onnxplug.observers import Span, observed
from onnxplug_tools.profiling.profile import Profile
from onnxplug_tools.profiling.recorder import Recorder


class ProfileObserver(Recorder):
    """Gives a profile to each program that is exported, and to the error of an export that fails.

    Args:
        path: The file that the profile is to be written to, if any.

    Attributes:
        profile: The profile of the last export; ``None`` before an export begins.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.profile: Profile | None = None
        self._path = path

    def begin(self, span: Span) -> None:
        """Keeps a span."""
        super().begin(span)
        if span.root is span and (span.parent is None or span.parent.root is None):
            self.profile = Profile(self, span)

    def end(self, span: Span) -> None:
        """Gives the profile to the result of an export, or to the error that ended it, and notes where a model was saved."""
        if span.name == "saving" and isinstance(span.result, str | bytes | os.PathLike):
            self.saved.add(os.path.realpath(os.fsdecode(span.result)))
        made: Any = span.result if span.error is None else span.error
        if span.root is span and made is not None:
            with contextlib.suppress(AttributeError, TypeError):  # an error of a class with a layout of its own
                made.profile = Profile(self, span)

    def everything(self) -> Profile:
        """The profile of everything that was recorded, in exports and between them."""
        return Profile(self)

    def finish(self, error: BaseException | None) -> None:
        """Writes the file; after a call that failed, an error of the file is only a warning."""
        if self._path is None or self.profile is None:
            return
        if error is None:
            self.profile.save(self._path)
            return
        try:
            self.profile.save(self._path)
        except SaveError as failure:
            warnings.warn(failure.message, stacklevel=4)
        else:
            error.add_note(f"The profile up to there is in {self._path}.")


def observer(profile: Any) -> ProfileObserver | None:
    """The observer that the option ``profile`` asks for."""
    if profile is False:
        return None
    if profile is True:
        return ProfileObserver()
    if not isinstance(profile, str | os.PathLike) or not os.fspath(profile):
        raise UsageError(f"profile takes True, False or the name of a file, got {profile!r}")
    path = Path(os.fsdecode(os.fspath(profile)))
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise UsageError(f"the profile can't be written: {path} {what}", hint="Name a file: profile='profile.json'.")
    return ProfileObserver(path)


@contextlib.contextmanager
def recording() -> Iterator[ProfileObserver]:
    """Records while the context lasts."""
    recorder = ProfileObserver()
    with observed(recorder):
        yield recorder
