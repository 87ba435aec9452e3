"""``make models``: every architecture, each with a time limit; resumable, and in shards.

Each outcome is written to the folder as soon as it is there; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import subprocess
import sys
import threading
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.models.measure import KINDS, Architecture, Outcome, architectures

SECONDS = 480.0


class _Worker:
    """A process with its answers."""

    def __init__(self, peer: bool) -> None:
        command = [sys.executable, "-m", "tests.models.worker", *(["--peer"] if peer else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put(None)

    def ask(self, architecture: Architecture) -> Outcome:
        """The outcome; ``crash`` or ``timeout`` end the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(architecture) + "\n")
        self.process.stdin.flush()
        try:
            answer = self.answers.get(timeout=SECONDS)
        except queue.Empty:
            self.process.kill()
            return Outcome("timeout", f"no answer after {SECONDS:.0f} s")
        if answer is None:
            return Outcome("crash", f"the process ended with status {self.process.wait()}")
        return Outcome(**json.loads(answer))

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def run(chosen: list[Architecture], folder: Path, workers: int, peer: bool = False) -> dict[Architecture, Outcome]:
    """Measures the architectures of which the folder has no outcome.

    Args:
        chosen: The architectures.
        folder: Where outcomes are kept, a file each.
        workers: How many processes.
        peer: Measure ``torch.onnx.export``, not onnxplug.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[Architecture, Outcome] = {}
    pending: queue.Queue[Architecture] = queue.Queue()
    for architecture in chosen:
        file = _file(folder, architecture)
        if file.is_file():
            results[architecture] = _read(file)
        else:
            pending.put(architecture)

    def serve() -> None:
        worker = _Worker(peer)
        while True:
            try:
                architecture = pending.get_nowait()
            except queue.Empty:
                break
            outcome = results[architecture] = worker.ask(architecture)
            if outcome.status in ("crash", "timeout"):
                worker.stop()
                worker = _Worker(peer)
            _file(folder, architecture).write_text(json.dumps(vars(outcome)))
            print(
                f"{architecture.kind:8} {architecture.name:28} {outcome.status:8} {outcome.detail[:150]!r}", flush=True
            )
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {architecture: results[architecture] for architecture in chosen}


def _read(file: Path) -> Outcome:
    return Outcome(**json.loads(file.read_text()))


def _file(folder: Path, architecture: Architecture) -> Path:
    return folder / f"{architecture.kind}-{architecture.name}-{architecture.model}.json"


def main() -> None:
    """Measures, and prints counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS, default=[])
    parser.add_argument("--only", help="comma-separated model types and families")
    parser.add_argument("--shard", default="1/1", help="2/8: the second of eight parts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/models"))
    parser.add_argument("--peer", action="store_true", help="torch.onnx.export too, where onnxplug was measured")
    parser.add_argument("--write", type=Path, help="the file for the table: docs/models.md")
    parser.add_argument("--known", action="store_true", help="measure nothing; what has no outcome yet is unmeasured")
    options = parser.parse_args()
    number, of = map(int, options.shard.split("/"))
    names: Any = options.only.split(",") if options.only else None
    chosen = [a for a in architectures() if a.kind in (options.kind or KINDS) and (names is None or a.name in names)]
    chosen = chosen[number - 1 :: of]
    if options.known:
        files = {a: _file(options.out, a) for a in chosen}
        results = {a: _read(file) if file.is_file() else Outcome("unmeasured") for a, file in files.items()}
    else:
        results = run(chosen, options.out, options.workers)
    _print("onnxplug", results)
    known = options.out / "torch.onnx"
    peer = {a: _read(_file(known, a)) for a in results if _file(known, a).is_file()}
    if options.peer:
        measurable = [a for a in results if results[a].status not in _NOT_COUNTED]
        peer = run(measurable, known, options.workers, peer=True)
        _print("torch.onnx", peer)
    if options.write is not None:
        options.write.write_text(render(results, peer), encoding="utf-8")


def _print(name: str, results: dict[Architecture, Outcome]) -> None:
    counts = Counter(outcome.status for outcome in results.values())
    print(f"{name}: " + ", ".join(f"{status} {count}" for status, count in counts.most_common()))


#: Statuses of architectures that nothing is known of.
_NOT_COUNTED = ("unfit", "unmeasured")
#: What the ways round of :class:`~tests.models.measure.Outcome` mean to a reader.
_WAYS = {
    "plugins": "install `onnxplug-transformers` or `onnxplug-torchvision`",
    "static sizes": "static batch and lengths: leave out `dynamic_shapes`",
    "torch.jit.trace": "export `torch.jit.trace(model, ...)`; its branches are those of the example inputs",
}


#: What is left where none of them passed.
_OTHERWISE = {"capture": "export the modules that can be captured: `onnxplug.diagnose`, `pieces=`"}


def render(results: dict[Architecture, Outcome], peer: dict[Architecture, Outcome]) -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        f"Written by `make models`: architectures of transformers {version('transformers')}, each in a small configuration, one small model",
        f"of each of timm {version('timm')}'s families and of torchvision {version('torchvision')}'s, with random weights: captured once,",
        "exported, run by ONNX Runtime and compared with PyTorch on the export's sizes and on others. Batch and lengths are dynamic where",
        "the table does not say *static sizes*; images have the model's size.",
        "",
        "| kind | architectures | pass | by a way round | don't pass | torch.onnx: measured | pass | with static sizes | don't pass |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        chosen = [a for a in results if a.kind == kind and results[a].status not in _NOT_COUNTED]
        if chosen:
            others = [peer[a] for a in chosen if a in peer]
            counts = [*_counts([results[a] for a in chosen]), len(others), *_counts(others)]
            lines.append(f"| {kind} | {len(chosen)} | " + " | ".join(map(str, counts)) + " |")
    refused = [(a, o) for a, o in results.items() if o.status not in ("pass", "unmeasured") or o.way]
    lines += [
        "",
        "## What the plain call does not do",
        "",
        "The cause is torch.export's, or that of the code it traces. The way round is one that passed; ways that belong together are",
        "separated by commas. Architectures of status `unfit` are not counted above: no small model of them was made that runs in PyTorch;",
        "neither are those of status `unmeasured`.",
        "",
        "| architecture | result | way round | cause |",
        "|---|---|---|---|",
    ]
    for a, outcome in refused:
        way = (
            "; ".join(_WAYS[part] for part in outcome.way.split(", "))
            if outcome.way
            else _OTHERWISE.get(outcome.status, "")
        )
        lines.append(f"| {a.kind} {a.name} | {outcome.status} | {way} | {_cause(outcome.detail)} |")
    lines += [
        "",
        "## All",
        "",
        f"torch.onnx is `torch.onnx.export(dynamo=True)` of torch {version('torch').partition('+')[0]}, compared in the same way; a cell is empty where it was not measured.",
        "",
        "| kind | architecture | class or model | onnxplug | torch.onnx |",
        "|---|---|---|---|---|",
    ]
    for a, outcome in results.items():
        other = peer.get(a)
        lines.append(f"| {a.kind} | {a.name} | {a.model} | {_cell(outcome)} | {_cell(other) if other else ''} |")
    return "\n".join(lines) + "\n"


def _counts(outcomes: list[Outcome]) -> tuple[int, int, int]:
    """How many pass, pass by a way round, and don't pass."""
    passed = [outcome for outcome in outcomes if outcome.status == "pass"]
    plain = sum(not outcome.way for outcome in passed)
    return plain, len(passed) - plain, len(outcomes) - len(passed)


def _cause(detail: str) -> str:
    """The first sentence of an error, without this machine's paths."""
    text = re.sub(r"/\S*/site-packages/", "", " ".join(detail.split()))
    cut = text.partition(" Hint:")[0].partition(" Tried:")[0].replace("|", "\\|")[:240]
    return cut + "`" * (cut.count("`") % 2)


def _cell(outcome: Outcome) -> str:
    return outcome.status + (f", {outcome.way}" if outcome.way else "")


if __name__ == "__main__":
    main()
