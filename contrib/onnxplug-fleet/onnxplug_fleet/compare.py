"""The differences between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onnxplug_fleet.state import Run
from onnxplug_fleet.text import bytes_text, change_text, counts_text, seconds_text

#: A relative change of a latency that is no larger than this is noise.
_NOISE = 0.25


@dataclass(frozen=True)
class Row:
    """A job in two runs.

    Attributes:
        before, now: Its results; ``None`` where a run does not have the job, or has not done it.
        changes: The differences, a few words each.
    """

    name: str
    before: Mapping[str, Any] | None
    now: Mapping[str, Any] | None
    changes: tuple[str, ...]


def compared(before: Run | None, now: Run) -> Iterator[Row]:
    """Every job of two runs, the second run's jobs first.

    Args:
        before: The first run; ``None`` where there is none.
    """
    earlier: Mapping[str, Any] = before.results if before is not None else {}
    for name in [*now.results, *(n for n in earlier if n not in now.results)]:
        one, other = earlier.get(name), now.results.get(name)
        yield Row(name, one, other, tuple(_changes(name, one, other, now) if before is not None else ()))


def _changes(name: str, one: Mapping[str, Any] | None, other: Mapping[str, Any] | None, now: Run) -> Iterator[str]:
    if one is None or other is None:
        yield "is new" if one is None else "is gone" if name not in now.results else "is not done"
        return
    if _state(one) != _state(other):
        yield f"{_state(one)} → {_state(other)}"
    for what in ("operators", "rules"):
        yield from (f"{what}: {text}" for text in counts_text(one.get(what, {}), other.get(what, {})))
    for what, words in (("size", bytes_text), ("latency", seconds_text)):
        text = change_text(one.get(what), other.get(what))
        if text and (what != "latency" or abs(other[what] / one[what] - 1) > _NOISE):
            yield f"{what}: {words(one[what])} → {words(other[what])} ({text})"
    if one.get("difference") != other.get("difference"):
        yield f"difference: {number_text(one.get('difference'))} → {number_text(other.get('difference'))}"
    scores = {row["metric"]: row["value"] for row in one.get("data", ())}
    for row in other.get("data", ()):
        if row["metric"] in scores and scores[row["metric"]] != row["value"]:
            yield f"{row['metric']}: {scores[row['metric']]:.6g} → {row['value']:.6g}"


def _state(result: Mapping[str, Any]) -> str:
    return "exported" if result["status"] == "unchanged" else str(result["status"])


def number_text(value: float | None) -> str:
    """A difference as text."""
    return "none" if value is None else f"{value:.1e}" if value else "0"
