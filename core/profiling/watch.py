"""One export watched: its stages told to the user, the log and the profile."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnxplug import logs
from onnxplug.errors import SaveError, UsageError
from onnxplug.profiling.profile import Profile
from onnxplug.profiling.recorder import Recorder, Span, active, recording
from onnxplug.progress import Told, showing

#: Loggers of the stages that an export itself begins. What others begin they tell of themselves, saving for example.
_STAGES = {"capture": logs.logger("capture"), "conversion": logs.logger("convert")}


class Watch:
    """An export that is watched; to be called with the name of each stage as it begins.

    Args:
        told: Who is told of the stages.
        recorder: Where they are recorded; ``None`` where nobody wants to know.
        root: The span of the export.
    """

    def __init__(self, told: Told | None, recorder: Recorder | None, root: Span | None) -> None:
        self._told = told
        self._recorder = recorder
        self._root = root
        self._stage = contextlib.ExitStack()
        #: What is known of the stage that is at work, to be added to.
        self.about: dict[str, Any] = {}

    def __call__(self, stage: str) -> None:
        self.finish()
        if self._told is not None:
            self._told(stage)
        if stage in _STAGES:
            self.about = self._stage.enter_context(logs.stage(stage, _STAGES[stage]))

    def finish(self) -> None:
        """Ends the stage that is at work."""
        self.about = {}
        self._stage.close()

    def fail(self, error: BaseException) -> None:
        """Ends the stage that is at work, in which an error was raised."""
        if self._root is not None:
            self._root.about["error"] = type(error).__name__
        self.about["error"] = type(error).__name__
        self._stage.close()

    @property
    def profile(self) -> Profile | None:
        """The profile; ``None`` where nothing is recorded."""
        return Profile(self._recorder, self._root) if self._recorder is not None else None


@contextlib.contextmanager
def watched(
    profile: bool | str | os.PathLike[str], progress: Told | bool | None, name: str = "export"
) -> Iterator[Watch]:
    """Watches an export while the context lasts; an error that ends it has the profile so far as its attribute ``profile``.

    Args:
        profile: Whether to record it, or the file that the profile is to be written to. It is recorded in any case where
            something is being recorded already.
        progress: Who is told of the stages (:func:`onnxplug.progress.showing`).
        name: What the export is called in the profile.

    Raises:
        UsageError: ``profile`` or ``progress`` is something else.
        SaveError: The profile can't be written.
    """
    path = _checked(profile)
    logs.configure()
    recorder = active()
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(showing(progress))
        if recorder is None and profile is not False:
            recorder = stack.enter_context(recording())
        root = stack.enter_context(recorder.span(name)) if recorder is not None else None
        watch = Watch(told, recorder, root)
        try:
            yield watch
        except BaseException as error:
            watch.fail(error)
            if recorder is not None and root is not None:
                recorder.finish(root)
            _give(error, watch.profile)
            if path is not None:
                _write_after(error, watch.profile, path)
            raise
        watch.finish()
    if path is not None and watch.profile is not None:
        watch.profile.save(path)


def _checked(profile: Any) -> Path | None:
    """The file that the argument ``profile`` names, if any.

    Raises:
        UsageError: It is neither a bool nor a file that can be written.
    """
    if isinstance(profile, bool):
        return None
    if not isinstance(profile, str | os.PathLike) or not os.fspath(profile):
        raise UsageError(f"profile takes True, False or the name of a file, got {profile!r}")
    path = Path(os.fsdecode(os.fspath(profile)))
    if path.is_dir() or not path.parent.is_dir():
        what = "is a folder" if path.is_dir() else f"lies in {path.parent}, which is no folder"
        raise UsageError(f"the profile can't be written: {path} {what}", hint="Name a file: profile='profile.json'.")
    return path


def _give(error: BaseException, profile: Profile | None) -> None:
    if profile is not None:
        with contextlib.suppress(AttributeError, TypeError):  # an error of a class with a layout of its own
            error.profile = profile  # type: ignore[attr-defined]


def _write_after(error: BaseException, profile: Profile | None, path: Path) -> None:
    """Writes the profile of an export that failed; the export's own error is what counts."""
    try:
        if profile is not None:
            profile.save(path)
    except SaveError as failure:
        warnings.warn(failure.message, stacklevel=4)
    else:
        error.add_note(f"The profile up to there is in {path}.")
