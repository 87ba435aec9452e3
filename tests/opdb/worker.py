"""A process that measures entries one by one and prints a line of JSON before and after each sample.

Run by :mod:`tests.opdb.run`, which survives it crashing or hanging.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict
from typing import IO, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from onnxplug.registry.target import DEFAULT_RUNTIME
from tests.opdb.measure import Outcome, entries, measure, module_of, samples


def main() -> None:
    """Reads tasks as JSON lines: name, dtype, opset, dynamic, count, and the first sample to measure."""
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    torch._logging.set_logs(all=logging.CRITICAL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what C++ code prints doesn't belong among the answers
    known = entries()
    for line in sys.stdin:
        task = json.loads(line)
        _run(known[task["name"]], task, answers)
        print(json.dumps({"done": task["name"]}), file=answers)


def _run(op: Any, task: dict[str, Any], answers: IO[str]) -> None:
    dtype = getattr(torch, task["dtype"])
    try:
        chosen = samples(op, dtype, task["count"])
    except Exception as error:
        print(json.dumps({"sample": 0, **asdict(Outcome("eager", f"samples: {error}"[:300]))}), file=answers)
        return
    for index, sample in enumerate(chosen):
        if index < task["first"]:
            continue
        print(json.dumps({"start": index}), file=answers)
        outcome = measure(
            op,
            dtype,
            module_of(op, sample),
            opset=task["opset"],
            dynamic=task["dynamic"],
            name=task["name"],
            target=task.get("target", DEFAULT_RUNTIME),
        )
        print(json.dumps({"sample": index, **asdict(outcome)}), file=answers)


if __name__ == "__main__":
    main()
