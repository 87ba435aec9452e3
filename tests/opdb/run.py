"""``python -m tests.opdb.run``: the operator database in worker processes, each sample surviving the others' crashes."""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from onnxplug.cli.options import parse_runtime
from tests.opdb.measure import GOOD, UNMEASURABLE, Outcome

SECONDS_PER_SAMPLE = 90


class Worker:
    """A measuring process and a thread that reads its answers."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.opdb.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        self.answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(json.loads(line))
        self.answers.put(None)

    def send(self, task: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run_task(worker: Worker, task: dict[str, Any]) -> tuple[Worker, list[dict[str, Any]]]:
    """Measures all samples of one entry; a crashed or hanging worker is replaced and goes on at the next sample."""
    results: list[dict[str, Any]] = []
    worker.send(task)
    current = task["first"]
    # The first answer waits for torch to be imported.
    while True:
        try:
            answer = worker.answers.get(timeout=SECONDS_PER_SAMPLE)
            status = "crash"
        except queue.Empty:
            answer, status = None, "timeout"
        if answer is None:
            worker.stop()
            worker = Worker()
            results.append({"sample": current, **vars(Outcome(status))})
            task = {**task, "first": current + 1}
            worker.send(task)
            current += 1
        elif "start" in answer:
            current = answer["start"]
        elif "done" in answer:
            return worker, results
        else:
            results.append(answer)


def run_all(tasks: list[dict[str, Any]], workers: int, quiet: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Task key (``name|dtype|opset|dynamic``) to its samples' outcomes."""
    pending: queue.Queue[dict[str, Any]] = queue.Queue()
    for task in tasks:
        pending.put(task)
    results: dict[str, list[dict[str, Any]]] = {}
    started = time.perf_counter()

    def serve() -> None:
        worker = Worker()
        while True:
            try:
                task = pending.get_nowait()
            except queue.Empty:
                break
            worker, outcomes = run_task(worker, task)
            results[key_of(task)] = outcomes
            if not quiet and len(results) % 100 == 0:
                print(f"  {len(results)}/{len(tasks)} entries, {time.perf_counter() - started:.0f} s", flush=True)
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def key_of(task: dict[str, Any]) -> str:
    """The key of a task in the results."""
    return f"{task['name']}|{task['dtype']}|{task['opset'] or ''}|{'dynamic' if task['dynamic'] else ''}"


def make_tasks(
    dtypes: list[str], opsets: list[int | None], dynamic: bool, count: int, only: str | None = None
) -> list[dict[str, Any]]:
    """The tasks for every entry that has the dtype."""
    import torch

    from tests.opdb.measure import entries

    tasks = []
    for dtype in dtypes:
        for opset in opsets:
            for name, op in entries().items():
                if only is not None and only not in name.split(",") and not any(o == name for o in only.split(",")):
                    continue
                if op.supports_dtype(getattr(torch, dtype), "cpu"):
                    tasks.append(
                        {"name": name, "dtype": dtype, "opset": opset, "dynamic": dynamic, "count": count, "first": 0}
                    )
    return tasks


def entry_status(outcomes: list[dict[str, Any]]) -> str:
    """``pass`` when every measurable sample passes, else the first failure's status; ``unmeasurable`` when none is."""
    measured = [o for o in outcomes if o["status"] not in UNMEASURABLE]
    if not measured:
        return "unmeasurable"
    bad = [o["status"] for o in measured if o["status"] not in GOOD]
    return bad[0] if bad else "pass"


def summary(results: dict[str, list[dict[str, Any]]]) -> str:
    """Counts by dtype."""
    lines = []
    by_kind: dict[str, Counter[str]] = {}
    for key, outcomes in results.items():
        by_kind.setdefault(key.split("|", 1)[1], Counter())[entry_status(outcomes)] += 1
    for kind, counts in by_kind.items():
        measurable = sum(n for status, n in counts.items() if status != "unmeasurable")
        share = 100 * counts["pass"] / max(measurable, 1)
        rest = ", ".join(f"{s} {n}" for s, n in counts.most_common() if s != "pass")
        lines.append(f"{kind}: {counts['pass']} of {measurable} measurable ({share:.1f} %); {rest}")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the summary, writes the outcomes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--opset", type=int, action="append", default=[])
    parser.add_argument("--dynamic", action="store_true")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--target", help="none: portable ONNX, run by the reference")
    parser.add_argument("--only", help="comma-separated entry names")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/opdb.json"))
    options = parser.parse_args()
    tasks = make_tasks(
        options.dtype or ["float32"], options.opset or [None], options.dynamic, options.samples, options.only
    )
    if options.target is not None:
        tasks = [{**task, "target": parse_runtime(options.target)} for task in tasks]
    results = run_all(tasks, options.workers)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=0, sort_keys=True))
    for key in sorted(results):
        status = entry_status(results[key])
        if status not in ("pass", "unmeasurable"):
            first = next(o for o in results[key] if o["status"] == status)
            print(f"{key:55} {status:12} #{first['sample']} {first['detail'][:200]}")
    print(summary(results))
    seconds = sum(o["conversion_seconds"] for outcomes in results.values() for o in outcomes)
    print(f"conversion of all samples: {seconds:.2f} s")


if __name__ == "__main__":
    main()
