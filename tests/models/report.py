"""``make models``: every architecture, each with a time limit; resumable, and in shards.

Each outcome is a line of ``tests/models/outcomes``, written as soon as it is known; an architecture that has one is not measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from tests.models.faults import fault
from tests.models.libraries import OTHERS, PROJECTS, install
from tests.models.lists import LISTS
from tests.models.measure import EXPORTERS, KINDS, TABLES, Architecture, Outcome, architectures

#: Seconds of processor time for an architecture with all ways round, and of waiting for an answer on a loaded machine.
SECONDS, WAITING = 120.0, 2400.0
#: The number of architectures that are measured again for the pace of the machine, and the seconds that each took.
PACEMAKERS, SHORT = 16, (2.0, 5.0)
#: The outcomes that docs/models.md shows.
OUTCOMES = Path(__file__).with_name("outcomes")


class _Worker:
    """A measuring process, and its answers."""

    def __init__(self, exporter: str, limit: float) -> None:
        self.limit = limit
        command = [sys.executable, "-m", "tests.models.worker", exporter]
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
        """The outcome of an architecture; ``crash`` and ``timeout`` end the process."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(architecture) + "\n")
        self.process.stdin.flush()
        started, waited = _processor_time(self.process.pid), 0.0
        while True:
            try:
                answer = self.answers.get(timeout=1)
                break
            except queue.Empty:
                waited += 1
            if _processor_time(self.process.pid) - started > self.limit or waited > WAITING:
                self.process.kill()
                return Outcome("timeout", f"no answer after {SECONDS:.0f} s of processor time")
        if answer is None:
            return Outcome("crash", f"the process ended with status {self.process.wait()}")
        return Outcome(**json.loads(answer))

    def stop(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()


def _processor_time(pid: int) -> float:
    """The processor time of a process in seconds; 0 where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(
    chosen: list[Architecture],
    folder: Path,
    workers: int,
    exporter: str = "onnxplug",
    until: float = math.inf,
    again: bool = False,
    pace: float = 1.0,
) -> dict[Architecture, Outcome]:
    """Measures the architectures of which the folder has no outcome, in ascending order of their expected time.

    Args:
        chosen: The architectures.
        folder: Where outcomes are kept, a file for each exporter.
        workers: The number of processes.
        exporter: One of :data:`tests.models.measure.EXPORTERS`.
        until: No measurement begins after this time of ``time.monotonic``.
        again: Measure also the architectures whose outcome is of another commit.
        pace: :func:`measure_pace`, by which seconds are divided.

    Returns:
        The outcomes that are known.
    """
    results, commit = read(folder, exporter), _commit()
    absent = [a for a in chosen if a not in results or (again and results[a].commit != commit)]
    pending: queue.Queue[Architecture] = queue.Queue()
    for architecture in sorted(absent, key=_expected(results)):
        pending.put(architecture)
    folder.mkdir(parents=True, exist_ok=True)
    lines = _file(folder, exporter).open("a", encoding="utf-8", buffering=1)

    limit = SECONDS * pace

    def serve() -> None:
        worker = _Worker(exporter, limit)
        while time.monotonic() < until:
            try:
                architecture = pending.get_nowait()
            except queue.Empty:
                break
            outcome = results[architecture] = worker.ask(architecture)
            if outcome.status in ("crash", "timeout"):
                worker.stop()
                worker = _Worker(exporter, limit)
            outcome.commit, outcome.seconds = commit, outcome.seconds / pace
            lines.write(_line(architecture, outcome))
            print(
                f"{architecture.kind:8} {architecture.name:28} {outcome.status:8} {outcome.detail[:150]!r}", flush=True
            )
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(workers)]
    with lines:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return {architecture: results[architecture] for architecture in chosen if architecture in results}


def measure_pace(known: Mapping[Architecture, Outcome], workers: int) -> float:
    """The seconds in which this machine does what takes a second where outcomes were measured before.

    It is the median over some architectures that are measured again: the seconds of one table are then comparable, although
    its rows are of several machines. Measured with a peer, which no commit of onnxplug changes; 1.0 where nothing is known.

    Args:
        known: The outcomes of torch.onnx.
        workers: The number of processes, as many as the measurement has.
    """
    short = sorted(
        a
        for a, o in known.items()
        if a.kind in TABLES and o.status == "pass" and not o.way and SHORT[0] < o.seconds < SHORT[1]
    )
    chosen = short[:: max(1, len(short) // PACEMAKERS)][:PACEMAKERS]
    with tempfile.TemporaryDirectory() as folder:
        measured = run(chosen, Path(folder), workers, "torch.onnx")
    ratios = [outcome.seconds / known[a].seconds for a, outcome in measured.items() if outcome.seconds]
    if len(ratios) < 2:
        return 1.0
    low, pace, high = quantiles(ratios)
    print(
        f"pace of this machine: {pace:.2f} (quartiles {low:.2f} to {high:.2f} of {len(ratios)} architectures)",
        flush=True,
    )
    return pace


def _expected(results: dict[Architecture, Outcome]) -> Callable[[Architecture], float]:
    """The expected time of an architecture: the mean of the known times of its name, else of its kind, else of all."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for a, outcome in results.items():
        for key in (a.name, a.kind, ""):
            seconds[key].append(outcome.seconds or SECONDS)

    def expected(a: Architecture) -> float:
        return next((mean(seconds[key]) for key in (a.name, a.kind, "") if seconds[key]), 0.0)

    return expected


def read(folder: Path, exporter: str) -> dict[Architecture, Outcome]:
    """The outcomes of a folder; the last line of an architecture counts."""
    file = _file(folder, exporter)
    results: dict[Architecture, Outcome] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        fields = json.loads(line)
        architecture = Architecture(*fields.pop("architecture"))
        results[architecture] = Outcome(**fields)
    return results


def write(folder: Path, exporter: str, results: Mapping[Architecture, Outcome]) -> None:
    """Makes the file of an exporter's outcomes anew, in the order of the architectures."""
    if results:
        folder.mkdir(parents=True, exist_ok=True)
        _file(folder, exporter).write_text("".join(_line(a, o) for a, o in results.items()), encoding="utf-8")


def _line(architecture: Architecture, outcome: Outcome) -> str:
    fields = {name: value for name, value in asdict(outcome).items() if value}
    return json.dumps({"architecture": architecture, **fields}) + "\n"


def _file(folder: Path, exporter: str) -> Path:
    return folder / f"{exporter}.jsonl"


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    """Measures, and prints counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=KINDS, default=[])
    parser.add_argument("--only", help="comma-separated model types and families")
    parser.add_argument("--shard", default="1/1", help="2/8: the second of eight parts")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin none after so long; the next run goes on"
    )
    parser.add_argument("--out", type=Path, default=OUTCOMES)
    parser.add_argument("--again", action="store_true", help="measure anew what another commit's outcome is known of")
    parser.add_argument(
        "--peer", action="append", choices=EXPORTERS[1:], default=[], help="this one too, where onnxplug was measured"
    )
    parser.add_argument("--write", type=Path, help="the file for the table: docs/models.md")
    parser.add_argument("--known", action="store_true", help="measure nothing; what has no outcome yet is unmeasured")
    options = parser.parse_args()
    number, of = map(int, options.shard.split("/"))
    names: Any = options.only.split(",") if options.only else None
    everything = list(architectures())
    chosen = [a for a in everything if a.kind in (options.kind or KINDS) and (names is None or a.name in names)]
    chosen = chosen[number - 1 :: of]
    until = time.monotonic() + 60 * options.minutes
    pace = 1.0 if options.known else measure_pace(read(options.out, "torch.onnx"), options.workers)
    if not options.known:
        absent = _absent({a.kind for a in chosen})
        measurable = [a for a in chosen if a.kind not in absent]
        run(measurable, options.out, options.workers, until=until, again=options.again, pace=pace)
    known = read(options.out, "onnxplug")
    results = {a: known.get(a, Outcome("unmeasured")) for a in chosen}
    _print("onnxplug", results)
    peers: dict[str, dict[Architecture, Outcome]] = {}
    for name in EXPORTERS[1:]:
        if name in options.peer:
            measurable = [a for a in results if results[a].status not in _NOT_COUNTED and _takes(name, a)]
            run(measurable, options.out, options.workers, name, until, pace=pace)
        others = read(options.out, name)
        peers[name] = {a: others[a] for a in results if a in others}
        _print(name, peers[name])
    if options.write is not None:
        for name in EXPORTERS:
            outcomes = read(options.out, name)
            write(options.out, name, {a: outcomes[a] for a in everything if a in outcomes})
        options.write.write_text(render(results, peers), encoding="utf-8")


def _absent(kinds: set[str]) -> set[str]:
    """The kinds whose library is not in its folder and can't be fetched."""
    absent = {kind for kind in OTHERS if kind in kinds and not install(kind)}
    for kind in sorted(absent):
        print(f"{kind} is left out: its library was not installed into out/models-packages (pip's error is above)")
    return absent


def _takes(exporter: str, architecture: Architecture) -> bool:
    """Whether an exporter takes an architecture."""
    return exporter != "OnnxExporter" or architecture.kind in TABLES


def _print(name: str, results: dict[Architecture, Outcome]) -> None:
    counts = Counter(outcome.status for outcome in results.values())
    print(f"{name}: " + ", ".join(f"{status} {count}" for status, count in counts.most_common()))


#: Statuses of architectures without a result.
_NOT_COUNTED = ("unfit", "unmeasured")
#: The ways round of :class:`~tests.models.measure.Outcome`, as advice to a reader.
_WAYS = {
    "plugins": "install `onnxplug-transformers`, `-torchvision`, `-diffusers` or `-kornia`",
    "static sizes": "static batch and lengths: leave out `dynamic_shapes`",
    "static batch": "a static batch",
    "static height and width": "images of one size",
    "sizes of images as numbers": "give `image_sizes` as a list of Python's numbers",
    "torch.jit.trace": "export `torch.jit.trace(model, ...)`; its branches are those of the example inputs",
}


#: Advice where no way round passed.
_OTHERWISE = {"capture": "export the modules that can be captured: `onnxplug.diagnose`, `pieces=`"}


def render(results: dict[Architecture, Outcome], peers: dict[str, dict[Architecture, Outcome]]) -> str:
    """docs/models.md.

    Args:
        peers: By exporter, its known outcomes.
    """
    commits = Counter(o.commit or "not kept" for o in results.values() if o.status != "unmeasured")
    wide = sum("height" in outcome.dynamic for outcome in results.values())
    lines = [
        "# Models",
        "",
        f"Written by `make models`: architectures of transformers {version('transformers')}, each in a small configuration, one small model",
        f"of each of timm {version('timm')}'s families and of torchvision {version('torchvision')}'s, and models and modules of",
        ", ".join(project.replace("==", " ") for projects in PROJECTS.values() for project in projects[:1]) + ",",
        "with random weights: captured once, exported, run by ONNX Runtime and compared with PyTorch on the export's sizes and on others.",
        "Batch and lengths are dynamic where the table does not say *static*; so are heights and widths of images where PyTorch itself takes",
        f"the model's images in other sizes ({wide} of those measured). A list of results with one tensor for each image is left out where",
        f"the batch can be dynamic without it ({', '.join(LISTS)}).",
        f"Commits of onnxplug's outcomes: {', '.join(f'{commit} ({count})' for commit, count in commits.most_common())}.",
        "",
        "| kind | architectures | pass | by a way round | don't pass | torch.onnx: measured | pass | with static sizes | don't pass"
        " | OnnxExporter: measured | pass | with static sizes | don't pass |",
        "|" + "---|" * 13,
    ]
    for kind in KINDS:
        chosen = [a for a in results if a.kind == kind and results[a].status not in _NOT_COUNTED]
        if chosen:
            counts = list(_counts([results[a] for a in chosen]))
            for peer in EXPORTERS[1:]:
                others = [peers[peer][a] for a in chosen if a in peers[peer]]
                counts += [len(others), *_counts(others)]
            lines.append(f"| {kind} | {len(chosen)} | " + " | ".join(map(str, counts)) + " |")
    refused = [(a, o) for a, o in results.items() if o.status not in ("pass", "unmeasured") or o.way]
    lines += [
        "",
        "## What the plain call does not do",
        "",
        "The way round is one that passed; ways that belong together are separated by commas. *At fault* is what the error comes from.",
        "Architectures of status `unfit` are not counted above: no small model of them was made that runs in PyTorch;",
        "neither are those of status `unmeasured`.",
        "",
        "| architecture | result | way round | at fault | cause |",
        "|---|---|---|---|---|",
    ]
    for a, outcome in refused:
        way = (
            "; ".join(_WAYS[part] for part in outcome.way.split(", "))
            if outcome.way
            else _OTHERWISE.get(outcome.status, "")
        )
        lines.append(
            f"| {a.kind} {a.name} | {outcome.status} | {way} | {fault(outcome, 'onnxplug')} | {_cause(outcome.detail)} |"
        )
    for peer in EXPORTERS[1:]:
        lines += _beside(peer, results, peers[peer])
    lines += [
        "",
        "## All",
        "",
        f"torch.onnx is `torch.onnx.export(dynamo=True)` of torch {version('torch').partition('+')[0]}, OnnxExporter that of transformers, with `dynamic=True`;",
        "both are compared in the same way. Seconds are those of the export, divided by the pace of",
        "its machine: what torch.onnx takes there for some of these models, over what it took before. Nodes are those of the whole",
        "model, with its subgraphs and functions; in brackets is what a failure comes from. A cell is empty where it was not measured.",
        "",
        "| kind | architecture | class or model | onnxplug | s | nodes | torch.onnx | s | nodes | OnnxExporter | s | nodes |",
        "|" + "---|" * 12,
    ]
    for a, outcome in results.items():
        found = [outcome, *(peers[peer].get(a) for peer in EXPORTERS[1:])]
        cells = [cell for name, one in zip(EXPORTERS, found, strict=True) for cell in _cells(one, name)]
        lines.append(f"| {a.kind} | {a.name} | {a.model} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _beside(exporter: str, results: dict[Architecture, Outcome], others: dict[Architecture, Outcome]) -> list[str]:
    """The classes in which another exporter does more than onnxplug, and the times of the classes that both export."""
    both = [(a, results[a], other) for a, other in others.items() if results[a].status == other.status == "pass"]
    timed = [pair for pair in both if pair[1].seconds and pair[2].seconds]
    if not both:
        return []
    alone = [
        f"{a.kind} {a.name}" for a, other in others.items() if other.status == "pass" and results[a].status != "pass"
    ]
    dynamic = [f"{a.kind} {a.name}" for a, ours, other in both if "static" in ours.way and "static" not in other.way]
    slower = [
        f"{a.kind} {a.name} ({ours.seconds:.1f} s for {other.seconds:.1f})"
        for a, ours, other in timed
        if ours.seconds > other.seconds
    ]
    rows = {
        f"{exporter} alone exports": alone,
        f"dynamic with {exporter} alone": dynamic,
        "slower with onnxplug": slower,
    }
    ours, theirs = (sum(pair[index].seconds for pair in timed) for index in (1, 2))
    return [
        "",
        f"## Beside {exporter}",
        "",
        f"Both export {len(both)} of the {len(others)} that were measured; {len(timed)} with seconds of both: onnxplug in {ours:.0f} s, "
        f"{exporter} in {theirs:.0f} s.",
        "",
        "| | number | which |",
        "|---|---|---|",
        *(f"| {text} | {len(which)} | {', '.join(which)} |" for text, which in rows.items()),
    ]


def _counts(outcomes: list[Outcome]) -> tuple[int, int, int]:
    """The numbers of outcomes that pass, that pass by a way round, and that don't pass."""
    passed = [outcome for outcome in outcomes if outcome.status == "pass"]
    plain = sum(not outcome.way for outcome in passed)
    return plain, len(passed) - plain, len(outcomes) - len(passed)


def _cause(detail: str) -> str:
    """The first sentence of an error, without this machine's paths."""
    text = re.sub(r"/\S*/(?:site-packages|models-packages/\w+)/", "", " ".join(detail.split()))
    cut = text.partition(" Hint:")[0].partition(" Tried:")[0].replace("|", "\\|")[:240]
    return cut + "`" * (cut.count("`") % 2)


def _cells(outcome: Outcome | None, exporter: str) -> tuple[str, str, str]:
    """The cells of the table: result, seconds and nodes."""
    if outcome is None:
        return "", "", ""
    text = outcome.status + (f", {outcome.way}" if outcome.way else "")
    if outcome.status not in ("pass", *_NOT_COUNTED) and (words := fault(outcome, exporter)):
        text += f" ({words})"
    return text, f"{outcome.seconds:.1f}" if outcome.seconds else "", str(outcome.nodes or "")


if __name__ == "__main__":
    main()
