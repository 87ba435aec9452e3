"""Operators whose kernels in ONNX Runtime and in PyTorch are farther apart than rounding of operands and results explains.

ONNX Runtime's Sigmoid is 0.5 plus a quotient of polynomials: its error is that of a number near 1, however small the result (1e-5
has two digits). Its Elu is exp(x) - 1, and a Tanh that is one or two units less exact than PyTorch's is all of ``1 - tanh(x)``.
The middle of PyTorch's affine grid is a difference of numbers near 1.
Where results differ, PyTorch's model therefore runs again with the results of these operators moved by as much.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onnxplug.torch_private import pytree

#: The largest difference of both kernels, in units of rounding at 1, of a result ``y`` and the operator's arguments. Measured over
#: -60 to 60 in float32 and float64; of a gated layer (LSTM), whose gates are in one kernel, estimated from its gates'.
_DISTANCES: dict[str, Callable[..., Any]] = {
    "aten::sigmoid": lambda y, x: torch.full_like(y, 1.5),
    "aten::silu": lambda y, x: 2 * x.abs(),
    "aten::glu": lambda y, x, dim=-1: 2 * x.chunk(2, dim)[0].abs(),
    "aten::mkldnn_rnn_layer": lambda y, *args: torch.full_like(y, 4),
    "aten::tanh": lambda y, x: 3.5 * y.abs(),
    "aten::erf": lambda y, x: 2 * y.abs(),
    "aten::gelu": lambda y, x, approximate="none": 3.5 * x.abs(),
    "aten::elu": lambda y, x, alpha=1, scale=1, input_scale=1: (x < 0) * abs(alpha * scale),
    "aten::celu": lambda y, x, alpha=1: (x < 0) * abs(1.5 * alpha),
    "aten::affine_grid_generator": lambda y, theta, *args: torch.full_like(y, 2) * _sums_of_rows(theta, y.dim()),
}


#: Operators whose kernels compute halves in halves; the others compute them in float32.
_IN_HALVES = frozenset({"aten::affine_grid_generator"})


def _sums_of_rows(theta: torch.Tensor, rank: int) -> torch.Tensor:
    """The largest coordinates that matrices give, as a tensor of a rank."""
    return theta.abs().sum(-1).view(theta.shape[0], *[1] * (rank - 2), theta.shape[1])


def are_apart(func: Any) -> bool:
    """Whether an operator's kernels are so."""
    return _name(func) in _DISTANCES


def moved_apart(func: Any, operands: Any, result: Any, up: bool | torch.Generator) -> Any:
    """An operator's result moved by the distance of its kernels; it keeps its sign.

    Args:
        func: The operator.
        operands: Its positional and keyword arguments.
        result: The result; as it is where the operator has no such kernels.
        up: All elements up, all down, or each up or down at random: the errors of near operands are alike, those of others are not.
    """
    distance = _DISTANCES.get(_name(func))
    if distance is None or not isinstance(result, torch.Tensor) or not result.is_floating_point():
        return result
    y = result.double()
    args, named = pytree.tree_map(lambda x: x.double() if isinstance(x, torch.Tensor) else x, operands)
    dtype = result.dtype if _name(func) in _IN_HALVES else torch.promote_types(result.dtype, torch.float32)
    far = distance(y, *args, **named) * torch.finfo(dtype).eps
    ups = torch.full_like(y, up) if isinstance(up, bool) else torch.randint(0, 2, y.shape, generator=up).to(y)
    moved = y + (2 * ups - 1) * far
    return torch.where(moved * y > 0, moved, (y.abs() + far).copysign(y)).to(result.dtype)


def _name(func: Any) -> str:
    return str(func._schema.name).removesuffix("_")
