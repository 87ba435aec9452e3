"""A 7-billion-parameter llama without numbers: time and memory of its export, beside ``torch.onnx`` on the same model in the same run.

Each exporter works in a process of its own, whose largest resident size is told, after a model of one layer to get its
imports done in no one's time. Neither writes weights: there are none. Times are the process's own, so that a busy machine matters
little. torch.onnx's optimisation is off: it reads the weights, and fails. ``make bench`` prints the table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

#: Processor seconds of the conversion and of the whole export, gigabytes of the process.
GOALS = {"conversion": 1.0, "whole": 10.0, "memory": 3.0}
DIMENSIONS = {"input_ids": {0: "batch", 1: "sequence"}, "use_cache": None}


def llama(layers: int) -> Any:
    """The model, its parameters on the device meta."""
    from tests.support.vision import define_vision_schemas

    define_vision_schemas()
    import transformers

    import onnxplug

    with onnxplug.fake_weights():
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers)).eval()


def measure(exporter: str, layers: int) -> dict[str, float]:
    """Exports a model of one layer and then the model in this process; the figures of the second export."""
    import torch

    import onnxplug

    inputs = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), "use_cache": False}
    found: dict[str, float] = {}
    for count in (1, layers):
        model = llama(count)
        with tempfile.TemporaryDirectory() as folder:
            path, started = Path(folder) / "model.onnx", time.process_time()
            if exporter == "onnxplug":
                stages: list[float] = []
                program = onnxplug.to_onnx(
                    model,
                    kwargs=inputs,
                    dynamic_shapes=DIMENSIONS,
                    progress=lambda _: stages.append(time.process_time()),  # noqa: B023 - called within the turn
                )
                found["conversion"] = time.process_time() - stages[1]
                program.save(path, include_initializers=False)
                found["nodes"] = program.statistics.onnx_nodes
            else:
                # torch.export takes fake weights, but no weights on the device meta beside inputs on the CPU.
                from onnxplug.capture.weightless import weights_beside

                with weights_beside(model, inputs):
                    exported = torch.export.export(
                        model, (), inputs, dynamic_shapes={**DIMENSIONS, "input_ids": {0: _dim(0), 1: _dim(1)}}
                    )
                captured = time.process_time()
                theirs = torch.onnx.export(exported, dynamo=True, optimize=False, verbose=False)
                found["conversion"] = time.process_time() - captured
                assert theirs is not None
                theirs.save(path, include_initializers=False)
                found["nodes"] = theirs.model.graph.num_nodes()
            found["whole"] = time.process_time() - started
        found["parameters"] = sum(p.numel() for p in model.parameters()) / 1e9
    # Linux gives kilobytes.
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return found


def _dim(axis: int) -> Any:
    import torch

    return torch.export.Dim(("batch", "sequence")[axis])


def measured(exporter: str, layers: int) -> dict[str, float] | str:
    """The figures of :func:`measure` in a process of its own, or the last line of its error output when it fails."""
    command = [sys.executable, __file__, "--child", exporter, "--layers", str(layers)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no word"])[-1]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32, help="layers of the model; 32 have 6.7 billion parameters")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        warnings.simplefilter("ignore")
        sys.stdout.write(f"{json.dumps(measure(options.child, options.layers))}\n")
        return
    from rich.console import Console
    from rich.table import Table

    ours, theirs = (measured(exporter, options.layers) for exporter in ("onnxplug", "torch.onnx"))
    console = Console(width=120)
    if isinstance(ours, str):
        raise SystemExit(f"onnxplug fails: {ours}")
    table = Table(title=f"A llama of {ours['parameters']:.1f} billion parameters without numbers")
    for column in ("", "onnxplug", "goal", "torch.onnx", "times less"):
        table.add_column(column, justify="left" if not column else "right")
    for key, unit in (("conversion", "s"), ("whole", "s"), ("memory", "GB"), ("nodes", "")):
        mine, goal = (
            f"{ours[key]:.2f} {unit}" if unit else f"{ours[key]:.0f}",
            f"{GOALS[key]:.0f} {unit}" if key in GOALS else "",
        )
        if isinstance(theirs, str):
            table.add_row(key, mine, goal, "fails", "")
        else:
            other = f"{theirs[key]:.2f} {unit}" if unit else f"{theirs[key]:.0f}"
            table.add_row(key, mine, goal, other, f"{theirs[key] / ours[key]:.1f}")
    console.print(table)
    if isinstance(theirs, str):
        console.print(f"torch.onnx fails: {theirs}", markup=False)
    over = [key for key, goal in GOALS.items() if ours[key] > goal]
    console.print(f"over their goals: {', '.join(over) or 'none'}")


if __name__ == "__main__":
    main()
