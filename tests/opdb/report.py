"""``make opdb``: the whole database, and docs/coverage.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.opdb.expected import UNCAPTURED, expected, uncaptured
from tests.opdb.run import entry_status, key_of, make_tasks, run_all

#: float32 in depth; the others by two samples.
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64")
#: The opsets at which every fourth entry runs in float32; 26 is the newest that ONNX Runtime 1.31 loads.
OPSETS = (13, 15, 17, 18, 20, 23, 26)
OPSET_STEP = 4
SAMPLES = {"float32": 6}

Results = dict[str, list[dict[str, Any]]]


def plan() -> list[dict[str, Any]]:
    """Every task of the full run."""
    tasks = [t for dtype in DTYPES for t in make_tasks([dtype], [None], False, SAMPLES.get(dtype, 2))]
    tasks += make_tasks(["float32"], [None], True, 2)
    for opset in OPSETS:
        tasks += make_tasks(["float32"], [opset], False, 2)[::OPSET_STEP]
    return tasks


def surprises(tasks: list[dict[str, Any]], results: Results) -> list[str]:
    """Differences from the table of expectations, a line each."""
    lines = []
    for task in tasks:
        outcomes = results[key_of(task)]
        status = entry_status(outcomes)
        row = expected(task["name"], task["dtype"], task["opset"], task["dynamic"])
        why = uncaptured(task["name"], task["dtype"], task["dynamic"])
        if status == "unmeasurable":
            if why is None:
                lines.append(f"{key_of(task)}: torch or torch.export refuses every sample: {outcomes[:1]}")
        elif why is not None:
            lines.append(f"{key_of(task)}: can be captured; its row in UNCAPTURED can go ({why})")
        elif status == "pass":
            if row is not None and f"{task['name']}|" not in row[1]:
                lines.append(f"{key_of(task)}: passes, but {row[0]!r} is expected ({row[1]})")
        elif row is None or row[0] != status:
            first = next(o for o in outcomes if o["status"] == status)
            lines.append(f"{key_of(task)}: {status} at sample {first['sample']}: {first['detail'][:200]}")
    return lines


def figures(results: Results) -> list[tuple[str, int, int, int, int]]:
    """For each kind of run: its name, entries passed, measurable, passed with ``onnxplug.reference``, unmeasurable."""
    kinds: dict[str, Counter[str]] = {}
    for key, outcomes in results.items():
        kind = key.split("|", 1)[1]
        counts = kinds.setdefault(kind, Counter())
        status = entry_status(outcomes)
        counts[status] += 1
        if status == "pass":
            counts["reference"] += any(o["status"] == "pass-reference" for o in outcomes)
    rows = []
    for kind, counts in kinds.items():
        dtype, opset, dynamic = kind.split("|")
        name = dtype + (f", opset {opset}" if opset else "") + (", dynamic dimensions" if dynamic else "")
        measurable = sum(n for s, n in counts.items() if s not in ("unmeasurable", "reference"))
        rows.append((name, counts["pass"], measurable, counts["reference"], counts["unmeasurable"]))
    return rows


def render(results: Results) -> str:
    """docs/coverage.md."""
    release = ".".join(torch.__version__.split(".")[:2])
    lines = [
        "# Operators",
        "",
        f"Written by `make opdb`: every entry of torch's operator database (`op_db` of torch {release}), captured, exported, run",
        "by ONNX Runtime and compared with eager PyTorch in dtype, shape and value. An entry passes when all its measured",
        "samples do. Entries that torch or `torch.export` itself refuses are not measurable; they are listed at the end. Where ONNX Runtime has no",
        "kernel for the dtype on the CPU, `onnxplug.reference` runs the model.",
        "",
        "| run | pass | measurable | share | of them by `onnxplug.reference` | not measurable |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, passed, measurable, reference, rest in figures(results):
        share = 100 * passed / max(measurable, 1)
        lines.append(f"| {name} | {passed} | {measurable} | {share:.1f} % | {reference} | {rest} |")
    lines += [
        "",
        "Complex tensors enter and leave a model as real ones with a last axis of size 2, as `torch.view_as_real` makes them.",
        "",
        "## Every entry",
        "",
        "The column *by* says whether the entry has a rule of its own, or torch decomposes it into operators that have rules.",
        "",
        "| entry | passes in | opset | by | what does not pass |",
        "|---|---|---|---|---|",
    ]
    names = sorted({key.split("|")[0] for key in results})
    lines += [_row(name, results) for name in names]
    lines += ["", *_uncaptured()]
    return "\n".join(lines) + "\n"


def _uncaptured() -> list[str]:
    """The section of the entries that are not measured."""
    return [
        "## What torch does not capture",
        "",
        f"{len(UNCAPTURED)} rows, for entries of which eager torch or `torch.export` refuses every sample. The tests fail when",
        "one of them can be captured, and when another entry can't.",
        "",
        "| entry | why |",
        "|---|---|",
        *(f"| {_entry(key)} | {why} |" for key, why in sorted(UNCAPTURED.items())),
    ]


def _entry(key: str) -> str:
    name, _, rest = key.partition("|")
    return f"`{name}`" + (f", {rest.replace('|dynamic', 'dynamic dimensions')}" if rest else "")


def _row(name: str, results: Results) -> str:
    passed, failed, how, opsets = [], [], "", []
    for dtype in DTYPES:
        outcomes = results.get(f"{name}|{dtype}||")
        if outcomes is None:
            continue
        status = entry_status(outcomes)
        if status == "pass":
            passed.append(dtype)
            how = how or next(o["how"] for o in outcomes)
        elif status != "unmeasurable":
            row = expected(name, dtype, None, False)
            failed.append((dtype, row[1] if row is not None else status))
    for opset in OPSETS:
        outcomes = results.get(f"{name}|float32|{opset}|")
        if outcomes is not None and entry_status(outcomes) not in ("pass", "unmeasurable"):
            row = expected(name, "float32", opset, False)
            opsets.append(f"not {opset}" + (f" ({row[1]})" if row is not None else ""))
    dynamic = results.get(f"{name}|float32||dynamic")
    if dynamic is not None and entry_status(dynamic) not in ("pass", "unmeasurable"):
        row = expected(name, "float32", None, True)
        failed.append(("dynamic dimensions", row[1] if row is not None else entry_status(dynamic)))
    reasons: dict[str, list[str]] = {}
    for dtype, reason in failed:
        reasons.setdefault(reason, []).append(dtype)
    text = "; ".join(f"{', '.join(kinds)}: {reason}" for reason, kinds in reasons.items())
    if not passed and not failed:
        text = f"not measurable: {uncaptured(name, 'float32', False) or 'torch or torch.export refuses it'}"
    return f"| `{name}` | {', '.join(passed)} | {'; '.join(opsets) or '13–26'} | {how} | {text.replace('|', '/')} |"


def main() -> int:
    """Runs everything; 1 when something differs from the table of expectations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/opdb.json"))
    parser.add_argument("--render-only", action="store_true", help="from the outcomes of an earlier run")
    options = parser.parse_args()
    tasks = plan()
    if options.render_only:
        results = json.loads(options.out.read_text(encoding="utf-8"))
    else:
        print(
            f"==> {len(tasks)} entries in {len(DTYPES)} dtypes, with dynamic dimensions, at {len(OPSETS)} more opsets"
        )
        started = time.perf_counter()
        results = run_all(tasks, 2)
        print(f"==> {time.perf_counter() - started:.0f} s")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=0, sort_keys=True), encoding="utf-8")
    Path("docs/coverage.md").write_text(render(results), encoding="utf-8")
    for row in figures(results):
        print(
            f"{row[0]:32} {row[1]:4} of {row[2]:4} ({100 * row[1] / max(row[2], 1):.1f} %), {row[3]} by onnxplug.reference"
        )
    lines = surprises(tasks, results)
    print("\n".join(lines))
    print(f"{len(lines)} surprises; docs/coverage.md is written")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
