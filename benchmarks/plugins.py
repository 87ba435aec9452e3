"""What installed plugins cost: 200 distributions of 50 rules each, against none, in fresh processes.

Start-up (the registry built, torch already in memory) must grow by less than 150 ms, and the time to find a node's rule
must not change. ``PYTHONPATH=. python benchmarks/plugins.py``; exit status 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

PLUGINS, RULES, GOAL_MS = 200, 50, 150.0
_MODULE = """
from onnxplug import PluginInfo, Rule, hookimpl

@hookimpl
def onnxplug_rules():
    return [Rule(f"bench{number}::op{{i}}", "bench_converters:op") for i in range({rules})]

@hookimpl
def onnxplug_info():
    return PluginInfo(namespaces=("bench{number}",))
"""
_MEASURE = """
import gc, json, time
import torch, onnxplug.exporter, onnxplug.rewrites.patterns, onnxplug.plugins.builtin  # what an export has in memory anyway
from types import SimpleNamespace
from onnxplug.plugins.manager import registry_for
from onnxplug.registry.target import Target
onnxplug.plugins.builtin.families()
gc.collect()
started, busy = time.perf_counter(), time.process_time()
registry, manager = registry_for()
start_up, cpu = time.perf_counter() - started, time.process_time() - busy
bound = registry.bind(Target(21, {"": 21}))
nodes = [SimpleNamespace(op_name=name) for name in ("aten::add.Tensor", "aten::mm.default", "aten::relu.default")]
for node in nodes:
    bound.candidates(node)
best = float("inf")
for _ in range(20):
    started = time.perf_counter()
    for _ in range(2000):
        for node in nodes:
            bound.candidates(node)
    best = min(best, (time.perf_counter() - started) / 6000)
print(json.dumps({"start_up": start_up, "cpu": cpu, "dispatch": best, "rules": len(registry), "loaded": sum(r.status == "loaded" for r in manager.records())}))
"""


def install(folder: Path, plugins: int = PLUGINS, rules: int = RULES) -> None:
    """Distributions as pip leaves them: a module, its metadata, its entry point, byte-compiled."""
    import compileall

    for number in range(plugins):
        (folder / f"bench_plugin_{number}.py").write_text(_MODULE.format(number=number, rules=rules), encoding="utf-8")
        info = folder / f"bench_plugin_{number}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: bench-plugin-{number}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata, encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[onnxplug]\nbench{number} = bench_plugin_{number}\n", encoding="utf-8")
    compileall.compile_dir(folder, quiet=2)


def measure(folder: Path | None, repeats: int) -> dict[str, float]:
    """The best of several processes, with the plugins of ``folder`` or without any."""
    path = [str(folder)] if folder is not None else []
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    runs = []
    for _ in range(repeats):
        done = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True, check=True, env=env)
        runs.append(json.loads(done.stdout))
    return {key: min(run[key] for run in runs) for key in runs[0]}


def main() -> int:
    """Prints the table; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as name:
        install(Path(name))
        without, with_all = measure(None, repeats), measure(Path(name), repeats)
    growth = 1e3 * (with_all["start_up"] - without["start_up"])
    ratio = with_all["dispatch"] / without["dispatch"]
    table = Table("", "no plugin", f"{PLUGINS} plugins of {RULES} rules", "goal")
    table.add_row("rules", f"{without['rules']:.0f}", f"{with_all['rules']:.0f}", "")
    table.add_row(
        "start-up",
        f"{1e3 * without['start_up']:.1f} ms",
        f"{1e3 * with_all['start_up']:.1f} ms (+{growth:.1f})",
        f"+{GOAL_MS:.0f} ms",
    )
    table.add_row("of it CPU time", *(f"{1e3 * run['cpu']:.1f} ms" for run in (without, with_all)), "")
    table.add_row(
        "dispatch", f"{1e9 * without['dispatch']:.0f} ns", f"{1e9 * with_all['dispatch']:.0f} ns (×{ratio:.2f})", "×1"
    )
    Console(width=120).print(table)
    return int(growth >= GOAL_MS or ratio > 1.2 or with_all["rules"] - without["rules"] != PLUGINS * RULES)


if __name__ == "__main__":
    sys.exit(main())
