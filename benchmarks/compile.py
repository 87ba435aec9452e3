"""torch.compile(backend="onnxplug") beside eager and inductor: overhead, first call, steady state, memory.

``make bench`` prints the tables. Costs on one thread are the processor time of the thread, those of a first call the
processor time of the process and of the compilers it starts, so that what else runs on the machine counts for little;
on two threads it is the clock. Contenders take turns.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from onnxplug_compile import backend as compiled_by
from onnxplug_compile.binding import Executable
from rich.console import Console
from rich.table import Table
from torch import nn

from tests.support.zoo import ZOO, transformers_model

console = Console(width=120)
Call = Callable[[], Any]


def two_layers() -> tuple[nn.Module, Mapping[str, Any]]:
    """Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), {"input": torch.randn(4, 8)}


def bert() -> tuple[nn.Module, Mapping[str, Any]]:
    """BERT's base size: 12 layers of 768."""
    model = transformers_model("BertModel", "BertConfig", vocab_size=1000).eval()
    return model, {"input_ids": torch.randint(3, 1000, (1, 64))}


def in_turns(calls: Mapping[str, Call], *, clock: Callable[[], float], rounds: int, batch: int) -> dict[str, float]:
    """Seconds of a call of each: the least that was measured, as other processes of the machine only add to it."""
    costs: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            started = clock()
            for _ in range(batch):
                call()
            costs[name].append((clock() - started) / batch)
    return {name: min(found) for name, found in costs.items()}


class Recorded(Executable):
    """An executable that remembers itself and the arguments of its last call."""

    last: Recorded | None = None

    def __init__(self, session: Any, lowered: Any) -> None:
        super().__init__(session, lowered)
        self.session, self.args = session, []
        Recorded.last = self

    def __call__(self, args: list[Any]) -> list[Any]:
        self.args = list(args)
        return super().__call__(args)


def bare_call(executable: Recorded) -> Call:
    """The same session on the same memory, bound once."""
    binding = executable.session.io_binding()
    alive = []
    for slot in executable._inputs:
        value = executable.args[slot.position]
        alive.append(value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=slot.dtype))
        binding.bind_input(slot.name, "cpu", 0, slot.element, alive[-1].shape, alive[-1].data_ptr())
    for name, element, output in executable._outputs:
        shape = [int(size) for size in executable.session.get_outputs()[output.index].shape]
        alive.append(torch.empty(shape, dtype=output.dtype))
        binding.bind_output(name, "cpu", 0, element, shape, alive[-1].data_ptr())

    def call() -> None:
        executable.session.run_with_iobinding(binding)
        assert alive

    return call


def overhead() -> None:
    """Prints the overhead of a compiled call over its session, with Dynamo's guards and AOTAutograd's wrappers."""
    table = Table(
        "model",
        "bare session",
        "the backend alone",
        "compiled call",
        "more",
        title="Overhead per call (µs, one thread)",
    )
    torch.set_num_threads(1)
    for name, make, rounds, batch in (("two layers", two_layers, 200, 50), ("bert, 12 layers of 768", bert, 40, 1)):
        torch._dynamo.reset()
        model, kwargs = make()
        original, compiled_by.Executable = compiled_by.Executable, Recorded  # type: ignore[attr-defined]
        try:
            compiled = torch.compile(
                model, backend="onnxplug", dynamic=False, options={"fallback": False, "threads": 1}
            )
            compiled(**kwargs)
        finally:
            compiled_by.Executable = original  # type: ignore[attr-defined]
        executable = Recorded.last
        assert executable is not None
        calls = {
            "bare": bare_call(executable),
            "alone": functools.partial(lambda e: Executable.__call__(e, list(e.args)), executable),
            "compiled": functools.partial(compiled, **kwargs),
        }
        cost = in_turns(calls, clock=time.thread_time, rounds=rounds, batch=batch)
        more = cost["compiled"] - cost["bare"]
        table.add_row(name, *(f"{cost[n] * 1e6:,.1f}" for n in calls), f"{more * 1e6:,.1f} ({more / cost['bare']:.1%})")
    console.print(table)


def _spent() -> float:
    return sum(os.times()[:4])


def compiled_for(backend: str, model: nn.Module, threads: int) -> Callable[..., Any]:
    """The model, compiled at the first call; as it is for ``eager``."""
    if backend == "eager":
        return model
    options = {"options": {"fallback": False, "threads": threads}} if backend == "onnxplug" else {}
    found: Callable[..., Any] = torch.compile(model, backend=backend, **options)
    return found


def models(names: Sequence[str]) -> None:
    """First call and steady state of the zoo's models."""
    title = "First call (processor seconds), then a call (ms): one thread, and two by the clock"
    table = Table(
        "model",
        "inductor",
        "onnxplug",
        "ratio",
        "eager 1",
        "inductor 1",
        "onnxplug 1",
        "eager 2",
        "inductor 2",
        "onnxplug 2",
        title=title,
    )
    inductor = importlib.import_module("torch._inductor.config")
    inductor.force_disable_caches, inductor.compile_threads = True, 1  # a first call compiles, in this process
    torch.set_num_threads(1)
    for backend in ("inductor", "onnxplug"):  # imports of the first compilation are not counted
        compiled_for(backend, nn.Linear(2, 2), 1)(torch.ones(1, 2))
    ratios, steady = [], []
    for name in names:
        model = ZOO[name].module()
        args, kwargs = ZOO[name].inputs()
        first: dict[str, float] = {}
        costs: list[dict[str, float]] = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            calls: dict[str, Call] = {}
            for backend in ("eager", "inductor", "onnxplug"):
                torch._dynamo.reset()
                call = functools.partial(compiled_for(backend, model, threads), *args, **kwargs)
                started = _spent()
                call()
                first.setdefault(backend, _spent() - started)
                calls[backend] = call
            clock = time.thread_time if threads == 1 else time.perf_counter
            costs.append(in_turns(calls, clock=clock, rounds=30, batch=2))
        ratios.append(first["onnxplug"] / first["inductor"])
        steady.append(costs[0]["onnxplug"] / costs[0]["inductor"])
        cells = [f"{cost[b] * 1e3:.2f}" for cost in costs for b in ("eager", "inductor", "onnxplug")]
        console.print(f"{name}: first call {ratios[-1]:.2f}, a call {steady[-1]:.2f} of inductor's")
        table.add_row(name, f"{first['inductor']:.1f}", f"{first['onnxplug']:.1f}", f"{ratios[-1]:.2f}", *cells)
    console.print(table)
    console.print(
        f"Geometric means, onnxplug by inductor: first call {_mean(ratios):.2f}, a call on one thread {_mean(steady):.2f}"
    )


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def memory_growth(calls: int = 1000) -> float:
    """MB that the process grows by in calls of changing sizes, after a hundred."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64)).eval()
    compiled = torch.compile(model, backend="onnxplug", dynamic=True, options={"fallback": False})
    before = 0.0
    with torch.no_grad():
        for i in range(calls + 100):
            if i == 100:
                gc.collect()
                before = _resident()
            compiled(torch.randn(2 + i * 7 % 97, 3 + i * 5 % 31, 64))
    gc.collect()
    return _resident() - before


def _resident() -> float:
    """MB of memory that the process holds (on Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="models of the zoo; all of them unless named")
    warnings.simplefilter("ignore")
    with torch.no_grad():
        overhead()
        console.print(f"Memory after 1,000 calls of changing sizes: {memory_growth():+.1f} MB\n")
        models(parser.parse_args().models or list(ZOO))
