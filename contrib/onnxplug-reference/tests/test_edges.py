"""Cases that onnx's kernels, or ours, computed otherwise than ONNX Runtime: both evaluators against it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from onnxplug_reference import ExtendedReferenceEvaluator

from tests.support.onnxruntime_judge import agree, node_model

FLOATS = np.array([[-1.5, 0.25, 3.0], [2.0, -0.5, 1.0]], np.float32)
INTS = np.array([[2, -1, 3], [1, 4, 0]], np.int32)
PICTURE = np.arange(40, dtype=np.float32).reshape(1, 2, 4, 5) % 7
GRID = np.linspace(-1.6, 1.5, 18, dtype=np.float32).reshape(1, 3, 3, 2)
NAN = np.full(4, np.nan, np.float32)


def longs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


#: What it is about, to the operator, its opset, inputs, types of the results, and attributes.
ROWS: dict[str, tuple[str, int, list[Any], tuple[str, ...], dict[str, Any]]] = {
    **{
        f"{op} of {name}": (op, opset, [value], (str(value.dtype),), attributes)
        for op in ("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
        for opset, attributes in ((13, {"axes": [-1], "keepdims": 0}), (18, {"noop_with_empty_axes": 1}), (21, {}))
        for name, value in ((f"integers at {opset}", abs(INTS)), (f"floats at {opset}", abs(FLOATS)))
    },
    **{
        f"{op} of a single {x.dtype}": (op, 21, [x], (str(x.dtype),), {})
        for op in ("ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp")
        for x in (np.array(3, np.int32), np.array(2.5, np.float32))
    },
    "sums of powers of infinities": (
        "ReduceLogSumExp",
        18,
        [np.array([[np.inf, 1], [-np.inf, -np.inf], [np.nan, 1], [900, 901]], np.float32), longs(1)],
        ("float32",),
        {},
    ),
    "Softsign of a number": ("Softsign", 21, [np.array(0.5, np.float32)], ("float32",), {}),
    **{
        f"a slice from {start} to {end} by {step}": (
            "Slice",
            13,
            [FLOATS, longs(start), longs(end), longs(-1), longs(step)],
            ("float32",),
            {},
        )
        for start, end, step in ((-100, -200, -1), (-9, -(2**62), -2), (100, -200, -1), (-1, 0, -1), (-100, 100, 2))
    },
    **{
        f"the different elements, {outputs}, {attributes}": (
            "Unique",
            11,
            [np.array([[3, 1, 3], [2, 1, 0], [3, 1, 3]], np.float32)],
            ("float32", *["int64"] * 3)[:outputs],
            attributes,
        )
        for outputs in (1, 4)
        for attributes in ({}, {"sorted": 0}, {"axis": 0, "sorted": 0}, {"axis": 1, "sorted": 0}, {"axis": -1})
    },
    "no different elements": ("Unique", 11, [FLOATS[:0]], ("float32", *["int64"] * 3), {"sorted": 0}),
    "a matrix of nothing": ("Flatten", 21, [FLOATS[:, :0]], ("float32",), {"axis": 2}),
    "a matrix of a number": ("Flatten", 21, [np.array(2, np.float32)], ("float32",), {"axis": 0}),
    "the axes of a number": ("Transpose", 21, [np.array(2, np.float32)], ("float32",), {}),
    "a summand that does not count": (
        "Gemm",
        13,
        [FLOATS, np.ones((3, 4), np.float32), NAN],
        ("float32",),
        {"beta": 0.0},
    ),
    "the largest of no pictures": ("MaxPool", 12, [PICTURE[:0]], ("float32", "int64"), {"kernel_shape": [2, 2]}),
    "the means of no pictures": ("AveragePool", 19, [PICTURE[:0]], ("float32",), {"kernel_shape": [2, 2]}),
    **{
        f"cubic samples with {padding}, {corners}, at {opset}": (
            "GridSample",
            opset,
            [PICTURE, GRID],
            ("float32",),
            {"mode": mode, "padding_mode": padding, "align_corners": corners},
        )
        for opset, mode in ((16, "bicubic"), (20, "cubic"))
        for padding in ("border", "zeros")
        for corners in (0, 1)
    },
}


@pytest.mark.parametrize("name", ROWS)
def test_against_onnxruntime(name: str) -> None:
    op, opset, inputs, outputs, attributes = ROWS[name]
    agree(op, inputs, outputs, opset=opset, domain="", **attributes)


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float16])
def test_types_that_onnxruntime_lacks(dtype: Any) -> None:
    x = np.array([[3, 1], [2, 5]], dtype)
    for op, wanted in (("ReduceSumSquare", [10, 29]), ("ReduceLogSum", np.log([4, 7])), ("ReduceLogSumExp", None)):
        wanted = np.log(np.exp(x.astype(np.float64)).sum(1)) if wanted is None else wanted
        model, feeds = node_model(op, [x, longs(1)], (str(x.dtype),), opset=18, domain="", keepdims=0)
        (got,) = ExtendedReferenceEvaluator(model).run(None, feeds)
        assert got.dtype == dtype
        torch.testing.assert_close(torch.from_numpy(got), torch.from_numpy(np.asarray(wanted).astype(dtype)))
