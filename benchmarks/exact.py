"""What exact special values cost: each operator with a rule of its own for them, plain and exact, run by ONNX Runtime in turns.

``python benchmarks/exact.py`` prints the table of docs/numerics.md; ``--write`` puts it there. First deciles of the runs, which a busy
machine disturbs least; one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "numerics.md"
BEGIN, END = "<!-- exact: written by benchmarks/exact.py -->", "<!-- end of exact -->"
KERNELS_BEGIN, KERNELS_END = "<!-- kernels: written by benchmarks/exact.py --kernels -->", "<!-- end of kernels -->"
#: From this ratio of the two times on, the plain form is the default.
WORTH = 1.1


@dataclass(frozen=True)
class Case:
    """One measured operator.

    Attributes:
        operators: The operators whose rules it stands for, without ``aten::``.
        differs: The special values that the plain form gets wrong.
        call: The exported function.
        args: Its inputs, of ordinary size.
    """

    operators: str
    differs: str
    call: Callable[..., Any]
    args: Callable[[], tuple[torch.Tensor, ...]]


def _floats() -> tuple[torch.Tensor, ...]:
    return (torch.randn(256, 4096),)


def _pairs() -> tuple[torch.Tensor, ...]:
    return torch.randn(256, 1024), torch.randn(256, 1024)


def _powers() -> tuple[torch.Tensor, ...]:
    return torch.randint(-9, 9, (64, 1024)), torch.randint(0, 9, (64, 1024))


def _images() -> tuple[torch.Tensor, ...]:
    return (torch.randn(4, 32, 28, 28),)


def _short() -> tuple[torch.Tensor, ...]:
    return (torch.randn(64, 64),)


_NAN = "NaN is skipped"
_WIDE = "integers beyond 2**53"
CASES = [
    Case("amax.default amin.default max.default min.default prims::amax.default prims::amin.default", _NAN, lambda x: x.amax(1), _floats),
    Case("aminmax.default", _NAN, lambda x: torch.aminmax(x, dim=1), _floats),
    Case("max.dim min.dim", _NAN, lambda x: x.max(1), _floats),
    Case("argmax.default argmin.default", _NAN, lambda x: x.argmax(1), _floats),
    Case("linalg_vector_norm.default norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.Scalar", f"{_NAN}, of orders inf and -inf", lambda x: torch.linalg.vector_norm(x, float("inf"), 1), _floats),
    Case("topk.default", "NaN lands anywhere", lambda x: x.topk(8, 1), _floats),
    Case("max_pool1d.default max_pool2d.default max_pool3d.default", _NAN, lambda x: torch.nn.functional.max_pool2d(x, 3, 2, 1), _images),
    Case("adaptive_max_pool1d.default adaptive_max_pool2d.default adaptive_max_pool3d.default", _NAN, lambda x: torch.nn.functional.adaptive_max_pool2d(x, 5), _images),
    Case("fractional_max_pool2d.default fractional_max_pool3d.default", _NAN, lambda x, u: torch.nn.functional.fractional_max_pool2d(x, 2, (12, 12), _random_samples=u), lambda: (*_images(), torch.rand(4, 32, 2))),
    Case("lstm.input lstm.data gru.input gru.data rnn_relu.input rnn_relu.data", "NaN becomes a number", torch.nn.GRU(64, 64), lambda: (torch.randn(32, 16, 64),)),
    Case("cummax.default cummin.default", _NAN, lambda x: x.cummax(1), _short),
    Case("sigmoid.default", "up to 6e-8 off, 0 below -18: few digits of small results, whose logarithm is -inf", torch.sigmoid, _floats),
    Case("sign.default sgn.default", "NaN of NaN, 0 in torch", torch.sign, _floats),
    Case("angle.default", "0 of NaN", torch.angle, _floats),
    Case("hypot.default", "infinity beside NaN gives NaN", torch.hypot, _pairs),
    Case("prod.default prod.dim_int prims::prod.default", _WIDE, lambda x: x.prod(1), lambda: (torch.randint(-2, 3, (256, 64)),)),
    Case("pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar", f"{_WIDE}, to a power that is a tensor", lambda x, y: x**y, _powers),
    Case("quantize_per_tensor.default quantize_per_tensor.tensor_qparams", "numbers halfway between two integers, with an odd zero point", lambda x: torch.quantize_per_tensor(x, 0.05, 3, torch.quint8).dequantize(), _floats),
    Case("fake_quantize_per_tensor_affine.default fake_quantize_per_tensor_affine.tensor_qparams fake_quantize_per_channel_affine.default fake_quantize_per_tensor_affine_cachemask.default fake_quantize_per_channel_affine_cachemask.default _fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default _fake_quantize_learnable_per_tensor_affine.default _fake_quantize_learnable_per_channel_affine.default _fused_moving_avg_obs_fq_helper_functional.default quantized_decomposed::quantize_per_tensor.default quantized_decomposed::quantize_per_tensor.tensor quantized_decomposed::quantize_per_tensor.tensor2 quantized_decomposed::quantize_per_channel.default", "numbers halfway between two integers", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.03, 3, -128, 127), _floats),
]  # fmt: skip


def names_of(case: Case) -> list[str]:
    """Qualified names of a case's operators."""
    return [name if "::" in name else f"aten::{name}" for name in case.operators.split()]


def exact_operators() -> set[str]:
    """The operators for which the builtin table has a rule that states ``exact``."""
    from onnxplug.plugins.manager import registry_for

    registry, _ = registry_for(plugins=[])
    return {rule.op for _, rule in registry.rules() if rule.exact is not None}


class _Call(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(*args)


def measure(case: Case, seconds: float = 1.0) -> tuple[float, float, int, int]:
    """Milliseconds of the plain and the exact form, and their numbers of nodes; in turns, at least 10 each."""
    import onnxruntime

    import onnxplug

    torch.manual_seed(0)
    args = case.args()
    sessions, nodes = [], []
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    for exact in (False, True):
        program = onnxplug.to_onnx(_Call(case.call), args, exact=exact)
        model = program.model_proto.SerializeToString()
        sessions.append(onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]))
        nodes.append(len(program.model.graph))
    feeds = [{i.name: a.numpy() for i, a in zip(s.get_inputs(), args, strict=True)} for s in sessions]
    times: list[list[float]] = [[], []]
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or len(times[0]) < 10:
        for which, session in enumerate(sessions):
            before = time.perf_counter()
            session.run(None, feeds[which])
            times[which].append(time.perf_counter() - before)
    plain, exact_ = (sorted(t)[len(t) // 10] * 1e3 for t in times)
    return plain, exact_, *nodes


def table(cases: list[Case], seconds: float) -> list[str]:
    """The rows of the table, in Markdown."""
    rows = ["| operators | plain, the default | plain | with `exact=True` |", "|---|---|---|---|"]
    for case in cases:
        plain, exact, few, many = measure(case, seconds)
        names = " ".join(f"`{name}`" for name in names_of(case))
        worth = "" if exact > WORTH * plain else " (below a tenth)"
        rows.append(
            f"| {names} | {case.differs} | {plain:.2f} ms, {_count(few)} | {exact:.2f} ms, {_count(many)}{worth} |"
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _count(nodes: int) -> str:
    return f"{nodes} node{'' if nodes == 1 else 's'}"


def kernel_tables() -> list[str]:
    """Gaps and faults of ONNX Runtime's kernels in Markdown, from the tables in the code."""
    from onnxplug.converters.helpers.runtimes import FAULTS, GAPS

    rows = ["| operators | element types | kernels |", "|---|---|---|"]
    for gap in GAPS:
        until = f", up to opset {gap.until}" if gap.until is not None else ""
        dtypes = ", ".join(sorted(dtype.name.lower() for dtype in gap.dtypes))
        rows.append(f"| {' '.join(f'`{name}`' for name in gap.operators.split())} | {dtypes} | {gap.reason}{until} |")
    rows += ["", "| ONNX Runtime | what onnxplug emits for it |", "|---|---|"]
    rows += [f"| {fault.reason} | {fault.instead} |" for fault in FAULTS]
    return rows


def write(begin: str, end: str, rows: list[str]) -> None:
    """Puts rows between two marks of docs/numerics.md."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    PAGE.write_text("\n".join([head + begin, "", *rows, "", end]) + tail, encoding="utf-8")


def main() -> None:
    """Measures, prints, and writes the table where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/numerics.md")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each operator")
    parser.add_argument("--only", default="", help="operators whose names hold this")
    parser.add_argument("--kernels", action="store_true", help="write the tables of kernels alone; measures nothing")
    options = parser.parse_args()
    if options.kernels:
        write(KERNELS_BEGIN, KERNELS_END, kernel_tables())
        return
    if options.write and options.only:
        parser.error("--write takes the whole table, without --only")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = [case for case in CASES if options.only in case.operators]
    listed = defaultdict(int)
    for case in CASES:
        for name in names_of(case):
            listed[name] += 1
    if set(listed) != exact_operators():
        sys.exit(f"not in the table, or without a rule: {sorted(set(listed) ^ exact_operators())}")
    rows = table(chosen, options.seconds)
    print("\n".join(rows))
    if options.write:
        write(BEGIN, END, rows)


if __name__ == "__main__":
    main()
