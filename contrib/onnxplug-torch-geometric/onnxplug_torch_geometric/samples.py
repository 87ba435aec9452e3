"""Inputs to test the operators with. Indices and pointers are valid: values drawn at random would not be."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from onnxplug import OpSample

_PACKAGES = {"torch_scatter": "torch_scatter", "pyg": "pyg_lib"}
_INDEX = [4, 0, 2, 2, 0, 4, 4]
_SORTED = [0, 0, 2, 2, 2, 4, 4]


def _drawn(op: str, make_inputs: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
    """The inputs; the package that defines the operator is imported, if it is installed."""
    with contextlib.suppress(ImportError):
        importlib.import_module(_PACKAGES[op.partition("::")[0]])
    return make_inputs()


def _sample(
    op: str, make_inputs: Callable[[], tuple[Any, ...]], *, own_values: bool = True, shapes: Any = None
) -> OpSample:
    return OpSample(
        op, functools.partial(_drawn, op, make_inputs), dynamic_shapes=shapes, others=() if own_values else None
    )


def _wave(*shape: int) -> Any:
    import torch

    return torch.arange(float(torch.Size(shape).numel())).mul(1.3).sin().mul(3).round().reshape(shape)


def _longs(values: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int64)


def _scattered(op: str) -> list[OpSample]:
    rows = {0: "elements"}
    return [
        _sample(op, lambda: (_wave(7, 3), _longs(_INDEX), 0, None, 6)),
        _sample(op, lambda: (_wave(2, 7), _longs([_INDEX, [1, 1, 1, 5, 5, 3, 0]]), -1, None, None)),
        _sample(op, lambda: (_wave(7, 2).long(), _longs(_INDEX), 0, None, 5), shapes=(rows, rows, *(None,) * 3)),
    ]


def _segmented(op: str) -> list[OpSample]:
    if op.endswith("coo"):
        return [
            _sample(op, lambda: (_wave(7, 3), _longs(_SORTED), None, 6)),
            _sample(op, lambda: (_wave(2, 7, 2), _longs([_SORTED, [1, 1, 1, 3, 3, 3, 3]]), None, None)),
        ]
    return [
        _sample(op, lambda: (_wave(7, 3), _longs([0, 2, 2, 5, 7]), None)),
        _sample(op, lambda: (_wave(2, 7, 2).long(), _longs([[0, 2, 2, 5, 6], [1, 1, 4, 4, 7]]), None)),
    ]


def _gathered(op: str) -> list[OpSample]:
    if op.endswith("coo"):
        return [
            _sample(op, lambda: (_wave(4, 3), _longs([0, 0, 1, 3, 3]), None)),
            _sample(op, lambda: (_wave(2, 4, 2), _longs([[0, 0, 1, 3, 3], [1, 1, 2, 2, 2]]), None)),
        ]
    return [
        _sample(op, lambda: (_wave(4, 3), _longs([0, 2, 2, 5, 6]), None)),
        _sample(op, lambda: (_wave(2, 4), _longs([[0, 2, 2, 5, 6], [0, 1, 4, 4, 6]]), None)),
    ]


def _operands(operator: str) -> tuple[Any, ...]:
    return _wave(4, 3), _wave(7, 3) + 0.5, _longs(_INDEX) // 2, None, operator


def _of_pyg() -> list[OpSample]:
    return [
        _sample("pyg::segment_matmul", lambda: (_wave(7, 3), _longs([0, 2, 2, 7]), _wave(3, 3, 4))),
        _sample(
            "pyg::grouped_matmul", lambda: ([_wave(2, 3), _wave(5, 4)], [_wave(3, 4), _wave(4, 2)]), own_values=False
        ),
        _sample("pyg::index_sort", lambda: (_longs(_INDEX), 5), own_values=False, shapes=({0: "rows"}, None)),
        _sample("pyg::index_sort", lambda: (_longs(_INDEX), None), own_values=False),
        *(_sample("pyg::sampled_op", functools.partial(_operands, fn)) for fn in ("add", "sub", "mul", "div")),
        _sample("pyg::softmax_csr", lambda: (_wave(7, 3), _longs([0, 2, 2, 7]), 0)),
        _sample("pyg::softmax_csr", lambda: (_wave(2, 7), _longs([0, 1, 5, 7]), 1)),
    ]


def samples() -> list[OpSample]:
    """The samples of all operators."""
    from onnxplug_torch_geometric import FUNCTIONS

    kinds = {"scatter": _scattered, "segment": _segmented, "gather": _gathered}
    made = _of_pyg()
    for op in FUNCTIONS:
        make_inputs = kinds.get(op.partition("::")[2].partition("_")[0])
        if make_inputs is not None:
            made += make_inputs(op)
    return made
