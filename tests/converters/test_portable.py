"""Portable ONNX has the plain form of each operator; ONNX Runtime's kernels get the special form. Both are right.

The plain form is run by ``onnxplug.reference``, the special form by ONNX Runtime; both are compared with eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree

import onnxplug
from onnxplug.build.kernels import Kernels
from onnxplug.build.spec import onnx_spec
from onnxplug.converters.helpers import runtimes
from onnxplug.errors import VerificationError
from onnxplug.plugins.onnxruntime_cpu import KERNELS
from onnxplug.run.session import Runner
from tests.support.check import Call, check

I8, U8, I16, HALF, BF16, DOUBLE = (
    torch.int8, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64,
)  # fmt: skip
A = torch.tensor([[3, -4, 100], [7, -100, 5]])
B = torch.tensor([[2, 3, 100], [-5, 7, -3]])
X = torch.tensor([[0.5, -0.75, 0.1], [-0.2, 0.9, 0.0]])
Y = torch.tensor([[0.25, 0.6, -0.1], [0.2, -0.9, 0.4]])
PLACES = torch.tensor([[0, 0, 1]])


class Case(NamedTuple):
    """An operator in two forms.

    Attributes:
        call: The function or module.
        args: Its inputs.
        plain: The operators of the portable model.
        special: The operators that the model for ONNX Runtime has besides or instead.
        opset: Version of ai.onnx, the default one when ``None``.
    """

    call: Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    plain: str
    special: str
    opset: int | None = None


class Lstm(torch.nn.Module):
    """A layer of doubles."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.LSTM(3, 4, bidirectional=True).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


def both(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return (A.to(dtype), B.to(dtype)) if not dtype.is_floating_point else (X.to(dtype), Y.to(dtype))


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


CASES: dict[str, Case] = {
    "add": Case(torch.add, both(I8), "Add", "Add Cast"),
    "floor_quotient": Case(
        lambda a, b: a // b,
        both(I16),
        "And Cast Div Equal Less Mul Not Sub Xor",
        "And Cast Div Equal Less Mul Not Sub Xor",
    ),
    "power": Case(lambda a: a**3, (A.to(I16),), "Mul", "Cast Mul"),
    "maximum": Case(torch.maximum, both(U8), "Max", "Cast Max"),
    "fmod": Case(torch.fmod, both(torch.int64), "Mod", "Div Mul Sub"),
    "less": Case(torch.lt, both(I8), "Less", "Cast Less"),
    "less_of_halves": Case(torch.lt, both(HALF), "Less", "Cast Less"),
    "equal": Case(torch.eq, both(U8), "Equal", "Cast Equal"),
    "searchsorted": Case(
        lambda a, b: torch.searchsorted(a.sort()[0], b), both(I8),
        "Cast GatherElements GreaterOrEqual Not ReduceSum TopK Unsqueeze",
        "Cast GatherElements GreaterOrEqual Not ReduceSum TopK Unsqueeze",
    ),
    "where": Case(lambda a, b: torch.where(a > 0, a, b), both(I8), "Greater Where", "Cast Greater Where"),
    "where_of_bools": Case(torch.where, (A > 0, B > 0, A > 5), "Where", "Cast Where"),
    "threshold": Case(lambda a: F.threshold(a, 5, 7), (A.to(I16),), "LessOrEqual Where", "Cast LessOrEqual Where"),
    "clamp": Case(lambda a: a.clamp(-5, 9), (A.to(I16),), "Clip", "Cast Max Min"),
    "clamp_one_side": Case(lambda x: x.clamp(min=0.2), (X,), "Clip", "Max"),
    "clamp_min": Case(lambda x: x.clamp_min(0.2), (X,), "Clip", "Max"),
    "clamp_max": Case(lambda x: x.clamp_max(0.2), (X,), "Clip", "Min"),
    "relu": Case(F.relu, (A,), "Relu", "Max"),
    "neg": Case(torch.neg, (A.to(I16),), "Neg", "Cast Sub"),
    "pad": Case(lambda a: F.pad(a, (1, 2)), (A.to(I16),), "Pad", "Cast Pad"),
    "pad_of_bfloat16": Case(lambda x: F.pad(x, (1, 2)), (X.to(BF16),), "Pad", "Cast Pad"),
    "matmul": Case(lambda x, y: x @ y.mT, both(BF16), "MatMul Transpose", "Cast MatMul Transpose"),
    "linear": Case(F.linear, both(BF16), "Gemm", "Cast MatMul Transpose"),
    "addmm": Case(
        lambda a, b: torch.addmm(a[:, :2], a, b.mT, beta=3, alpha=-2), both(I8),
        "Add Cast MatMul Mul Slice Transpose", "Add Cast MatMul Mul Slice Transpose",
    ),
    "addmm_at_opset_13": Case(
        lambda a, b: torch.addmm(a[:, :2], a, b.mT, beta=3), both(U8),
        "Add Cast MatMul Mul Slice Transpose", "Add Cast MatMul Mul Slice Transpose", 13,
    ),
    "inner_at_opset_13": Case(lambda a, b: torch.inner(a[0, 0], b), both(I8), "Cast Gather Mul", "Cast Gather Mul", 13),
    "linear_of_integers": Case(
        lambda a, b: F.linear(a, b, b[0, :2]), both(I8), "Add Cast Gather MatMul Slice Transpose", "Add Cast Gather MatMul Slice Transpose", 13
    ),
    "einsum": Case(lambda a, b: torch.einsum("ij,ij->i", a, b), both(I8), "Einsum", "Cast Einsum"),
    "einsum_of_halves": Case(lambda a, b: torch.einsum("ij,ij->i", a, b), both(HALF), "Einsum", "Cast Einsum"),
    "pow_of_halves": Case(lambda x, y: x.abs() ** y, both(HALF), "Abs Pow", "Abs Cast Pow"),
    "argmax": Case(lambda a: a.argmax(1), (A.to(I16),), "ArgMax", "ArgMax Cast"),
    "max": Case(lambda x: x.max(1), (X.to(HALF),), "ArgMax Cast ReduceMax", "ArgMax Cast ReduceMax"),
    "any": Case(lambda a: a.any(1), (A > 5,), "ReduceMax", "Cast Greater ReduceSum"),
    "all": Case(lambda a: a.all(), (A > 5,), "ReduceMin", "Cast Greater Not ReduceSum"),
    "any_at_opset_19": Case(lambda a: a.any(1), (A > 5,), "Cast Greater ReduceSum", "Cast Greater ReduceSum", 19),
    "nonzero": Case(torch.nonzero, (X.double(),), "NonZero Transpose", "Cast NonZero Transpose"),
    "sum_of_integers": Case(lambda a: a.sum(1), (A,), "ReduceSum", "CumSum Gather"),
    "topk": Case(lambda a: a.topk(2)[0], (A.to(U8),), "TopK", "Cast TopK"),
    "sort": Case(lambda a: a.sort(1), (A.to(I8),), "GatherElements TopK", "Cast GatherElements TopK"),
    "median": Case(
        lambda a: a.median(1)[0], (A.to(I8),), "GatherElements Squeeze TopK", "Cast GatherElements Squeeze TopK"
    ),
    "unique": Case(torch.unique, (A.to(U8),), "Reshape Unique", "Cast Reshape Unique"),
    "tril": Case(torch.tril, (A.to(I8),), "Trilu", "Cast Where"),
    "scatter_add": Case(
        lambda x, y: x.scatter_add(1, PLACES, y[:1]), both(HALF), "ScatterElements Slice", "Cast ScatterElements Slice"
    ),
    "index_add": Case(
        lambda a, b: a.index_add(0, torch.tensor([0, 0]), b, alpha=2), both(I8), "Mul ScatterND", "Cast Mul ScatterElements"
    ),
    **{
        name: Case(getattr(torch, name), (X.double(),), op_type, "")
        for name, op_type in (("acos", "Acos"), ("asin", "Asin"), ("atan", "Atan"), ("tan", "Tan"), ("sinh", "Sinh"),
                              ("cosh", "Cosh"), ("asinh", "Asinh"), ("atanh", "Atanh"), ("erf", "Erf"))
    },
    "acosh": Case(lambda x: torch.acosh(x + 2), (X.double(),), "Acosh Add", ""),
    **{
        f"{name}_of_halves": Case(getattr(torch, name), (X.to(HALF),), op_type, f"Cast {op_type}")
        for name, op_type in (("sin", "Sin"), ("exp", "Exp"), ("sinh", "Sinh"), ("erf", "Erf"), ("atan", "Atan"))
    },
    "gelu": Case(F.gelu, (X.double(),), "Gelu", ""),
    "gelu_of_halves": Case(F.gelu, (X.to(HALF),), "Gelu", "Cast Gelu"),
    "det": Case(torch.linalg.det, (seeded(3, 3, dtype=DOUBLE),), "Det", ""),
    "fft": Case(
        lambda x: torch.view_as_real(torch.fft.fft(x)), (seeded(2, 12),),
        "Concat DFT Gather Unsqueeze", "Add Cast Concat MatMul Neg Unsqueeze",
    ),
    "fft_of_a_large_size": Case(
        lambda x: torch.view_as_real(torch.fft.rfft(x)), (seeded(1, 600),),
        "Concat DFT Gather Slice Unsqueeze", "Cast Concat DFT Gather Slice Unsqueeze",
    ),
    "antialiased": Case(
        lambda x: F.interpolate(x, size=(4, 5), mode="bicubic", antialias=True), (seeded(1, 2, 7, 9),),
        "Resize", "MatMul Transpose",
    ),
    "interpolate": Case(
        lambda x: F.interpolate(x, size=(4, 5), mode="bilinear"), (seeded(1, 2, 7, 9, dtype=DOUBLE),),
        "Resize", "MatMul Transpose",
    ),
    "nearest": Case(
        lambda x: F.interpolate(x, scale_factor=2), (seeded(1, 2, 3, 4, dtype=DOUBLE),), "Resize", "Gather"
    ),
    "grid_sample": Case(
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        (seeded(1, 2, 4, 4, dtype=DOUBLE), seeded(1, 3, 3, 2, dtype=DOUBLE)), "GridSample", "", 16,
    ),
    "max_pool": Case(
        lambda x: F.max_pool2d(x, 2, 4, 0, 5, ceil_mode=True), (seeded(1, 1, 8, 8),), "MaxPool", "MaxPool Pad"
    ),
    "addmm_of_nothing": Case(
        lambda x, a, b: torch.addmm(x, a, b, beta=2), (X, torch.zeros(2, 0), torch.zeros(0, 3)), "Gemm", "Add MatMul Mul"
    ),
    "float8": Case(lambda x: (x * 8e4).to(torch.float8_e5m2).float(), (X,), "Cast Mul",
                   "Abs Cast GreaterOrEqual Mul Where"),
    "int_product": Case(
        torch._int_mm, (torch.arange(512).reshape(32, 16).to(I8), torch.arange(128).reshape(16, 8).to(I8)),
        "MatMulInteger", "Add Cast MatMulInteger",
    ),
    "group_norm": Case(
        lambda x: F.group_norm(x, 2, torch.arange(4.0), torch.ones(4)), (seeded(2, 4, 3),),
        "GroupNormalization", "Add InstanceNormalization Mul Reshape",
    ),
    "group_norm_at_opset_20": Case(
        lambda x: F.group_norm(x, 2), (seeded(2, 4, 3),), "InstanceNormalization Reshape", "InstanceNormalization Reshape", 20
    ),
    "lstm": Case(Lstm(), (seeded(5, 2, 3, dtype=DOUBLE),), "Concat Gather LSTM Reshape Transpose", ""),
    "attention": Case(
        lambda q: F.scaled_dot_product_attention(q, q, q, scale=0.5), (seeded(1, 2, 4, 8, dtype=DOUBLE),), "Attention", "", 23
    ),
    "rms_norm": Case(
        lambda x: F.rms_norm(x, (3,), torch.ones(3, dtype=BF16)), (X.to(BF16),),
        "RMSNormalization", "Add Cast Mul Reciprocal ReduceMean Sqrt", 23,
    ),
    "fold": Case(lambda x: F.fold(x, (3, 3), (2, 2)), (seeded(1, 4, 4, dtype=HALF),), "Col2Im", "Cast Col2Im"),
}  # fmt: skip
#: Cases of modes that the reference does not know in the opset: shapes and types are checked.
NOT_RUN = {"grid_sample"}


def operators(program: Any) -> str:
    return " ".join(sorted({node.op_type for node in program.model.graph}))


def in_order(names: str) -> str:
    return " ".join(sorted(names.split()))


@pytest.mark.parametrize("name", CASES)
def test_portable_onnx_is_plain(name: str) -> None:
    case = CASES[name]
    model = case.call if isinstance(case.call, torch.nn.Module) else Call(case.call)
    program = onnxplug.to_onnx(model, case.args, target=None, opset_version=case.opset)
    assert operators(program) == case.plain
    onnx.checker.check_model(program.model_proto, full_check=True)
    if name in NOT_RUN:
        return
    expected, _ = _pytree.tree_flatten(case.call(*case.args))
    results = program.call_reference(*case.args)
    torch.testing.assert_close(list(results), expected)


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_onnxruntime_get_another_form(name: str) -> None:
    case = CASES[name]
    program = check(case.call, *case.args, opset=case.opset)
    assert Runner(program.model).runtime == "onnxruntime"
    if case.special:
        assert operators(program) == in_order(case.special)
    else:
        assert not set(case.plain.split()) - {"Add", "Concat"} <= set(operators(program).split())


def test_kernels_that_refuse_at_run_time() -> None:
    """ONNX Runtime loads an LSTM of doubles and does not run it: the reference does, for portable models alone."""
    case = CASES["lstm"]
    program = check(case.call, *case.args, target=None)
    runner = Runner(program.model)
    feed = {program.model.graph.inputs[0].name: case.args[0]}
    assert runner.runtime == "onnxruntime"
    torch.testing.assert_close(runner(feed)[0], case.call(*case.args))
    assert runner.runtime == "onnxplug.reference"
    program.model.graph.metadata_props["onnxplug.target"] = "onnxruntime"
    with pytest.raises(VerificationError, match="does not support double"):
        Runner(program.model)(feed)


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", runtimes.GAPS, ids=lambda gap: f"{gap.operators.split()[0]}_{len(gap.dtypes)}")
def test_gaps_are_gaps(gap: runtimes.Gap) -> None:
    """Element types listed as without a kernel in every version.

    The installed version has none, and ONNX allows the element type.
    """
    kernels = Kernels(KERNELS)
    for op_type in gap.operators.split():
        opset = gap.until or 23
        spec = onnx_spec(op_type, opset)
        allowed = [d for d in gap.dtypes if runtimes.has_kernel(_Portable(opset), op_type, d)]
        assert allowed, op_type
        if gap.reason.startswith("no version"):
            position = runtimes._INPUT.get(op_type, 0)
            group = spec.output_groups[0] if op_type.startswith("Random") else spec.group_of(position)
            assert isinstance(group, str)
            assert not [d for d in allowed if kernels.takes(spec, {group: d})], op_type


def test_float_is_everywhere() -> None:
    """``computed_in`` looks nothing up for float."""
    assert not [gap for gap in runtimes.GAPS if runtimes.FLOAT in gap.dtypes]
    for gap in runtimes.GAPS:
        assert runtimes.has_kernel(_Portable(gap.until or 23), gap.operators, runtimes.FLOAT)


class _Portable:
    def __init__(self, opset: int) -> None:
        self.opset, self.runtime = opset, None
