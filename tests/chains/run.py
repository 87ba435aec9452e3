"""Runs random chains: PyTorch beside ONNX Runtime with its optimisations off and on.

``python -m tests.chains.run --start 0 --count 2000`` prints each difference with its source, and at the end how many
chains were right, refused and wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import onnxplug
from tests.chains.generate import Chain, make

#: A few units in the last place of numbers around 1. Doubles are compared as floats are: some ONNX Runtime kernels hold
#: their attributes, such as an epsilon or a slope, in single precision.
UNITS = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3}

#: The sizes that dynamic axes have in further inputs, and the number of these inputs.
SIZES, SETS = (1, 1, 2, 3, 4, 6, 7, 8, 16), 3
#: How many times every value is moved to find jumps: a rounding's tie goes the other way in about half of them.
NUDGES = 48
#: Functions whose results lie on a grid: a 0 among them is 0 everywhere.
ROUNDING = frozenset(
    {"fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine", "round", "floor", "ceil", "trunc"}
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a chain.

    Attributes:
        status: ``"right"``, ``"wrong"``, ``"refused"``, ``"not captured"``, ``"does not load"``, or ``"no kernel"``
            where ONNX Runtime has none for the dtype.
        detail: The difference, or the error.
    """

    status: str
    detail: str = ""


def session(model: bytes, optimised: bool) -> Any:
    """A session of one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_chain(chain: Chain, **options: Any) -> Outcome:
    """Exports a chain and compares both sets of inputs in both sessions."""
    module = chain.module().eval()
    axes = axes_of(chain)
    try:
        try:
            with warnings.catch_warnings(record=True) as messages:
                warnings.simplefilter("always")
                program = exported(chain, module, axes, options)
            if any("the exported model is right only where" in str(warning.message) for warning in messages):
                axes = None  # such as the number of pieces that chunk gives: the user was warned
        except onnxplug.CaptureError:
            # The first size is dynamic in most chains; some operators fix it.
            if axes is None:
                raise
            axes = None
            program = exported(chain, module, axes, options)
    except onnxplug.CaptureError as error:
        return Outcome("not captured", str(error))
    except onnxplug.OnnxplugError as error:
        return Outcome("refused", str(error))
    model = program.model_proto.SerializeToString()
    sets = [
        inputs for i, inputs in enumerate(chain.inputs) if i == 0 or axes or inputs[0].shape == chain.inputs[0][0].shape
    ]
    for optimised in (False, True):
        where = f"optimisations {'on' if optimised else 'off'}"
        try:
            ort = session(model, optimised)
        except Exception as error:
            status = "no kernel" if "NOT_IMPLEMENTED" in str(error) else "does not load"
            return Outcome(status, f"{where}: {error}")
        names = [i.name for i in ort.get_inputs()]
        further = other_sizes(chain, ort) if axes else []
        given = [inputs for inputs in sets if not (axes and len(axes) > 1) or _is_taken(inputs, ort)]
        for inputs in [*given, *further]:
            try:
                with torch.no_grad():
                    expected = module(*inputs)
            except (RuntimeError, IndexError, ValueError):
                continue
            feeds = {f"x{i}": x.numpy() for i, x in enumerate(inputs) if f"x{i}" in names}
            try:
                results = ort.run(None, feeds)
            except Exception as error:
                return Outcome("wrong", f"{where}: does not run: {error}")
            problem = compare(chain, inputs, expected, results)
            if problem:
                return Outcome("wrong", f"{where}, {tuple(inputs[0].shape)}: {problem}")
    return Outcome("right")


def axes_of(chain: Chain) -> dict[int, Any] | None:
    """The dynamic axes of a dynamic chain's inputs: the first axis, or all axes where the chain's number is odd."""
    shape = chain.inputs[0][0].shape
    if not chain.dynamic:
        return None
    if chain.number % 2:
        return dict.fromkeys(range(len(shape)), torch.export.Dim.AUTO)
    return {0: torch.export.Dim.DYNAMIC} if shape[0] > 1 else None


def other_sizes(chain: Chain, ort: Any) -> list[tuple[torch.Tensor, ...]]:
    """Inputs of other sizes wherever a session's inputs have a dynamic size; PyTorch may refuse them.

    Without size 0, which ends ONNX Runtime's process in several kernels.
    """
    dims = {i.name: i.shape for i in ort.get_inputs()}
    generator, result = torch.Generator().manual_seed(chain.number), []
    for _ in range(SETS):
        sizes = {d: SIZES[int(torch.randint(len(SIZES), (1,), generator=generator))] for s in dims.values() for d in s}
        inputs = []
        for place, x in enumerate(chain.inputs[0]):
            shape = [d if isinstance(d, int) else sizes[d] for d in dims.get(f"x{place}", x.shape)]
            inputs.append((torch.randn(shape, generator=generator) * (1 if x.is_floating_point() else 3)).to(x.dtype))
        result.append(tuple(inputs))
    return result


def _is_taken(inputs: tuple[torch.Tensor, ...], ort: Any) -> bool:
    """Whether inputs have a session's static sizes: where all axes may be dynamic, PyTorch chooses them."""
    dims = {i.name: i.shape for i in ort.get_inputs()}
    pairs = [pair for i, x in enumerate(inputs) for pair in zip(dims.get(f"x{i}", x.shape), x.shape, strict=True)]
    return all(dim == size or isinstance(dim, str) for dim, size in pairs)


def exported(chain: Chain, module: torch.nn.Module, axes: Any, options: dict[str, Any]) -> onnxplug.OnnxProgram:
    """The chain in ONNX, these axes of every input dynamic."""
    shapes = tuple(axes for _ in chain.inputs[0])
    return onnxplug.to_onnx(module, chain.inputs[0], dynamic_shapes=shapes, strict=False, **options)


def compare(chain: Chain, inputs: Any, expected: Any, results: Any) -> str:
    """The difference beyond rounding and the chain's own sensitivity to it, in words; empty where there is none."""
    unit = UNITS[inputs[0].dtype]
    slack: list[torch.Tensor] | None = None
    for index, (wanted, got) in enumerate(zip(expected, results, strict=True)):
        result = torch.from_numpy(np.ascontiguousarray(got).reshape(got.shape))
        if result.dtype != wanted.dtype or result.shape != wanted.shape:
            return f"output {index} is {result.dtype}{tuple(result.shape)}, not {wanted.dtype}{tuple(wanted.shape)}"
        a, b = result.double(), wanted.double()
        bad = ~((a - b).abs() <= 20 * unit * (1 + b.abs())) & ~(a == b) & ~(a.isnan() & b.isnan())
        if bad.any():
            slack = sensitivity(chain, inputs, expected, unit) if slack is None else slack
            bad &= ~((a - b).abs() <= 20 * unit * (1 + b.abs()) + slack[index])
        if bad.any():
            at = tuple(int(n) for n in bad.nonzero()[0])
            counted = f"{int(bad.sum())} of {bad.numel()} differ"
            return f"output {index}: {counted}, at {at} {a[at].item()!r}, not {b[at].item()!r}"
    return ""


class _Nudged(TorchFunctionMode):
    """Moves the results of every operator by a few units in the last place."""

    def __init__(self, unit: float, generator: torch.Generator) -> None:
        super().__init__()
        self.unit, self.generator = unit, generator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not any(isinstance(x, torch.Tensor) for x in tree_leaves((args, kwargs))):
            return result  # zeros, ones and ranges are the same everywhere
        rounded = getattr(func, "__name__", "") in ROUNDING
        return tree_map_only(torch.Tensor, lambda x: self.nudge(x, 0.0 if rounded else 0.3), result)

    def nudge(self, x: torch.Tensor, shift: float = 0.3) -> torch.Tensor:
        """Floating-point numbers times about 1, plus about 0 (``shift`` units); anything else as it is.

        A remainder of ordinary numbers that cancel is 0 half of the time, as in another order of summation.
        """
        if not x.is_floating_point():
            return x
        factor, addend = (torch.randn(x.shape, generator=self.generator, dtype=torch.float64) for _ in range(2))
        if shift:
            cancelled = (x.abs() < 4 * self.unit) & (torch.rand(x.shape, generator=self.generator) < 0.5)
            x, addend = x.masked_fill(cancelled, 0), addend.masked_fill(cancelled, 0)
        return (x * (1 + self.unit * factor) + shift * self.unit * addend).to(x.dtype)


def sensitivity(chain: Chain, inputs: Any, expected: Any, unit: float) -> list[torch.Tensor]:
    """How far each output moves when every value moves by a few units in the last place; infinite where it jumps."""
    moved = [torch.zeros(x.shape, dtype=torch.float64) for x in expected]
    mode = _Nudged(unit, torch.Generator().manual_seed(0))
    module = chain.module().eval()
    for _ in range(NUDGES):
        try:
            with torch.no_grad():
                nudged = [mode.nudge(x) for x in inputs]
                with mode:
                    others = module(*nudged)
        except (RuntimeError, IndexError, ValueError):
            continue
        for index, (wanted, other) in enumerate(zip(expected, others, strict=True)):
            if wanted.shape != other.shape:
                moved[index] = torch.full_like(moved[index], torch.inf)
                continue
            change = (wanted.double() - other.double()).abs()
            # A value that jumps (a rounding, an order, a comparison) says nothing about rounding errors.
            jumps = (change > 1000 * unit * (1 + wanted.double().abs())) | (change.isnan() & ~wanted.isnan())
            moved[index] = torch.maximum(moved[index], torch.where(jumps, torch.inf, 20 * change))
    return moved


#: The statuses that a run counts, in the order of its summary; the last three are our faults.
STATUSES = ("right", "not captured", "no kernel", "refused", "wrong", "does not load")


def summary(start: int, counts: Counter[str], seconds: float) -> str:
    """The numbers of the chains that ran, and the counts of their statuses."""
    result = ", ".join(f"{counts[status]} {status}" for status in STATUSES)
    return f"chains {start} to {start + counts.total() - 1} ({counts.total()}): {result}; {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="the number of the first chain")
    parser.add_argument("--count", type=int, default=1000, help="how many chains to run, of consecutive numbers")
    parser.add_argument("--show", default="wrong,refused,does not load", help="print the chains that end so")
    parser.add_argument("--opset", type=int, help="the opset to export for; the default one otherwise")
    parser.add_argument("--every", type=int, default=500, help="print the counts so far after as many chains")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    for number in range(options.start, options.start + options.count):
        chain = make(number)
        outcome = run_chain(chain, opset_version=options.opset)
        counts[outcome.status] += 1
        if outcome.status in options.show.split(","):
            print(f"--- {outcome.status}: {outcome.detail}\n{chain}\n", flush=True)
        if counts.total() % options.every == 0 and counts.total() < options.count:
            print(summary(options.start, counts, time.perf_counter() - started), file=sys.stderr, flush=True)
    print(f"{summary(options.start, counts, time.perf_counter() - started)}, to the end", flush=True)
    sys.exit(any(counts[status] for status in ("wrong", "does not load")))


if __name__ == "__main__":
    main()
