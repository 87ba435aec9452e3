"""What metadata cost, as a ratio to a conversion without any: in turns, processor time, the least of all rounds of each level.

``make bench`` prints the table.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import warnings
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

import onnxplug
from benchmarks.capture import image
from benchmarks.models import exported_decoder

#: Ratio of conversion with full metadata to conversion without.
GOAL = 1.15
LEVELS = ("none", "short", "full")
IMAGE_MODELS = ("resnet50", "convnext_atto", "densenet121", "vit_tiny_patch16_224")


def measure(captured: torch.export.ExportedProgram, level: str) -> tuple[float, int]:
    """Processor seconds of one conversion, and the bytes of the model that it makes."""
    gc.collect()
    started = time.process_time()
    program = onnxplug.to_onnx(captured, metadata=level)
    seconds = time.process_time() - started
    return seconds, program.model_proto.ByteSize()


def captured_models(layers: int) -> Iterator[tuple[str, torch.export.ExportedProgram]]:
    """Names and captured programs."""
    yield f"decoder, {layers} layers", exported_decoder(layers)
    for name in IMAGE_MODELS:
        model, args, _, shapes = image(name)
        yield name, torch.export.export(model, args, dynamic_shapes=shapes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = Table(title=f"Conversion by metadata= (goal of full: {GOAL:.2f})")
    for column in ("model", "none, ms", "short", "full", "kB of short", "kB of full"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name, captured in captured_models(options.layers):
        measure(captured, "full")  # imports
        best = dict.fromkeys(LEVELS, float("inf"))
        sizes: dict[str, int] = {}
        for _ in range(options.rounds):
            for level in LEVELS:
                seconds, sizes[level] = measure(captured, level)
                best[level] = min(best[level], seconds)
        ratios = [f"{best[level] / best['none']:.2f}" for level in LEVELS[1:]]
        more = [f"{(sizes[level] - sizes['none']) / 1000:.0f}" for level in LEVELS[1:]]
        table.add_row(name, f"{best['none'] * 1000:.1f}", *ratios, *more)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
