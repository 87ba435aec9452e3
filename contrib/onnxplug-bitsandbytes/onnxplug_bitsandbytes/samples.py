"""Inputs to test the operators with: bytes and factors that bitsandbytes made."""

from __future__ import annotations

import importlib
from typing import Any

from onnxplug import OpSample

_SHAPE = (6, 70)


def samples() -> list[OpSample]:
    """At least one sample for each operator; products have any number of rows."""
    return [
        _sample("gemm_4bit", lambda: _product("nf4", 64), shapes=_rows(7)),
        _sample("gemm_4bit", lambda: _product("fp4", 512), shapes=_rows(7)),
        _sample("gemm_4bit", _nested, shapes=_rows(10)),
        _sample("dequantize_4bit", lambda: _restored("nf4", 32)),
        _sample("dequantize_4bit", lambda: _restored("fp4", 128)),
        _sample("dequantize_blockwise", _restored_bytes),
        _sample("int8_vectorwise_quant", lambda: (_wave(3, 40).half(), 2.5)),
        _sample("int8_vectorwise_quant", lambda: (_wave(3, 40).half(), 0.0), results=(0, 1)),
        _sample("int8_vectorwise_dequant", lambda: _levels()[:2]),
        _sample("int8_linear_matmul", lambda: (_levels()[0], _levels(4)[0]), shapes=[{0: "rows"}, None]),
        _sample("int8_mm_dequant", _accumulated),
        _sample("int8_scaled_mm", lambda: (_levels()[0], _levels(4)[0], _levels()[1], _levels(4)[1], _wave(4), None)),
        _sample("int8_mixed_scaled_mm", _mixed, results=(0,)),
    ]


def _rows(count: int) -> list[Any]:
    """Dynamic shapes of ``count`` arguments of gemm_4bit: any number of rows; the third argument is a pair of sizes."""
    return [{0: "rows"}, None, [None, None], *[None] * (count - 3)]


def _sample(op: str, make: Any, *, shapes: Any = None, results: Any = None) -> OpSample:
    def made() -> tuple[Any, ...]:
        importlib.import_module("bitsandbytes")  # registers the operators
        return make()

    return OpSample(f"bitsandbytes::{op}", made, dynamic_shapes=shapes, others=(), results=results)


def _wave(*shape: int) -> Any:
    import torch

    return torch.arange(float(torch.Size(shape).numel())).mul(1.3).sin().mul(3).reshape(shape)


def _quantised(kind: str, size: int, nested: bool = False) -> Any:
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(_wave(*_SHAPE), blocksize=size, quant_type=kind, compress_statistics=nested)


def _product(kind: str, size: int) -> tuple[Any, ...]:
    packed, state = _quantised(kind, size)
    return _wave(3, _SHAPE[1]), packed, list(_SHAPE), state.absmax, size, kind, _wave(_SHAPE[0])


def _nested() -> tuple[Any, ...]:
    packed, state = _quantised("nf4", 64, nested=True)
    inner = state.state2
    factors = (None, state.absmax, inner.code, state.offset)
    return _wave(3, _SHAPE[1]), packed, list(_SHAPE), inner.absmax, 64, "nf4", *factors


def _restored(kind: str, size: int) -> tuple[Any, ...]:
    import torch

    packed, state = _quantised(kind, size)
    return packed, state.absmax, size, kind, list(_SHAPE), torch.float32


def _restored_bytes() -> tuple[Any, ...]:
    import torch
    from bitsandbytes.functional import quantize_blockwise

    levels, state = quantize_blockwise(_wave(5, 60), blocksize=64)
    return levels, state.absmax, state.code, 64, torch.float32


def _levels(rows: int = 3) -> tuple[Any, ...]:
    from bitsandbytes.functional import int8_vectorwise_quant

    return int8_vectorwise_quant(_wave(rows, 40).half())


def _accumulated() -> tuple[Any, ...]:
    import torch

    product = (_wave(3, 4) * 1000).to(torch.int32)
    return product, _wave(3).abs(), _wave(4).abs(), torch.float16, _wave(4)


def _mixed() -> tuple[Any, ...]:
    from bitsandbytes.functional import int8_vectorwise_quant

    x = _wave(3, 40)
    levels, largest, outliers = int8_vectorwise_quant(x.half(), 2.9)
    return x, levels, _levels(4)[0], largest, _levels(4)[1], outliers, _wave(4)
