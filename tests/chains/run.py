"""Runs random chains: PyTorch beside ONNX Runtime with its optimisations off and on.

``python -m tests.chains.run --start 0 --count 2000`` prints each difference with its source.
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

import onnxplug
from tests.chains.generate import Chain, make

#: A few units in the last place of numbers around 1. Doubles are compared as floats are: some ONNX Runtime kernels hold
#: their attributes, such as an epsilon or a slope, in single precision.
UNITS = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3}


@dataclass(frozen=True)
class Outcome:
    """What became of a chain.

    Attributes:
        status: ``"right"``, ``"wrong"``, ``"refused"``, ``"not captured"``, ``"does not load"``, or ``"no kernel"``
            where ONNX Runtime has none for the dtype.
        detail: What differs, or the error.
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
    axes = {0: torch.export.Dim.DYNAMIC} if chain.dynamic and chain.inputs[0][0].shape[0] > 1 else None
    shapes = tuple(axes for _ in chain.inputs[0])
    try:
        captured = torch.export.export(module, chain.inputs[0], dynamic_shapes=shapes, strict=False)
    except Exception:
        # The first size is an example of an ordinary one in most chains; some operators fix it.
        if axes is None:
            return Outcome("not captured")
        axes = None
        try:
            captured = torch.export.export(module, chain.inputs[0], strict=False)
        except Exception:
            return Outcome("not captured")
    try:
        model = onnxplug.to_onnx(captured, **options).model_proto.SerializeToString()
    except onnxplug.OnnxplugError as error:
        return Outcome("refused", str(error))
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
        for inputs in sets:
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


def compare(chain: Chain, inputs: Any, expected: Any, results: Any) -> str:
    """What differs beyond rounding, the chain's own sensitivity to rounding counted in."""
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


def sensitivity(chain: Chain, inputs: Any, expected: Any, unit: float) -> list[torch.Tensor]:
    """How far each output moves when every value moves by a few units in the last place; infinite where it jumps."""
    moved = [torch.zeros(x.shape, dtype=torch.float64) for x in expected]
    generator = torch.Generator().manual_seed(0)

    def nudged(x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        factor, addend = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return (x * (1 + unit * factor) + 0.3 * unit * addend).to(x.dtype)

    module = chain.module(nudged).eval()
    for _ in range(12):
        try:
            with torch.no_grad():
                others = module(*[nudged(x) for x in inputs])
        except (RuntimeError, IndexError, ValueError):
            continue
        for index, (wanted, other) in enumerate(zip(expected, others, strict=True)):
            if wanted.shape != other.shape:
                moved[index] = torch.full_like(moved[index], torch.inf)
                continue
            change = (wanted.double() - other.double()).abs()
            # A value that jumps (a rounding, an order, a comparison) says nothing about rounding errors.
            jumps = change > 1000 * unit * (1 + wanted.double().abs())
            moved[index] = torch.maximum(moved[index], torch.where(jumps, torch.inf, 20 * change))
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--show", default="wrong,refused,does not load")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    for number in range(options.start, options.start + options.count):
        chain = make(number)
        outcome = run_chain(chain)
        counts[outcome.status] += 1
        if outcome.status in options.show.split(","):
            print(f"--- {outcome.status}: {outcome.detail}\n{chain}\n", flush=True)
    print(f"{dict(counts)} in {time.perf_counter() - started:.0f} s", file=sys.stderr)
    sys.exit(any(counts[status] for status in ("wrong", "does not load")))


if __name__ == "__main__":
    main()
