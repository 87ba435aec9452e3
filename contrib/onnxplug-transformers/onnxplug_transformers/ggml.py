"""The blocks of GGUF: which bytes are numbers, scales and least weights.

A block of the formats called K has 256 weights in 8 or 16 smaller blocks, whose scales and least weights are integers of few bits
times a float that they share. The layouts are ggml's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from onnxplug_transformers.blocks import Blocks, Form

#: The integers that the sixteen numbers of IQ4_NL and IQ4_XS stand for.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

_Tensors = dict[str, torch.Tensor]


def take_blocks(kind: str, rows: torch.Tensor) -> Blocks:
    """A matrix of a file.

    Args:
        kind: A name of :data:`FORMATS`.
        rows: [N, bytes].
    """
    form, length, read = FORMATS[kind]
    tensors = read(rows.unflatten(1, (-1, length)))
    numbers = tensors.pop("numbers").flatten(1).unflatten(1, (-1, form.size))
    return Blocks(form, {"numbers": numbers, **{name: tensor.flatten(1) for name, tensor in tensors.items()}})


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[..., start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low halves of bytes, and behind them the high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., 8 * bytes], the lowest bit of each byte first."""
    return ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(x: torch.Tensor) -> _Tensors:
    return {"numbers": _nibbles(x[..., 2:]), "scales": _half(x, 0)}


def _q4_1(x: torch.Tensor) -> _Tensors:
    return {"numbers": _nibbles(x[..., 4:]), "scales": _half(x, 0), "least": _half(x, 2)}


def _q5_0(x: torch.Tensor) -> _Tensors:
    return {"numbers": _nibbles(x[..., 6:]) | (_bits(x[..., 2:6]) << 4), "scales": _half(x, 0)}


def _q5_1(x: torch.Tensor) -> _Tensors:
    numbers = _nibbles(x[..., 8:]) | (_bits(x[..., 4:8]) << 4)
    return {"numbers": numbers, "scales": _half(x, 0), "least": _half(x, 2)}


def _q8_0(x: torch.Tensor) -> _Tensors:
    return {"numbers": x[..., 2:] ^ 128, "scales": _half(x, 0)}


def _fourths(packed: torch.Tensor) -> torch.Tensor:
    """Numbers of 2 bits: the lowest in 32 bytes, then the next in these bytes, and so on; then of the next 32 bytes."""
    groups = packed.unflatten(-1, (-1, 1, 32))
    return ((groups >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3).flatten(-3)


def _q2_k(x: torch.Tensor) -> _Tensors:
    steps, floats = x[..., :16], {"scales": _half(x, 80), "least": -_half(x, 82)}
    return {"numbers": _fourths(x[..., 16:80]), "scale_steps": steps & 15, "least_steps": steps >> 4, **floats}


def _q3_k(x: torch.Tensor) -> _Tensors:
    high = ((x[..., None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1).flatten(-2)
    low, rest = _nibbles(x[..., 96:104]), x[..., 104:108]
    upper = ((rest[..., None, :] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3).flatten(-2)
    steps = (low | (upper << 4)).to(torch.int8) - 32
    return {"numbers": _fourths(x[..., 32:96]) | (high << 2), "scale_steps": steps, "scales": _half(x, 108)}


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight least weights of 6 bits in 12 bytes."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], -1)
    return scales, torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], -1)


def _with_least(x: torch.Tensor, numbers: torch.Tensor) -> _Tensors:
    steps, least = _six_bits(x[..., 4:16])
    floats = {"scales": _half(x, 0), "least": -_half(x, 2)}
    return {"numbers": numbers, "scale_steps": steps, "least_steps": least, **floats}


def _q4_k(x: torch.Tensor) -> _Tensors:
    return _with_least(x, _nibbles(x[..., 16:].unflatten(-1, (4, 32))).flatten(-2))


def _q5_k(x: torch.Tensor) -> _Tensors:
    high = ((x[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1).flatten(-2)
    return _with_least(x, _nibbles(x[..., 48:].unflatten(-1, (4, 32))).flatten(-2) | (high << 4))


def _q6_k(x: torch.Tensor) -> _Tensors:
    numbers = _nibbles(x[..., :128].unflatten(-1, (2, 64))).flatten(-2) | (_fourths(x[..., 128:192]) << 4)
    steps = x[..., 192:208].contiguous().view(torch.int8)
    return {"numbers": numbers, "scale_steps": steps, "scales": _half(x, 208)}


def _iq4_xs(x: torch.Tensor) -> _Tensors:
    low = torch.stack([x[..., 4:8] & 15, x[..., 4:8] >> 4], -1).flatten(-2)
    high = ((x[..., 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8)) & 3).flatten(-2)
    steps = (low | (high << 4)).to(torch.int8) - 32
    numbers = _nibbles(x[..., 8:].unflatten(-1, (8, 16))).flatten(-2)
    return {"numbers": numbers, "scale_steps": steps, "scales": _half(x, 0)}


#: The form of weights, the bytes of a block in the file, and the function that reads it, by the names of GGUF.
FORMATS: dict[str, tuple[Form, int, Callable[[torch.Tensor], _Tensors]]] = {
    "Q4_0": (Form(32, 4, 8), 18, _q4_0),
    "Q4_1": (Form(32, 4), 20, _q4_1),
    "Q5_0": (Form(32, 5, 16), 22, _q5_0),
    "Q5_1": (Form(32, 5), 24, _q5_1),
    "Q8_0": (Form(32, 8, 128), 34, _q8_0),
    "Q2_K": (Form(16, 2, pairs=True), 84, _q2_k),
    "Q3_K": (Form(16, 3, 4), 110, _q3_k),
    "Q4_K": (Form(32, 4), 144, _q4_k),
    "Q5_K": (Form(32, 5), 176, _q5_k),
    "Q6_K": (Form(16, 6, 32), 210, _q6_k),
    "IQ4_NL": (Form(32, 4, 0, _LEVELS), 18, _q4_0),
    "IQ4_XS": (Form(32, 4, 0, _LEVELS), 136, _iq4_xs),
}
