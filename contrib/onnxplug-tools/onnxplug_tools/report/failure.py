"""The facts of a report about the error that ended an export."""

from __future__ import annotations

import re
import traceback

from onnxplug.capture.project import relative_line, relative_trace
from onnxplug.errors import CaptureError, MissingRuleError, OnnxplugError
from onnxplug_tools.report.record import Failure, MissingRule

#: A place of a missing rule: the line, and the reason in words behind it.
_PLACE = re.compile(r"(?P<line>.*?:\d+)(?: \((?P<why>.*)\))?", re.DOTALL)
_LONGEST_TRACEBACK = 40


def failure_of(error: BaseException, stage: str) -> Failure:
    """The facts about an error."""
    ours = isinstance(error, OnnxplugError)
    place = getattr(error, "place", None)
    return Failure(
        stage=stage,
        error=type(error).__name__,
        message=(getattr(error, "message", "") or str(error) or type(error).__name__),
        hint=getattr(error, "hint", None) if ours else None,
        place=relative_line(place) if isinstance(place, str) and place else None,
        submodule=error.submodule if isinstance(error, CaptureError) else None,
        tries=tuple(error.tries) if isinstance(error, CaptureError) else (),
        missing=_missing(error) if isinstance(error, MissingRuleError) else (),
        traceback="" if ours else _traceback(error),
    )


def first_line(error: BaseException) -> str:
    """Class and first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _missing(error: MissingRuleError) -> tuple[MissingRule, ...]:
    rows = []
    for op, texts in error.missing.items():
        places: dict[str, None] = {}
        reasons: dict[str, None] = {}
        for text in texts:
            match = _PLACE.fullmatch(text)
            if match is None:
                reasons[text] = None
                continue
            places[relative_line(match["line"])] = None
            if match["why"]:
                reasons[match["why"]] = None
        rows.append(MissingRule(op, tuple(places), tuple(reasons)))
    return tuple(rows)


def _traceback(error: BaseException) -> str:
    lines = "".join(traceback.format_exception(error)).splitlines()
    if len(lines) > _LONGEST_TRACEBACK:
        left_out = f"… {len(lines) - _LONGEST_TRACEBACK} lines"
        lines = [*lines[:5], left_out, *lines[-(_LONGEST_TRACEBACK - 5) :]]
    return relative_trace("\n".join(lines))
