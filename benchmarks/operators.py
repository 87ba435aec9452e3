"""Conversion time of single operators against ``torch.onnx``: every tenth entry of torch's operator database.

``python benchmarks/operators.py [STEP]``; ``1`` takes every entry, in about a quarter of an hour. Goal: a tenth of
torch.onnx's time. Both exporters get the same ExportedProgram; each converts one operator first, so that its imports at
first use aren't counted.
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console

from benchmarks.run import ours, theirs, timed
from tests.opdb.measure import entries, module_of, samples

STEP = 10


def main(step: int = STEP) -> None:
    """Prints both sums and their ratio, over every ``step``-th entry."""
    warnings.simplefilter("ignore")
    torch._logging.set_logs(all=50)
    known = entries()
    programs = []
    for name in sorted(known)[::step]:
        if not known[name].supports_dtype(torch.float32, "cpu"):
            continue
        for sample in samples(known[name], torch.float32, 1)[:1]:
            module = module_of(known[name], sample)
            try:
                programs.append((name, torch.export.export(module, module.inputs(), strict=False)))
            except Exception:
                continue
    for convert in (ours, theirs):
        convert(programs[0][1])
    sums = [0.0, 0.0]
    both = 0
    for _, program in programs:
        try:
            first, second = timed(lambda p=program: ours(p))[0], timed(lambda p=program: theirs(p))[0]
        except Exception:
            continue  # one of the two exporters lacks the operator
        both += 1
        sums[0] += first
        sums[1] += second
    Console(width=120).print(
        f"{both} operators that both convert: onnxplug {sums[0]:.2f} s, torch.onnx {sums[1]:.2f} s, "
        f"{sums[0] / sums[1]:.3f} of it (goal 0.1)"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
