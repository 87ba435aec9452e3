"""Our kernels of ai.onnx, and earlier versions of other operators, against ONNX Runtime's, in both evaluators."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnxplug_reference import ExtendedReferenceEvaluator, TorchReferenceEvaluator

from onnxplug.build.dtypes import to_torch
from onnxplug.errors import EvaluationError
from tests.support.onnxruntime_judge import agree, node_model
from tests.support.tolerances import looser


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Random numbers of a shape."""
    numbers = np.random.default_rng(zlib.crc32(repr((shape, seed)).encode()))
    return (numbers.standard_normal(shape) * scale).astype(np.float32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def _check(op: str, inputs: list[Any], opset: int, outputs: tuple[Any, ...] = ("float32",), **attributes: Any) -> None:
    agree(op, inputs, outputs, opset=opset, domain="", **attributes)


# -- recurrent layers ----------------------------------------------------------------------------------------------------

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def _recurrent(op: str, directions: int, *, lengths: bool, states: bool, bias: bool, peepholes: bool) -> list[Any]:
    steps, batch, width, hidden, gates = 5, 3, 4, 6, _GATES[op]
    inputs: list[Any] = [
        draw(steps, batch, width),
        draw(directions, gates * hidden, width, seed=1, scale=0.5),
        draw(directions, gates * hidden, hidden, seed=2, scale=0.5),
        draw(directions, 2 * gates * hidden, seed=3) if bias else None,
        np.array([5, 2, 3], np.int32) if lengths else None,
        draw(directions, batch, hidden, seed=4) if states else None,
    ]
    if op == "LSTM":
        inputs.append(draw(directions, batch, hidden, seed=5) if states else None)
        inputs.append(draw(directions, 3 * hidden, seed=6) if peepholes else None)
    return inputs


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("op", _GATES)
@pytest.mark.parametrize("opset", [13, 22])
def test_recurrent(op: str, direction: str, opset: int) -> None:
    count = 3 if op == "LSTM" else 2
    directions = 2 if direction == "bidirectional" else 1
    for lengths, states, bias in itertools.product((False, True), repeat=3):
        inputs = _recurrent(
            op, directions, lengths=lengths, states=states, bias=bias, peepholes=op == "LSTM" and states
        )
        _check(op, inputs, opset, ("float32",) * count, direction=direction, hidden_size=6)


def test_recurrent_options() -> None:
    inputs = _recurrent("GRU", 1, lengths=True, states=True, bias=True, peepholes=False)
    _check("GRU", inputs, 14, ("float32",) * 2, hidden_size=6, linear_before_reset=1)
    for op, clip in itertools.product(_GATES, (0.3, 2.0)):
        inputs = _recurrent(op, 1, lengths=False, states=True, bias=True, peepholes=False)
        _check(op, inputs, 14, hidden_size=6, clip=clip)
    names = {"RNN": ["Relu"], "GRU": ["HardSigmoid", "Softsign"], "LSTM": ["HardSigmoid", "LeakyRelu", "Tanh"]}
    for op, chosen in names.items():
        inputs = _recurrent(op, 1, lengths=False, states=True, bias=True, peepholes=False)
        _check(op, inputs, 14, hidden_size=6, activations=chosen)
    inputs = _recurrent("RNN", 2, lengths=False, states=True, bias=True, peepholes=False)
    _check("RNN", inputs, 14, hidden_size=6, direction="bidirectional", activations=["Relu", "Tanh"])
    inputs = _recurrent("RNN", 1, lengths=False, states=True, bias=True, peepholes=False)
    _check("RNN", inputs, 14, hidden_size=6, activations=["LeakyRelu"], activation_alpha=[0.3])
    inputs = _recurrent("LSTM", 1, lengths=False, states=True, bias=True, peepholes=False)
    _check("LSTM", inputs, 14, hidden_size=6, input_forget=1)


@pytest.mark.parametrize("op", _GATES)
def test_the_batch_first(op: str) -> None:
    """``layout=1``, against ONNX Runtime's ``layout=0`` with the first two axes swapped."""
    inputs = _recurrent(op, 1, lengths=True, states=True, bias=True, peepholes=False)
    model, feeds = node_model(op, inputs, ["float32", "float32"], domain="", hidden_size=6)
    swapped = [v.swapaxes(0, 1) if i in (0, 5, 6) and v is not None else v for i, v in enumerate(inputs)]
    other, others = node_model(op, swapped, ["float32", "float32"], domain="", hidden_size=6, layout=1)
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        (y, h), (z, g) = evaluator(model).run(None, feeds), evaluator(other).run(None, others)
        np.testing.assert_array_equal(np.asarray(y).transpose(2, 0, 1, 3), z)
        np.testing.assert_array_equal(np.asarray(h).swapaxes(0, 1), g)


def test_unknown_activations() -> None:
    inputs = _recurrent("RNN", 1, lengths=False, states=False, bias=False, peepholes=False)
    model, feeds = node_model("RNN", inputs, ["float32"], domain="", hidden_size=6, activations=["Sine"])
    with pytest.raises(EvaluationError, match="unknown activation 'Sine'"):
        ExtendedReferenceEvaluator(model).run(None, feeds)


# -- one row a case: operator, opset, inputs, attributes -----------------------------------------------------------------

_X4 = draw(2, 4, 6, 5)
_PARAMETERS = [draw(4, seed=k) for k in range(3)] + [np.abs(draw(4, seed=9)) + 0.1]
Row = tuple[str, int, list[Any], dict[str, Any]]
ROWS: list[Row] = [
    *(("BatchNormalization", v, [_X4, *_PARAMETERS], {"epsilon": 1e-3}) for v in (7, 9, 13, 14, 15)),
    *(
        (op, v, [draw(2, 3, 4)], {"axis": a})
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for v in (11, 13)
        for a in (0, 1, -1)
    ),
    *((op, 11, [draw(2, 3, 4)], {}) for op in ("Softmax", "LogSoftmax", "Hardmax")),
    ("Gelu", 20, [draw(3, 7, scale=3)], {}),
    ("Gelu", 20, [draw(3, 7, scale=3)], {"approximate": "tanh"}),
    ("Mish", 18, [draw(3, 7, scale=30)], {}),
    ("HardSwish", 14, [draw(3, 7, scale=5)], {}),
    ("Softplus", 1, [draw(3, 7, scale=90)], {}),
    ("Sigmoid", 13, [draw(3, 7, scale=90)], {}),
    ("MeanVarianceNormalization", 13, [_X4], {}),
    ("MeanVarianceNormalization", 9, [_X4], {"axes": [0, 2, 3]}),
    ("GroupNormalization", 21, [_X4, draw(4), draw(4, seed=1)], {"num_groups": 2, "epsilon": 1e-3}),
    ("GroupNormalization", 18, [_X4, draw(2), draw(2, seed=1)], {"num_groups": 2, "epsilon": 1e-3}),
    ("InstanceNormalization", 6, [_X4, draw(4), draw(4, seed=1)], {"epsilon": 1e-3}),
    ("LayerNormalization", 17, [_X4, draw(6, 5), draw(6, 5, seed=1)], {"axis": 2}),
    ("LRN", 13, [draw(2, 7, 3, 4)], {"size": 3, "alpha": 0.1}),
    ("LpNormalization", 1, [_X4], {"axis": 1, "p": 1}),
    ("GlobalLpPool", 2, [_X4], {"p": 3}),
    ("GlobalLpPool", 2, [_X4], {}),
    ("LpPool", 18, [_X4], {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1], "p": 3}),
    ("MaxRoiPool", 1, [_X4, np.array([[0, 0, 0, 3, 4], [1, 1, 2, 4, 5]], np.float32)], {"pooled_shape": [2, 2]}),
    ("MaxRoiPool", 1, [_X4, np.array([[0, 0, 0, 7, 9]], np.float32)], {"pooled_shape": [3, 2], "spatial_scale": 0.5}),
    ("Scatter", 9, [draw(3, 4), longs(1, 0, 2, 1).reshape(1, 4), draw(1, 4, seed=2)], {}),
    ("Scatter", 10, [draw(3, 4), longs(1, 0, 2).reshape(3, 1), draw(3, 1, seed=2)], {"axis": 1}),
    ("GatherElements", 13, [draw(80, 3), longs(*range(-80, 80, 2)).reshape(40, 2)], {"axis": 0}),
    ("ReduceSum", 11, [_X4], {"axes": [1, -1], "keepdims": 0}),
    ("ReduceSum", 13, [_X4, longs(1, -1)], {"keepdims": 0}),
    ("ReduceSum", 13, [_X4], {"noop_with_empty_axes": 1}),
    ("ReduceSumSquare", 18, [_X4], {"noop_with_empty_axes": 1}),
    *(
        (f"Reduce{op}", 13, [np.abs(_X4) + 0.1], {"axes": [0, 2]})
        for op in ("Max", "Min", "Mean", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    ),
    *(
        (f"Reduce{op}", 18, [np.abs(_X4) + 0.1, longs(1)], {"keepdims": 0})
        for op in ("Max", "Min", "Mean", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")
    ),
    ("Clip", 6, [_X4], {"min": -0.5, "max": 0.25}),
    ("Clip", 13, [_X4, None, np.float32(0.25).reshape(())], {}),
    ("Squeeze", 11, [draw(1, 3, 1)], {"axes": [0, -1]}),
    ("Squeeze", 13, [draw(1, 3, 1), longs(-1)], {}),
    ("Unsqueeze", 11, [draw(2, 3)], {"axes": [0, 3]}),
    ("Unsqueeze", 13, [draw(2, 3), longs(-1, 1)], {}),
    ("Pad", 11, [draw(3, 4), longs(1, 0, -1, 2), np.float32(7).reshape(())], {}),
    *(("Pad", 18, [draw(3, 4), longs(1, 2, 2, 1)], {"mode": m}) for m in ("constant", "edge", "reflect")),
    ("Pad", 19, [draw(3, 4), longs(4, 2, 5, 1)], {"mode": "wrap"}),
    ("Pad", 18, [draw(3, 4), longs(2, 1), np.float32(3).reshape(()), longs(-1)], {}),
    *(
        ("Slice", 13, [draw(5, 6), longs(a), longs(b), longs(1), longs(s)], {})
        for a, b, s in ((1, 5, 2), (-1, -99, -2), (9, 0, -1), (3, 3, 1))
    ),
    *(
        (
            "AveragePool",
            v,
            [_X4],
            {"kernel_shape": [3, 2], "pads": [1, 1, 1, 0], "strides": [2, 2], "ceil_mode": c, "count_include_pad": i},
        )
        for v in (11, 19)
        for c in (0, 1)
        for i in (0, 1)
    ),
    ("AveragePool", 19, [_X4], {"kernel_shape": [2, 2], "dilations": [2, 3]}),
    *(
        ("MaxPool", 12, [_X4], {"kernel_shape": [3, 2], "strides": [2, 2], "ceil_mode": c, "dilations": [1, 2]})
        for c in (0, 1)
    ),
    *(
        (op, 11, [_X4], {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": a})
        for op in ("MaxPool", "AveragePool")
        for a in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    *(
        ("Conv", 11, [_X4, draw(6, 2, 3, 2), draw(6)], {"group": 2, "strides": [2, 1], "auto_pad": a})
        for a in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    ("Conv", 11, [_X4, draw(6, 2, 3, 2)], {"group": 2, "pads": [1, 0, 2, 1], "dilations": [2, 1]}),
    ("Conv", 11, [draw(2, 3, 9), draw(4, 3, 3)], {}),
    ("Conv", 11, [draw(1, 2, 4, 5, 6), draw(3, 2, 2, 3, 2)], {"pads": [1, 0, 1, 0, 1, 0]}),
    (
        "ConvTranspose",
        11,
        [_X4, draw(4, 3, 3, 2), draw(6)],
        {"group": 2, "strides": [2, 3], "pads": [1, 0, 0, 1], "output_padding": [1, 2]},
    ),
    ("ConvTranspose", 11, [_X4, draw(4, 3, 3, 3)], {"strides": [2, 2], "output_shape": [12, 11]}),
    *(
        ("ConvTranspose", 11, [_X4, draw(4, 3, 3, 3)], {"strides": [2, 2], "auto_pad": a})
        for a in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    ("ConvTranspose", 11, [_X4, draw(4, 3, 3, 2)], {"dilations": [2, 2]}),
    *(
        ("GridSample", v, [_X4, draw(2, 3, 4, 2)], {"mode": m, "padding_mode": p, "align_corners": a})
        for v, m in ((16, "bilinear"), (16, "nearest"), (20, "linear"))
        for p in ("zeros", "border", "reflection")
        for a in (0, 1)
    ),
    ("GridSample", 16, [_X4, draw(2, 3, 4, 2)], {}),
    *(("DepthToSpace", 13, [draw(2, 8, 3, 2)], {"blocksize": 2, "mode": m}) for m in ("DCR", "CRD")),
    ("SpaceToDepth", 13, [draw(2, 2, 4, 6)], {"blocksize": 2}),
    *(
        ("CumSum", 14, [draw(3, 4), np.array(a, np.int64)], {"exclusive": e, "reverse": r})
        for a in (0, -1)
        for e in (0, 1)
        for r in (0, 1)
    ),
    ("Gemm", 7, [draw(3, 4), draw(4, 5), draw(5)], {"alpha": 0.5, "beta": 2.0}),
    ("Gemm", 13, [draw(4, 3), draw(5, 4)], {"transA": 1, "transB": 1}),
    ("Einsum", 12, [draw(2, 3, 4), draw(2, 4, 5)], {"equation": "bij, bjk -> bik"}),
    ("Expand", 13, [draw(3, 1), longs(2, 1, 4)], {}),
    ("Tile", 13, [draw(2, 3), longs(2, 3)], {}),
    ("Trilu", 14, [draw(2, 4, 5), np.array(-1, np.int64)], {"upper": 0}),
    ("Pow", 13, [np.abs(draw(3, 4)), draw(4)], {}),
    ("Mod", 13, [draw(3, 4), draw(4)], {"fmod": 1}),
    ("PRelu", 16, [draw(2, 4, 3), draw(4, 1)], {}),
    ("Elu", 6, [draw(3, 4, scale=3)], {"alpha": 0.7}),
    ("Celu", 12, [draw(3, 4, scale=3)], {"alpha": 0.7}),
    ("Selu", 6, [draw(3, 4, scale=3)], {}),
    ("Shrink", 9, [draw(3, 4, scale=3)], {"bias": 0.3, "lambd": 0.6}),
    ("HardSigmoid", 6, [draw(3, 4, scale=3)], {"alpha": 0.3, "beta": 0.4}),
    ("ThresholdedRelu", 10, [draw(3, 4, scale=3)], {"alpha": 0.5}),
    *(
        (
            "RoiAlign",
            v,
            [_X4, np.array([[0, 0, 3, 4], [1, 1, 4, 5]], np.float32), longs(0, 1)],
            {"output_height": 2, "output_width": 3, "sampling_ratio": 2, **m},
        )
        for v in (10, 16)
        for m in ({}, {"mode": "max"})
    ),
    ("GatherND", 12, [draw(2, 3, 4), np.array([[[1], [-1]], [[0], [2]]], np.int64)], {"batch_dims": 1}),
    ("ScatterND", 16, [draw(4, 3), np.array([[1], [-1]], np.int64), draw(2, 3)], {}),
    (
        "ScatterElements",
        18,
        [draw(3, 4), np.array([[0, 1], [2, 0]], np.int64), draw(2, 2)],
        {"axis": 1, "reduction": "max"},
    ),
    ("OneHot", 11, [longs(0, 2, -1), longs(3), np.array([1, 5], np.float32)], {"axis": 0}),
    ("Upsample", 9, [draw(1, 2, 3, 4), np.array([1, 1, 2, 3], np.float32)], {"mode": "nearest"}),
    ("Upsample", 9, [draw(1, 2, 3, 4), np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    ("Resize", 10, [draw(1, 2, 3, 4), np.array([1, 1, 2, 3], np.float32)], {"mode": "nearest"}),
    ("Resize", 10, [draw(1, 2, 3, 4), np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    *(
        ("Resize", v, [draw(1, 2, 3, 4), None, None, longs(1, 2, 5, 7)], {"mode": m})
        for v in (13, 19)
        for m in ("nearest", "linear", "cubic")
    ),
    *(
        (
            "Resize",
            13,
            [draw(1, 2, 3, 4), None, None, longs(1, 2, 5, 7)],
            {"mode": "linear", "coordinate_transformation_mode": c},
        )
        for c in ("align_corners", "asymmetric", "pytorch_half_pixel")
    ),
    ("ReverseSequence", 10, [draw(4, 3), longs(1, 4, 2)], {"time_axis": 0, "batch_axis": 1}),
    ("Mean", 13, [draw(3, 4), draw(4), draw(3, 1)], {}),
    ("Max", 13, [draw(3, 4), draw(4), draw(3, 1)], {}),
    ("EyeLike", 9, [draw(3, 5)], {"k": 1}),
    ("Det", 11, [draw(2, 3, 3)], {}),
    (
        "RotaryEmbedding",
        23,
        [draw(2, 3, 4, 8), draw(9, 4), draw(9, 4, seed=1), longs(0, 3, 8, 1, 1, 2, 7, 0).reshape(2, 4)],
        {},
    ),
    ("RMSNormalization", 23, [draw(2, 3, 8), draw(8)], {"epsilon": 1e-4}),
]


def _name(row: Row) -> str:
    return f"{row[0]}-{row[1]}-{','.join(f'{k}={v}' for k, v in row[3].items())}-{','.join(str(getattr(x, 'shape', '')) for x in row[2])}"


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_against_onnxruntime(row: Row) -> None:
    op, opset, inputs, attributes = row
    _check(op, inputs, opset, **attributes)


# -- integers ------------------------------------------------------------------------------------------------------------

_INTS = np.array([[-7, 3, 0], [5, -2, 9]], np.int64)
INTEGERS: list[tuple[str, int, list[Any], tuple[str, ...], dict[str, Any]]] = [
    *((op, 13, [_INTS, longs(3, -2, 4)], ("int64",), {}) for op in ("Add", "Sub", "Mul", "Div", "Mod")),
    ("Mod", 13, [_INTS, longs(3, -2, 4)], ("int64",), {"fmod": 1}),
    ("Pow", 13, [np.abs(_INTS), longs(2, 3, 0)], ("int64",), {}),
    *(
        (op, 13, [_INTS], ("int64",), {"keepdims": 0, "axes": [1]})
        for op in ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd")
    ),
    ("ReduceSum", 13, [_INTS, longs(0)], ("int64",), {}),
    ("TopK", 11, [np.array([[1, 3, 3, 2, 3]], np.int64), longs(3)], ("int64", "int64"), {}),
    ("TopK", 11, [np.array([[1, 3, 3, 2, 1]], np.int64), longs(3)], ("int64", "int64"), {"largest": 0}),
    *(
        (op, 13, [np.array([[1, 3, 3, 2]], np.float32)], ("int64",), {"axis": 1, "select_last_index": s})
        for op in ("ArgMax", "ArgMin")
        for s in (0, 1)
    ),
    ("CumSum", 14, [_INTS, np.array(1, np.int64)], ("int64",), {"exclusive": 1}),
    ("Cast", 13, [np.array([1.9, -1.9, 0.0], np.float32)], ("int32",), {"to": onnx.TensorProto.INT32}),
    ("Cast", 13, [np.array([1.9, 0.0], np.float32)], ("bool",), {"to": onnx.TensorProto.BOOL}),
    *(
        (
            "MaxPool",
            12,
            [draw(1, 2, 5, 6)],
            ("float32", "int64"),
            {"kernel_shape": [3, 2], "pads": [1, 0, 1, 1], "strides": [2, 1], "storage_order": o},
        )
        for o in (0, 1)
    ),
    ("MaxPool", 12, [draw(1, 2, 9, scale=50).astype(np.int8)], ("int8",), {"kernel_shape": [3]}),
    ("NonZero", 13, [_INTS], ("int64",), {}),
    ("Shape", 15, [draw(2, 3, 4)], ("int64",), {"start": -2}),
    ("Split", 13, [_INTS, longs(1, 2)], ("int64", "int64"), {"axis": 1}),
    ("Split", 18, [longs(1, 2, 3, 4, 5)], ("int64", "int64"), {"num_outputs": 2}),
    ("Unique", 11, [longs(3, 1, 3, 2)], ("int64",) * 4, {}),
    (
        "MatMulInteger",
        10,
        [
            np.array([[1, 2], [3, 255]], np.uint8),
            np.array([[-3, 4], [5, -6]], np.int8),
            np.array(3, np.uint8),
            np.array(-1, np.int8),
        ],
        ("int32",),
        {},
    ),
    ("QuantizeLinear", 13, [draw(2, 3, scale=30), np.float32(0.25).reshape(()), np.array(7, np.uint8)], ("uint8",), {}),
    (
        "QuantizeLinear",
        13,
        [draw(2, 3, scale=30), np.array([0.5, 0.25, 1], np.float32), np.array([1, -2, 3], np.int8)],
        ("int8",),
        {"axis": 1},
    ),
    (
        "DequantizeLinear",
        13,
        [np.array([[1, 2, 250]], np.uint8), np.array([0.5, 0.25, 1], np.float32), np.array([1, 2, 3], np.uint8)],
        ("float32",),
        {"axis": 1},
    ),
    (
        "DequantizeLinear",
        21,
        [np.arange(16, dtype=np.int8).reshape(2, 8), draw(2, 2)],
        ("float32",),
        {"axis": 1, "block_size": 4},
    ),
    (
        "BitShift",
        11,
        [np.array([1, 200, 3], np.uint8), np.array([1, 2, 1], np.uint8)],
        ("uint8",),
        {"direction": "RIGHT"},
    ),
    ("Range", 11, [np.array(9, np.int64), np.array(-2, np.int64), np.array(-3, np.int64)], ("int64",), {}),
]


@pytest.mark.parametrize(
    ("op", "opset", "inputs", "outputs", "attributes"), INTEGERS, ids=[f"{i}-{r[0]}" for i, r in enumerate(INTEGERS)]
)
def test_integers(op: str, opset: int, inputs: list[Any], outputs: tuple[str, ...], attributes: dict[str, Any]) -> None:
    _check(op, inputs, opset, outputs, **attributes)


# -- special numbers -----------------------------------------------------------------------------------------------------

_SPECIAL = np.array([0.0, -0.0, 1.5, -2.5, 80, -80, 1e30, np.inf, -np.inf, np.nan], np.float32)


@pytest.mark.parametrize(
    "op",
    "Abs Ceil Erf Exp Floor HardSwish IsInf IsNaN Log Mish Neg Relu Round Sigmoid Sign Softplus Softsign Sqrt Tanh".split(),
)
def test_special_numbers(op: str) -> None:
    """NumPy's evaluator against PyTorch's operators, not against ONNX Runtime, whose kernels differ at NaN."""
    kind = "bool" if op.startswith("Is") else "float32"
    model, feeds = node_model(op, [_SPECIAL], [kind], opset=22, domain="")
    (mine,), (torchs,) = (e(model).run(None, feeds) for e in (ExtendedReferenceEvaluator, TorchReferenceEvaluator))
    np.testing.assert_allclose(mine, np.asarray(torchs), **looser("reference, functions"))


# -- narrow types --------------------------------------------------------------------------------------------------------

_FLOAT8 = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e5m2fnuz": torch.float8_e5m2fnuz,
}
_NARROW: list[tuple[str, list[Any], dict[str, Any], Callable[..., torch.Tensor]]] = [
    ("Add", [draw(3, 4), draw(4)], {}, torch.add),
    ("Exp", [draw(3, 4)], {}, torch.exp),
    ("MatMul", [draw(3, 40), draw(40, 5)], {}, torch.matmul),
    ("Softmax", [draw(3, 40)], {}, lambda x: torch.softmax(x, -1)),
    ("ReduceMean", [draw(3, 40)], {}, lambda x: x.mean().reshape(1, 1)),
    ("Gelu", [draw(3, 40)], {}, torch.nn.functional.gelu),
    (
        "LayerNormalization",
        [draw(3, 40), draw(40), draw(40, seed=1)],
        {},
        lambda x, w, b: torch.layer_norm(x, (40,), w, b),
    ),
    ("Conv", [draw(2, 4, 9), draw(3, 4, 3)], {}, torch.conv1d),
    ("Transpose", [draw(3, 4)], {}, lambda x: x.mT),
    ("Concat", [draw(3, 4), draw(3, 2)], {"axis": 1}, lambda *x: torch.cat(x, 1)),
    ("Where", [draw(3, 4) > 0, draw(3, 4), draw(4)], {}, torch.where),
    ("Max", [draw(3, 4), draw(4)], {}, torch.maximum),
    ("TopK", [draw(3, 9), longs(4)], {}, lambda x, k: torch.topk(x, 4)[0]),
    ("Clip", [draw(3, 9)], {}, lambda x: x),
    ("CumSum", [draw(9), np.array(0, np.int64)], {}, lambda x, axis: x.cumsum(0)),
    ("Pad", [draw(3, 4), longs(1, 0, 2, 1)], {}, lambda x, p: torch.nn.functional.pad(x, (0, 1, 1, 2))),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("op", "inputs", "attributes", "function"), _NARROW, ids=[r[0] for r in _NARROW])
def test_halves_against_torch(
    op: str, inputs: list[Any], attributes: dict[str, Any], function: Any, dtype: torch.dtype
) -> None:
    """Results are at most a step from torch's in float32 on the rounded inputs, rounded once, and of the same dtype."""
    kind = np.float16 if dtype == torch.float16 else ml_dtypes.bfloat16
    narrow = [x.astype(kind) if x.dtype == np.float32 else x for x in inputs]
    outputs = ["float16" if dtype == torch.float16 else "bfloat16", *(["int64"] if op == "TopK" else [])]
    model, feeds = node_model(op, narrow, outputs, opset=22, domain="", **attributes)
    got = to_torch(ExtendedReferenceEvaluator(model).run(None, feeds)[0])
    wide = [to_torch(x).float() if x.dtype == kind else to_torch(x) for x in narrow]
    expected = function(*wide).to(dtype)
    assert got.dtype == dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=(4 if op == "Softmax" else 1) * step, atol=step / 16)


@pytest.mark.parametrize("name", _FLOAT8)
def test_casts_to_eight_bits_against_torch(name: str) -> None:
    """Numbers within the range round as in torch, to the nearest even; ONNX saturates where torch does not."""
    x = np.concatenate([draw(500, scale=3), draw(500, scale=0.01), np.array([0, -0.0, 1, -1], np.float32)])
    element = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(getattr(ml_dtypes, name)))
    model, feeds = node_model("Cast", [x], [name], opset=21, domain="", to=element)
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        got = evaluator(model).run(None, feeds)[0]
        got = got if isinstance(got, torch.Tensor) else to_torch(got)
        assert got.dtype == _FLOAT8[name]
        torch.testing.assert_close(got.float(), torch.from_numpy(x).to(_FLOAT8[name]).float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", _FLOAT8)
def test_eight_bit_floats_move_and_come_back(name: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, name))
    x = draw(3, 4).astype(kind)
    model, feeds = node_model("Transpose", [x], [name], opset=21, domain="")
    (y,) = ExtendedReferenceEvaluator(model).run(None, feeds)
    assert y.dtype == kind
    np.testing.assert_array_equal(y.astype(np.float32), x.T.astype(np.float32))
    model, feeds = node_model("DequantizeLinear", [x, np.float32(0.5).reshape(())], ["float32"], opset=21, domain="")
    (y,) = ExtendedReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_array_equal(y, x.astype(np.float32) * np.float32(0.5))


@pytest.mark.parametrize("kind", [ml_dtypes.int4, ml_dtypes.uint4])
def test_four_bit_weights(kind: Any) -> None:
    """A product with a weight in blocks of 4-bit integers, against ONNX Runtime."""
    low = -8 if kind is ml_dtypes.int4 else 0
    weight = np.random.default_rng(0).integers(low, low + 16, (8, 6)).astype(kind)
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]> g (float[N, 8] x) => (float[N, 6] y)
        { d = DequantizeLinear <axis = 0, block_size = 4> (w, s, z)\n y = MatMul(x, d) }"""
    )
    scales, zeros = np.abs(draw(2, 6)) + 0.1, np.full((2, 6), low + 5).astype(kind)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(v, n) for n, v in (("w", weight), ("s", scales), ("z", zeros))
    )
    from tests.support.onnxruntime_judge import by_onnxruntime

    feeds = {"x": draw(3, 8)}
    (expected,) = by_onnxruntime(model, feeds)
    for evaluator in (ExtendedReferenceEvaluator, TorchReferenceEvaluator):
        np.testing.assert_allclose(
            np.asarray(evaluator(model).run(None, feeds)[0]), expected, **looser("reference, products")
        )


# -- random numbers ------------------------------------------------------------------------------------------------------


def test_random_numbers() -> None:
    """Distributions, element types, and equal numbers for equal seeds."""
    for op, attributes, mean, deviation in (
        ("RandomNormal", {"mean": 2.0, "scale": 3.0}, 2.0, 3.0),
        ("RandomUniform", {"low": -1.0, "high": 3.0}, 1.0, 4 / 12**0.5),
    ):
        model, _ = node_model(op, [], ["float64"], domain="", shape=[20000], dtype=11, seed=3.0, **attributes)
        (x,), (again,) = (ExtendedReferenceEvaluator(model).run(None, {}) for _ in range(2))
        np.testing.assert_array_equal(x, again)
        assert abs(x.mean() - mean) < 0.1
        assert abs(x.std() - deviation) < 0.1
    chances = np.full(20000, 0.3, np.float32)
    model, feeds = node_model("Bernoulli", [chances], ["float32"], domain="", opset=15)
    (x,) = ExtendedReferenceEvaluator(model).run(None, feeds)
    assert set(np.unique(x)) == {0, 1}
    assert abs(x.mean() - 0.3) < 0.02
    model, feeds = node_model(
        "Multinomial", [np.log(np.array([[0.7, 0.2, 0.1]], np.float32))], ["int32"], domain="", sample_size=20000
    )
    (x,) = ExtendedReferenceEvaluator(model).run(None, feeds)
    np.testing.assert_allclose(np.bincount(x[0]) / 20000, [0.7, 0.2, 0.1], **looser("frequencies"))
    model, feeds = node_model("RandomUniformLike", [np.float16(1).reshape(())], ["float16"], domain="")
    (x,) = ExtendedReferenceEvaluator(model).run(None, feeds)
    assert (x.shape, x.dtype) == ((), np.float16)
