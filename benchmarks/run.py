"""Conversion time against ``torch.onnx.export(program, dynamo=True)``, on the same ExportedProgram in the same run.

``make bench`` prints the tables; the goals are those of the project: ratios, so that the machine does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnxruntime
import torch
from rich.console import Console
from rich.table import Table

import onnxplug
from benchmarks.models import exported_decoder

console = Console(width=120)


def timed(function: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Shortest time of ``repeats`` calls in seconds, and the last result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        gc.collect()
        started = time.perf_counter()
        result = function()
        best = min(best, time.perf_counter() - started)
    return best, result


def ours(program: torch.export.ExportedProgram) -> Any:
    """Conversion, simplification and optimisation, up to the ModelProto."""
    return onnxplug.to_onnx(program).model_proto


def theirs(program: torch.export.ExportedProgram) -> Any:
    """The same by torch.onnx, with its default optimisation."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        exported = torch.onnx.export(program, dynamo=True, verbose=False)
        assert exported is not None
        return exported.model_proto


def largest_difference(program: torch.export.ExportedProgram, proto: Any) -> float:
    """The largest difference of a model's results from eager PyTorch's, at two sizes."""
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    module, worst = program.module(), 0.0
    for shape in ((2, 8), (3, 21)):
        ids = torch.randint(0, 100, shape)
        with torch.no_grad():
            expected = module(ids)
        got = session.run(None, {session.get_inputs()[0].name: ids.numpy()})[0]
        worst = max(worst, float((torch.from_numpy(got) - expected).abs().max()))
    return worst


def conversion(layer_counts: list[int], peer: bool) -> None:
    """The main table."""
    table = Table(title="GPT-like decoder, dynamic batch and sequence: conversion up to the ModelProto")
    for column in ("layers", "FX nodes", "torch.export s", "onnxplug s", "% of export", "us / FX node", "nodes"):
        table.add_column(column, justify="right")
    for column in ("torch.onnx s", "times faster", "its nodes", "our max diff", "its max diff"):
        table.add_column(column, justify="right")
    ours(exported_decoder(1))  # imports and first look-ups
    if peer:
        theirs(exported_decoder(1))
    per_node = {}
    for layers in layer_counts:
        export_seconds, program = timed(lambda n=layers: exported_decoder(n))
        fx_nodes = len(program.graph.nodes)
        seconds, proto = timed(lambda p=program: ours(p), repeats=3)
        per_node[layers] = seconds / fx_nodes
        row = [layers, fx_nodes, f"{export_seconds:.2f}", f"{seconds:.3f}", f"{100 * seconds / export_seconds:.1f}"]
        row += [f"{1e6 * per_node[layers]:.0f}", len(proto.graph.node)]
        if peer:
            peer_seconds, peer_proto = timed(lambda p=program: theirs(p))
            row += [f"{peer_seconds:.2f}", f"{peer_seconds / seconds:.0f}", len(peer_proto.graph.node)]
            row += [f"{largest_difference(program, m):.1e}" for m in (proto, peer_proto)]
        table.add_row(*map(str, row))
    console.print(table)
    first, last = layer_counts[0], layer_counts[-1]
    console.print(f"time per FX node at {last} layers / at {first}: {per_node[last] / per_node[first]:.2f} (goal: 1.2)")


def start_up(repeats: int = 7) -> None:
    """``import onnxplug`` with torch already imported, and discovery of plugins."""
    code = (
        "import torch, time, sys; t = time.perf_counter(); import onnxplug; a = time.perf_counter() - t;"
        "from onnxplug.plugins.manager import host_for; host_for().load();"
        "m = sum(n.startswith('onnxplug.converters.') for n in sys.modules);"
        "import onnxplug.exporter; t = time.perf_counter(); host_for().rules(); b = time.perf_counter() - t;"
        "print(a, m, b)"
    )
    with tempfile.TemporaryDirectory() as folder:
        # With bytecode, as an installed package has it: where PYTHONDONTWRITEBYTECODE is set, each run would compile anew.
        environment = {n: v for n, v in os.environ.items() if n != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder
        command = [sys.executable, "-c", code]
        runs = [
            subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
            for _ in range(repeats)
        ]
    best = min(float(run[0]) for run in runs)
    console.print(f"import onnxplug, torch imported: {1e3 * best:.1f} ms (goal: under 60)")
    tables = min(float(run[2]) for run in runs)
    console.print(f"the builtin rules' tables, imported for the first export: {1e3 * tables:.1f} ms (goal: under 60)")
    console.print(f"converter modules that discovery imported: {max(int(run[1]) for run in runs)} (goal: 0)")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 48, 150])
    parser.add_argument("--no-peer", action="store_true", help="leave torch.onnx out: it takes minutes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    start_up()
    conversion(arguments.layers, not arguments.no_peer)


if __name__ == "__main__":
    main()
