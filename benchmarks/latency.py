"""ONNX Runtime's latency of onnxplug's models against torch.onnx's, in turns within one process, on one thread.

``make latency`` prints the table. A run's cost is the processor time of its thread, so that what else runs on the
machine counts for little; a model's is the second decile of its runs. Sessions take turns at every run, each round in another
order. torch.onnx's files and the captured programs are kept in ``out/latency`` (``--fresh`` makes them anew).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import onnx
import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch.utils import _pytree

import onnxplug
from benchmarks.latency_models import LATENCY, TRANSFORMERS
from tests.support.contrib import plugged
from tests.support.zoo import Case, ZooModel

OUT = Path("out/latency")
Feed = dict[str, np.ndarray]
console = Console(width=140)


@dataclass(frozen=True)
class Contender:
    """A file under measurement.

    Attributes:
        session: One thread, ONNX Runtime's default optimisations.
        feed: Its inputs.
        nodes: Number of nodes after ONNX Runtime's optimisation.
        difference: The largest difference from eager PyTorch, over all outputs.
    """

    session: onnxruntime.InferenceSession
    feed: Feed
    nodes: int
    difference: float


def captured(name: str, case: Case, fresh: bool) -> torch.export.ExportedProgram:
    """The model captured with dynamic sizes, from the folder if it is there."""
    path = OUT / f"{name}-{torch.__version__}.pt2"
    if path.exists() and not fresh:
        return torch.export.load(path)
    with torch.no_grad():
        program = torch.export.export(case.module, case.args, case.kwargs, dynamic_shapes=case.dynamic_shapes)
    torch.export.save(program, path)
    return program


def theirs(name: str, program: torch.export.ExportedProgram, fresh: bool) -> Path:
    """torch.onnx's file, from the folder if it is there."""
    path = OUT / f"{name}-{torch.__version__}-torch.onnx"
    if fresh or not path.exists():
        with contextlib.redirect_stdout(io.StringIO()):
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None
        exported.save(path)
    return path


def ours(name: str, program: torch.export.ExportedProgram, kind: str) -> Path:
    """Our file, in the folder.

    Args:
        name: The model's name.
        program: The captured model.
        kind: ``"onnxplug"``; ``"tuned"`` for ONNX Runtime's CPU, ``"fused"`` also with the operators of com.microsoft that onnxplug-ort brings.
    """
    path = OUT / f"{name}-{kind}.onnx"
    if kind == "fused":
        registry, opsets = plugged("onnxplug-ort"), {"": 21, "com.microsoft": 1}
        onnxplug.to_onnx(program, f=path, registry=registry, opset_version=opsets, target="onnxruntime:cpu")
    else:
        onnxplug.to_onnx(program, f=path, plugins=[], target="onnxruntime:cpu" if kind == "tuned" else "onnxruntime")
    return path


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def loaded(path: Path, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    """A session on one thread; writes the model that ONNX Runtime optimises to ``optimized``."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def contender(path: Path, inputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Contender:
    """Loads a file and compares its results with the expected ones."""
    session = loaded(path)
    optimized = path.with_suffix(".optimized.onnx")
    loaded(path, optimized)
    nodes = len(onnx.load(optimized, load_external_data=False).graph.node)
    optimized.unlink()
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    results = session.run(None, feed)
    worst = max(
        float((torch.from_numpy(got) - wanted).abs().max()) for got, wanted in zip(results, expected, strict=True)
    )
    return Contender(session, feed, nodes, worst)


def second_deciles(contenders: Mapping[str, Contender], seconds: float) -> dict[str, float]:
    """The second decile of each contender's runs in seconds, all taking turns for the given time."""
    names = list(contenders)
    costs: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        contenders[name].session.run(None, contenders[name].feed)
    ends, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < ends or turn < 10:
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            one = contenders[name]
            started = time.thread_time()
            one.session.run(None, one.feed)
            costs[name].append(time.thread_time() - started)
        turn += 1
    return {name: float(np.quantile(runs, 0.2)) for name, runs in costs.items()}


def measure(name: str, model: ZooModel, arguments: argparse.Namespace) -> dict[str, tuple[float, int, float]]:
    """Second decile in seconds, nodes after optimisation and largest difference of each contender."""
    case = model()
    program = captured(name, case, arguments.fresh)
    with torch.no_grad():
        expected = leaves(program.module()(*case.args, **case.kwargs))
    kinds = ["onnxplug", "tuned", *(["fused"] if name in TRANSFORMERS and not arguments.plain else [])]
    paths = {
        "torch.onnx": theirs(name, program, arguments.fresh),
        **{kind: ours(name, program, kind) for kind in kinds},
    }
    inputs = leaves((case.args, case.kwargs))
    contenders = {who: contender(path, inputs, expected) for who, path in paths.items()}
    costs = second_deciles(contenders, arguments.seconds)
    return {who: (costs[who], one.nodes, one.difference) for who, one in contenders.items()}


def mean_ratio(ratios: Sequence[float]) -> str:
    """The geometric mean."""
    return f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}" if ratios else ""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(LATENCY), help=f"some of {', '.join(LATENCY)}")
    parser.add_argument("--seconds", type=float, default=10, help="time for each model")
    parser.add_argument("--plain", action="store_true", help="leave onnxplug-ort's fused operators out")
    parser.add_argument("--fresh", action="store_true", help="make torch.onnx's files anew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    OUT.mkdir(parents=True, exist_ok=True)
    table = Table(
        title="ONNX Runtime on the CPU, one thread: processor time of a run, second decile; ratios to torch.onnx"
    )
    timed = [text for kind in ("onnxplug", "tuned", "fused") for text in (f"{kind} ms", "ratio")]
    for column in ("model", "torch.onnx ms", *timed, "nodes", "max. difference"):
        table.add_column(column, justify="left" if column == "model" else "right")
    ratios: dict[str, list[float]] = {"onnxplug": [], "tuned": [], "fused": []}
    for name in arguments.models:
        found = measure(name, LATENCY[name], arguments)
        costs = {who: cost for who, (cost, _, _) in found.items()}
        row = [name, f"{1e3 * costs['torch.onnx']:.2f}"]
        for kind, of_kind in ratios.items():
            if kind in costs:
                of_kind.append(costs[kind] / costs["torch.onnx"])
            row += [f"{1e3 * costs[kind]:.2f}", f"{of_kind[-1]:.3f}"] if kind in costs else ["", ""]
        row.append(" / ".join(str(nodes) for _, nodes, _ in found.values()))
        row.append(" / ".join(f"{difference:.0e}" for _, _, difference in found.values()))
        table.add_row(*row)
        console.print(*row)
    means = [text for of_kind in ratios.values() for text in ("", mean_ratio(of_kind))]
    table.add_row("geometric mean", "", *means, "", "")
    console.print(table)


if __name__ == "__main__":
    main()
