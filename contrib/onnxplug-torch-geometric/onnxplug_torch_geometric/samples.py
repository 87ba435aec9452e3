"""Inputs that the operators are tested with. Indices and pointers mean something: values drawn at random would not."""

from __future__ import annotations

import functools
from typing import Any

from onnxplug import OpSample

_Sample = functools.partial(OpSample, own_values=True)
_INDEX = [4, 0, 2, 2, 0, 4, 4]
_SORTED = [0, 0, 2, 2, 2, 4, 4]


def _wave(*shape: int) -> Any:
    import torch

    return torch.arange(float(torch.Size(shape).numel())).mul(1.3).sin().mul(3).round().reshape(shape)


def _longs(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int64)


def _scattered(op: str) -> list[OpSample]:
    rows = {0: "elements"}
    return [
        _Sample(op, lambda: (_wave(7, 3), _longs(_INDEX), 0, None, 6)),
        _Sample(op, lambda: (_wave(2, 7), _longs([_INDEX, [1, 1, 1, 5, 5, 3, 0]]), -1, None, None)),
        _Sample(
            op, lambda: (_wave(7, 2).long(), _longs(_INDEX), 0, None, 5), dynamic_shapes=(rows, rows, *(None,) * 3)
        ),
    ]


def _segmented(op: str) -> list[OpSample]:
    if op.endswith("coo"):
        return [
            _Sample(op, lambda: (_wave(7, 3), _longs(_SORTED), None, 6)),
            _Sample(op, lambda: (_wave(2, 7, 2), _longs([_SORTED, [1, 1, 1, 3, 3, 3, 3]]), None, None)),
        ]
    return [
        _Sample(op, lambda: (_wave(7, 3), _longs([0, 2, 2, 5, 7]), None)),
        _Sample(op, lambda: (_wave(2, 7, 2).long(), _longs([[0, 2, 2, 5, 6], [1, 1, 4, 4, 7]]), None)),
    ]


def _gathered(op: str) -> list[OpSample]:
    if op.endswith("coo"):
        return [
            _Sample(op, lambda: (_wave(4, 3), _longs([0, 0, 1, 3, 3]), None)),
            _Sample(op, lambda: (_wave(2, 4, 2), _longs([[0, 0, 1, 3, 3], [1, 1, 2, 2, 2]]), None)),
        ]
    return [
        _Sample(op, lambda: (_wave(4, 3), _longs([0, 2, 2, 5, 6]), None)),
        _Sample(op, lambda: (_wave(2, 4), _longs([[0, 2, 2, 5, 6], [0, 1, 4, 4, 6]]), None)),
    ]


def _of_pyg() -> list[OpSample]:
    return [
        _Sample("pyg::segment_matmul", lambda: (_wave(7, 3), _longs([0, 2, 2, 7]), _wave(3, 3, 4))),
        OpSample("pyg::grouped_matmul", lambda: ([_wave(2, 3), _wave(5, 4)], [_wave(3, 4), _wave(4, 2)])),
        OpSample("pyg::index_sort", lambda: (_longs(_INDEX), 5), dynamic_shapes=({0: "rows"}, None)),
        OpSample("pyg::index_sort", lambda: (_longs(_INDEX), None)),
        *(
            _Sample("pyg::sampled_op", lambda fn=fn: (_wave(4, 3), _wave(7, 3) + 0.5, _longs(_INDEX) // 2, None, fn))
            for fn in ("add", "sub", "mul", "div")
        ),
        _Sample("pyg::softmax_csr", lambda: (_wave(7, 3), _longs([0, 2, 2, 7]), 0)),
        _Sample("pyg::softmax_csr", lambda: (_wave(2, 7), _longs([0, 1, 5, 7]), 1)),
    ]


def samples() -> list[OpSample]:
    """Some of each operator."""
    from onnxplug_torch_geometric import FUNCTIONS

    kinds = {"scatter": _scattered, "segment": _segmented, "gather": _gathered}
    found = _of_pyg()
    for op in FUNCTIONS:
        made = kinds.get(op.partition("::")[2].partition("_")[0])
        if made is not None:
            found += made(op)
    return found
