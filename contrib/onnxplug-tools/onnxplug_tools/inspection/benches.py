"""Measurements as rows of tables, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxplug_tools.inspection.bench import Bench, Measured, Timing
from onnxplug_tools.inspection.ort_profile import Profile, Spent
from onnxplug_tools.inspection.pages import page
from onnxplug_tools.inspection.words import time_text

#: Colours of bars, which repeat.
_COLOURS = ("#3b82c4", "#c4563b", "#3b9c5f", "#b98a2f", "#8a5fb4", "#3fa3a3", "#c45c93", "#7c8794")


def setting(bench: Bench) -> str:
    """The inputs, threads and providers of a measurement, in a line."""
    inputs = ", ".join(f"{name} {text}" for name, text in bench.inputs.items())
    providers = ", ".join(name.removesuffix("ExecutionProvider") for name in bench.providers)
    threads = "threads as the runtimes choose" if bench.threads is None else f"threads: {bench.threads}"
    assumed = f"; taken as 1, for want of --sizes: {', '.join(bench.assumed)}" if bench.assumed else ""
    return f"inputs: {inputs or 'none'}; {threads}; {providers}{assumed}"


def timing_rows(bench: Bench) -> list[tuple[str, ...]]:
    """For each model: median, 10th and 90th percentile, ratio to the first, runs, seconds of loading."""
    rows = [(*_times(model.timing), time_text(model.loading)) for model in bench.models]
    if bench.eager is not None:
        rows.append((*_times(bench.eager), ""))
    return rows


def _times(timing: Timing) -> tuple[str, ...]:
    times = (time_text(seconds) for seconds in (timing.median, timing.p10, timing.p90))
    return (timing.name, *times, f"{timing.ratio:.2f}", str(timing.runs))


def notes(bench: Bench) -> list[str]:
    """Remarks on the tables: time in nodes that correspond to no module."""
    texts = []
    for model in bench.models:
        if model.profile is not None and model.profile.unmapped:
            names = ", ".join(spent.name for spent in model.profile.unmapped[:5])
            share = sum(spent.share for spent in model.profile.unmapped)
            texts.append(
                f"{model.timing.name}: {share:.0%} of the time is in nodes that correspond to no module, as ONNX Runtime made "
                f"them or they have no name: {names}{' …' if len(model.profile.unmapped) > 5 else ''}"
            )
    return texts


def spent_row(spent: Spent) -> tuple[str, ...]:
    """Name, calls, time and share."""
    return spent.name, f"{spent.calls:g}", time_text(spent.seconds), f"{spent.share:.1%}"


def module_times(profile: Profile, depth: int) -> list[Spent]:
    """Time by module down to a depth, the time in modules within included; the model itself comes first."""
    calls: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for spent in profile.modules:
        parts = spent.name.split(".") if spent.name else []
        for level in range(min(len(parts), depth) + 1):
            path = ".".join(parts[:level])
            calls[path] = calls.get(path, 0) + spent.calls
            seconds[path] = seconds.get(path, 0.0) + spent.seconds
    total = profile.in_nodes
    return [Spent(path, calls[path], seconds[path], seconds[path] / total if total else 0.0) for path in seconds]


def operator_changes(model: Measured) -> list[tuple[str, int, int]]:
    """Operators of the file and of the graph that ONNX Runtime runs, where their numbers differ."""
    after = model.profile.optimized if model.profile is not None else None
    if after is None:
        return []
    names = dict.fromkeys((*model.operators, *after))
    pairs = [(name, model.operators.get(name, 0), after.get(name, 0)) for name in names]
    return [pair for pair in pairs if pair[1] != pair[2]]


def to_html(bench: Bench, title: str) -> str:
    """A page with the measurements, and bars of the time by operator."""
    import onnxplug

    profiled = [model for model in bench.models if model.profile is not None]
    operators = dict.fromkeys(spent.name for model in profiled if model.profile for spent in model.profile.operators)
    colours = {name: _COLOURS[position % len(_COLOURS)] for position, name in enumerate(operators)}
    timings = [*(model.timing for model in bench.models), *([bench.eager] if bench.eager is not None else [])]
    return page(
        "bench.html.jinja",
        {
            "title": title,
            "version": onnxplug.__version__,
            "bench": bench,
            "setting": setting(bench),
            "notes": notes(bench),
            "rows": timing_rows(bench),
            "boxes": _boxes(timings),
            "colours": colours,
            "profiled": profiled,
            "longest": max((model.profile.in_nodes for model in profiled if model.profile), default=0.0) or 1.0,
            "spent_row": spent_row,
            "module_times": module_times,
            "operator_changes": operator_changes,
        },
    )


def _boxes(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """Where the bars of latency begin and end, in percent of the longest."""
    # A single slow run would make all bars small.
    longest = min(max(t.p90 for t in timings), 2 * max(t.median for t in timings)) or 1.0
    return [
        {
            "name": timing.name,
            "median": 100 * timing.median / longest,
            "start": 100 * timing.p10 / longest,
            "width": max(0.2, 100 * (min(timing.p90, longest) - timing.p10) / longest),
        }
        for timing in timings
    ]
