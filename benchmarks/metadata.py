"""What metadata cost, as a ratio to a conversion without any: in turns, processor time, the least of all rounds of each level.

``make bench`` prints the table.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

import onnxplug
from benchmarks.models import exported_decoder

#: Of conversion with full metadata to conversion without.
GOAL = 1.15
LEVELS = ("none", "short", "full")


def measure(captured: torch.export.ExportedProgram, level: str) -> tuple[float, int]:
    """Processor seconds of one conversion, and the bytes of the model that it makes."""
    gc.collect()
    started = time.process_time()
    program = onnxplug.to_onnx(captured, metadata=level)
    seconds = time.process_time() - started
    return seconds, program.model_proto.ByteSize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    captured = exported_decoder(options.layers)
    measure(captured, "full")  # imports
    best = dict.fromkeys(LEVELS, float("inf"))
    sizes: dict[str, int] = {}
    for _ in range(options.rounds):
        for level in LEVELS:
            seconds, sizes[level] = measure(captured, level)
            best[level] = min(best[level], seconds)
    table = Table(title=f"A decoder of {options.layers} layers, converted (goal of full: {GOAL:.2f})")
    for column in ("metadata", "ms", "ratio", "kB more"):
        table.add_column(column, justify="left" if column == "metadata" else "right")
    for level in LEVELS:
        ratio = f"{best[level] / best['none']:.2f}"
        table.add_row(level, f"{best[level] * 1000:.1f}", ratio, f"{(sizes[level] - sizes['none']) / 1000:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
