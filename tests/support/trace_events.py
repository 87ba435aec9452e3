"""The Trace Event Format."""

from __future__ import annotations

from typing import Any

from onnxplug.observers import KINDS

#: The keys of the Trace Event Format for the phases that are used, each with its type. All are required.
EVENTS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {
        "name": str,
        "cat": str,
        "ph": str,
        "ts": (int, float),
        "dur": (int, float),
        "pid": int,
        "tid": int,
        "args": dict,
    },
    "M": {"name": str, "ph": str, "ts": (int, float), "pid": int, "tid": int, "args": dict},
}


def check_trace(trace: Any) -> list[dict[str, Any]]:
    """Checks an object against the format; returns its complete events."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    complete = []
    for event in trace["traceEvents"]:
        fields = EVENTS[event["ph"]]
        assert event.keys() == fields.keys()
        for key, kind in fields.items():
            assert isinstance(event[key], kind), (key, event)
            assert not isinstance(event[key], bool)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            assert event["cat"] in KINDS
            complete.append(event)
    # One thread's events lie within each other or apart: sorted by beginning, each ends before the open event.
    assert len({(event["pid"], event["tid"]) for event in complete}) <= 1
    assert [event["ts"] for event in complete] == sorted(event["ts"] for event in complete)
    ends: list[float] = []
    for event in complete:
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + 1e-3, event  # times are in microseconds, measured in nanoseconds
        ends.append(end)
    return complete
