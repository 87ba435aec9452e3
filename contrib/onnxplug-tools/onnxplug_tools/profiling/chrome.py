"""A profile in Chrome's trace format, a JSON object that Perfetto, speedscope and chrome://tracing read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onnxplug.errors import SaveError
from onnxplug.kinds import check_path
from onnxplug.run.files import write_whole
from onnxplug_tools.profiling.sums import Sums


def trace(profile: Sums) -> dict[str, Any]:
    """The object that the file holds.

    Each span is a complete event (phase ``X``), its beginning and length in microseconds; the facts about it are the
    event's arguments. The sums of :meth:`Sums.to_dict` are in ``otherData``.
    """
    recorder = profile.recorder
    process, thread = os.getpid(), recorder.thread
    where = {"pid": process, "tid": thread}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "ts": 0, **where, "args": {"name": "onnxplug"}},
        {"ph": "M", "name": "thread_name", "ts": 0, **where, "args": {"name": "export"}},
    ]
    for span in profile.spans:
        begin = span.start - recorder.origin
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "ts": begin / 1e3,
                "dur": (span.end - span.start) / 1e3,
                **where,
                "args": {key: _plain(value) for key, value in span.about.items()},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": profile.to_dict()}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def save_trace(profile: Sums, path: str | os.PathLike[str]) -> None:
    """Writes the file: complete or not at all."""
    check_path("path", path)
    name = os.fsdecode(path)
    try:
        destination = Path(os.path.realpath(name))
        if destination.is_dir():
            raise SaveError(f"can't write the profile {destination}: it is a folder", hint="Give the name of a file.")
        if str(destination) in profile.recorder.saved:
            raise SaveError(f"can't write the profile {name}: the model is there", hint="Give another name.")
        text = json.dumps(trace(profile), default=str)
        write_whole(destination, lambda file: file.write(text.encode()))
    except (OSError, ValueError) as error:
        raise SaveError(f"can't write the profile {name}: {error}") from error
