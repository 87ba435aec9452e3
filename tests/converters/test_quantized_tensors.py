"""Tensors of torch's quantised dtypes: quantised, rearranged and dequantised.

Operators without a rule have stand-ins (contrib/onnxplug-quantized/tests/test_without_layers.py), or give an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import onnxplug
from onnxplug.errors import ConversionError, Unsupported
from tests.support.check import check
from tests.support.sampling import rotated

ROWS = {0: torch.export.Dim.DYNAMIC}
Function = Callable[..., Any]
# Ties, both signs, numbers beyond the limits, and infinities; exact with scales that are powers of two.
HARD = torch.tensor([[0.0, -0.0, 0.5, 1.5, -2.5, -0.125], [1e30, -1e30, float("inf"), -float("inf"), 63.875, -32.25]])
# PyTorch 2.15 wraps what int32 can't hold around to the other limit when it adds a zero point that is negative or great.
BOUNDED = HARD.clamp(-1e8, 1e8)
OTHER = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)) * 20
#: dtype and zero point.
KINDS = {
    "quint8": (torch.quint8, 10),
    "quint8_end": (torch.quint8, 255),
    "qint8": (torch.qint8, -4),
    "qint8_symmetric": (torch.qint8, 0),
    "qint32": (torch.qint32, 0),
    "qint32_shifted": (torch.qint32, -7),  # the differences of numbers beyond the limits wrap around
}


#: With torch 2.9 onnxplug-quantized captures its stand-ins, and has other errors (its own tests).
FAKE = pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 traces no quantised tensors")


def quantized(x: torch.Tensor, scale: float = 0.25, zero_point: int = 10, dtype: torch.dtype = torch.quint8) -> Any:
    return torch.quantize_per_tensor(x, scale, zero_point, dtype)


@pytest.mark.parametrize("opset", [13, 21, 23])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, opset: int) -> None:
    dtype, zero_point = KINDS[kind]
    program = check(
        lambda x: quantized(x, 0.25, zero_point, dtype).dequantize(),
        OTHER,
        others=[(HARD if 0 <= zero_point < 128 else BOUNDED,), (OTHER[:1] * 3,)],
        dynamic=[ROWS],
        opset=opset,
        rtol=0,
        atol=0,
        verify=True,
        exact=zero_point == 255,  # an odd zero point: ties go to the other even number
    )
    if dtype != torch.qint32 and zero_point != 255:
        assert [node.op_type for node in program.model.graph] == ["QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_point", [-3, 3])
def test_exact_form_rounds_as_the_installed_torch(kind: str, zero_point: int) -> None:
    dtype = KINDS[kind][0]
    shift = abs(zero_point) if dtype == torch.quint8 else zero_point
    model = lambda x: quantized(x, 0.25, shift, dtype).dequantize()  # noqa: E731
    hard = HARD if shift >= 0 else BOUNDED
    check(model, hard, others=[(hard.flip(1),), (hard * 0.25,)], exact=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8, torch.qint32], ids=str)
def test_tensors_for_the_numbers(dtype: torch.dtype) -> None:
    def model(x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        return torch.quantize_per_tensor(x, scale, zero_point, dtype).dequantize()

    others = [(HARD, torch.tensor(2.0), torch.tensor(0)), (OTHER, torch.tensor(0.5), torch.tensor(6))]
    check(model, OTHER, torch.tensor(0.25), torch.tensor(2), others=others, dynamic=[ROWS, {}, {}], rtol=0, atol=0)


MOVES: dict[str, Function] = {
    "reshape": lambda q: q.reshape(-1, 3),
    "view": lambda q: q.view(-1, 2, 3),
    "flatten": lambda q: q.flatten(),
    "unflatten": lambda q: q.unflatten(1, (2, 3)),
    "t": lambda q: q.t(),
    "T": lambda q: q.T,
    "transpose": lambda q: q.transpose(0, 1),
    "permute": lambda q: q[None].permute(2, 0, 1),
    "contiguous": lambda q: q.t().contiguous(),
    "slice": lambda q: q[:, 1:-1:2],
    "select": lambda q: q[0],
    "narrow": lambda q: q.narrow(1, 2, 3),
    "split": lambda q: q.split(4, 1)[1],
    "chunk": lambda q: q.chunk(3, 1)[2],
    "unbind": lambda q: q.unbind(1)[5],
    "squeeze": lambda q: q[None].squeeze(0),
    "expand": lambda q: q[None].expand(2, -1, -1),
    "repeat": lambda q: q.repeat(2, 1),
    "flip": lambda q: q.flip(1),
    "clone": lambda q: q.clone(),
    "detach": lambda q: q.detach(),
    "index_select": lambda q: q.index_select(1, torch.tensor([3, 0])),
    "diagonal": lambda q: q[:1].diagonal(),
    "unfold": lambda q: q.unfold(1, 2, 2),
    "cat": lambda q: torch.cat([q, q.flip(0)], 1),
    "stack": lambda q: torch.stack([q, q]),
    "size": lambda q: q.view(q.shape[0] * 3, 2),
}


@pytest.mark.parametrize(("name", "dtype"), rotated(MOVES, [torch.quint8, torch.qint8], every=2))
def test_moved_about(name: str, dtype: torch.dtype) -> None:
    check(
        lambda x: MOVES[name](quantized(x, 0.25, 10, dtype)).dequantize(),
        OTHER,
        others=[(HARD,), (OTHER[1:4],)],
        dynamic=[ROWS],
        rtol=0,
        atol=0,
    )


def test_integers_are_moved_not_numbers() -> None:
    program = check(lambda x: quantized(x).t().reshape(2, -1).dequantize(), OTHER, others=[(-OTHER,)], rtol=0, atol=0)
    kinds = [node.op_type for node in program.model.graph]
    assert kinds == ["QuantizeLinear", "Transpose", "Reshape", "DequantizeLinear"]


def test_several_at_once() -> None:
    def model(x: torch.Tensor) -> Any:
        return torch.dequantize([quantized(x), quantized(x, 0.5, 4, torch.qint8)])

    check(model, OTHER, others=[(HARD,)], dynamic=[ROWS], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64], ids=str)
def test_dequantize_of_ordinary_tensors(dtype: torch.dtype) -> None:
    check(lambda x: x.dequantize(), OTHER.to(dtype), others=[(OTHER[:1].to(dtype),)], dynamic=[ROWS])


@FAKE
@pytest.mark.parametrize("exact", [False, True])
def test_writes_to_what_dequantize_made(exact: bool) -> None:
    """The numbers are memory of their own, although torch records quantised tensors as float32 too."""

    def model(x: torch.Tensor) -> Any:
        integers = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8).flip(1)
        y = integers.dequantize()
        y.narrow(0, -1, 1).unfold(1, 2, 2).add_(1)
        z = integers.dequantize().index_put((torch.tensor([0, 1, 0]),), x[:1], accumulate=True)
        return y, z, integers.dequantize()

    check(model, torch.randn(3, 4), others=[(torch.randn(3, 4) * 9,)], exact=exact, plugins=[])


def test_empty() -> None:
    check(lambda x: quantized(x[:, :0]).t().dequantize(), OTHER, others=[(OTHER[:1],)], dynamic=[ROWS])


@FAKE
def test_in_a_branch() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: quantized(x).dequantize() + 0, lambda x: x * 2, (x,))

    check(model, OTHER.abs(), others=[(-OTHER.abs(),)], rtol=0, atol=0)


REFUSED: dict[str, tuple[Function, str]] = {
    "add": (lambda x: quantized(x) + quantized(x), "aten::add.Tensor"),
    "to": (lambda x: quantized(x).to(torch.float32), "aten::to.dtype"),
    "fill_": (lambda x: quantized(x).fill_(1.0).dequantize(), "aten::fill.Scalar"),
    "index_put_": (lambda x: x.clone().index_put_((torch.tensor([0]),), quantized(x)[:1]), "aten::index_put.default"),
    "matmul": (lambda x: x @ quantized(x).t(), "aten::matmul.default"),
    "composite": (lambda x: torch.nn.functional.celu(quantized(x)), "aten::celu.default"),
    "where": (lambda x: torch.where(x > 0, quantized(x), quantized(x)).dequantize(), "aten::where.self"),
    "branch": (lambda x: torch.cond(x.sum() > 0, lambda q: q + 1, lambda q: q + 2, (quantized(x),)), "cond"),
}


@FAKE
@pytest.mark.parametrize("name", REFUSED)
def test_operators_without_a_rule_are_refused(name: str) -> None:
    model, op = REFUSED[name]
    with pytest.raises(ConversionError, match="is called on a quantised tensor") as error:
        onnxplug.to_onnx(model, (OTHER,))
    assert error.value.message.startswith(f"{op} at ")
    assert f"{Path(__file__).name}:" in error.value.message
    assert "dequantize()" in (error.value.hint or "")


UNSUPPORTED: dict[str, tuple[Function, str]] = {
    "output": (quantized, "the output 'output' is a quantised tensor, made at "),
    "part_of_output": (lambda x: (x, quantized(x).t()), "is a quantised tensor, made at "),
    "mixed": (lambda x: torch.cat([quantized(x), x]).dequantize(), "together with ordinary ones"),
    "quint4x2": (lambda x: quantized(x, dtype=torch.quint4x2).dequantize(), "torch.quint4x2"),
    "half": (lambda x: quantized(x.half()).dequantize(), "quantisation of float16"),
    "result_of_branch": (
        lambda x: torch.cond(x.sum() > 0, lambda x: quantized(x), lambda x: quantized(x, 0.5), (x,)).dequantize(),
        "the result of a branch",
    ),
}


@FAKE
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name: str) -> None:
    model, message = UNSUPPORTED[name]
    with pytest.raises(Unsupported, match=message):
        onnxplug.to_onnx(model, (OTHER,))


def test_a_rule_of_the_call_for_quantized_arguments() -> None:
    def relu(g: onnxplug.GraphBuilder, node: onnxplug.FxNode) -> Any:
        (x,) = node.args
        return x.with_integers(g.op.Max(x.integers, x.zero_point))

    rules = [onnxplug.Rule("quantized:aten::relu", relu)]
    model = lambda x: quantized(x).relu().dequantize()  # noqa: E731
    check(model, OTHER, others=[(HARD,)], dynamic=[ROWS], rules=rules, rtol=0, atol=0)
