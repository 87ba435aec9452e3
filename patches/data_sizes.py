"""Functions of torch that read dynamic sizes as plain numbers, a layer that branches on sizes that follow from data, and bounds."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv, has_free_symbols

from onnxplug.capture.patching import patched
from onnxplug.plugin_api import Mentions
from onnxplug.torch_private import FakeImplCtx, NonStrictFunctions, pytree


def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Any:
    """As torch's own, whose kernel reads the sizes as plain numbers."""
    if dim is None:
        return input.flatten().gather(0, indices.flatten())
    if input.dim() != indices.dim() or not input.dim() or indices.dtype != torch.int64:
        return NotImplemented
    axis = dim % input.dim()
    around = torch.broadcast_shapes(*([*x.shape[:axis], 1, *x.shape[axis + 1 :]] for x in (input, indices)))
    operands = [x.expand(*around[:axis], x.shape[axis], *around[axis + 1 :]) for x in (input, indices)]
    return operands[0].gather(dim, operands[1])


def kron(input: Tensor, other: Tensor) -> Any:
    """The products of each element of one tensor with the whole other tensor, side by side."""
    rank = max(input.dim(), other.dim())
    first, second = ((*[1] * (rank - x.dim()), *x.shape) for x in (input, other))
    outer, inner = [n for size in first for n in (size, 1)], [n for size in second for n in (1, size)]
    return (input.reshape(outer) * other.reshape(inner)).reshape([m * n for m, n in zip(first, second, strict=True)])


def multi_dot(tensors: Sequence[Tensor]) -> Any:
    """The product from left to right: the order that needs least work depends on the sizes."""
    ends = tensors[:: max(len(tensors) - 1, 1)]
    if len(tensors) < 2 or any(x.dim() != 2 for x in tensors[1:-1]) or any(x.dim() not in (1, 2) for x in ends):
        return NotImplemented
    return functools.reduce(torch.matmul, tensors)


def chain_matmul(*matrices: Tensor) -> Any:
    """As :func:`multi_dot`, of matrices alone."""
    return multi_dot(matrices) if all(x.dim() == 2 for x in matrices) else NotImplemented


def gradient(input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1) -> Any:
    """Half the difference of the elements on both sides, by even spacings; at the ends a difference of the nearest elements."""
    axes = [dim] if isinstance(dim, int) else range(input.dim()) if dim is None else dim
    spacings = spacing if isinstance(spacing, tuple | list) else [spacing] * len(axes)
    if not all(isinstance(h, int | float) for h in spacings) or len(spacings) != len(axes) or edge_order not in (1, 2):
        return NotImplemented
    if len({axis % max(input.dim(), 1) for axis in axes}) < len(axes):
        return NotImplemented  # torch's error
    if not input.is_floating_point() and not input.is_complex():
        return NotImplemented
    results = []
    for axis, h in zip(axes, spacings, strict=True):
        x = input.transpose(0, axis)
        ends = [x[1:2] - x[:1], x[-1:] - x[-2:-1]]
        if edge_order == 2:
            ends = [2 * x[1:2] - 1.5 * x[:1] - 0.5 * x[2:3], 1.5 * x[-1:] - 2 * x[-2:-1] + 0.5 * x[-3:-2]]
        results.append((torch.cat([ends[0], (x[2:] - x[:-2]) / 2, ends[1]]) / h).transpose(0, axis))
    return tuple(results)


def cov(input: Tensor, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """The products of what is left of rows without their means, by the number of columns less the correction."""
    if fweights is not None or aweights is not None or input.dim() > 2 or input.dtype is torch.bool:
        return NotImplemented
    rows = input if input.is_floating_point() or input.is_complex() else input.to(torch.get_default_dtype())
    rows = rows if rows.dim() == 2 else rows.reshape(1, -1)
    centred = rows - rows.sum(1, keepdim=True) / rows.shape[1]
    products = centred @ centred.mH / torch.sym_max(rows.shape[1] - correction, 0)
    return products.squeeze() if input.dim() == 2 else products[0, 0]


def corrcoef(input: Tensor) -> Any:
    """The covariances by both deviations, without what rounding adds beyond 1, or to a part of a complex number beyond 1."""
    covariances = cov(input)
    if covariances is NotImplemented:
        return NotImplemented
    if not covariances.dim():
        return covariances / covariances
    variances = covariances.diagonal()
    deviations = (variances.real if variances.is_complex() else variances).sqrt()
    result = covariances / deviations[:, None] / deviations[None]
    if result.is_complex():
        return torch.complex(result.real.clamp(-1, 1), result.imag.clamp(-1, 1))
    return result.clamp(-1, 1)


#: The bound of a number of elements of which nothing is known.
_ANY_NUMBER = sys.maxsize - 1
_CONSTRAIN = "_constrain_range_for_size"
_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.take_along_dim: take_along_dim,
    Tensor.take_along_dim: take_along_dim,
    torch.kron: kron,
    Tensor.kron: kron,
    torch.linalg.multi_dot: multi_dot,
    torch.chain_matmul: chain_matmul,
    torch.gradient: gradient,
    torch.cov: cov,
    Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    Tensor.corrcoef: corrcoef,
}
#: Functions whose own code asks for a number that it computes, whatever the sizes are.
_ASKING = (cov, corrcoef)


def _loss_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(layer: nn.AdaptiveLogSoftmaxWithLoss, input_: Tensor, target_: Tensor) -> Any:
        """As torch's own, which takes the targets of each cluster by themselves, if there are any."""
        if target_.dim() > 1 or input_.dim() != target_.dim() + 1:
            return original(layer, input_, target_)
        if target_.dim():
            torch._check(input_.shape[0] == target_.shape[0])
        numbers = layer.log_prob(input_ if target_.dim() else input_.unsqueeze(0))
        output = numbers.gather(1, target_.reshape(-1, 1)).squeeze(1)
        result = output if target_.dim() else output[0]
        return nn.modules.adaptive._ASMoutput(result, (-output).mean())

    return forward


def _prediction(layer: nn.AdaptiveLogSoftmaxWithLoss, input: Tensor) -> Tensor:
    """The class of the largest number, as torch's own, which looks into clusters only where the head's largest is one."""
    return layer.log_prob(input).argmax(1)


def _without_the_largest(original: Callable[..., None]) -> Callable[..., None]:
    def constrain(env: ShapeEnv, symbol: Any, min: int | None = None, max: int | None = None) -> None:
        """As torch's own, but for the bound of any number of elements, which it divides in floats and finds exceeded."""
        original(env, symbol, min, None if max == _ANY_NUMBER else max)

    return constrain


def _any_size(context: FakeImplCtx, *, min: int = 0, max: int | None = None) -> torch.SymInt:
    """As torch's own, which takes 2 for the least size of a custom operator's result: it decides ``len(nms(...)) < 2``."""
    return context.new_dynamic_size(min=min, max=max)


@contextlib.contextmanager
def sizes_that_follow_from_data(mentions: Mentions) -> Iterator[None]:
    """While it holds, these functions take dynamic sizes or ask for no number, the layer has no branch, numbers have no bound."""
    original = getattr(NonStrictFunctions, "_override", None)

    def override(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        replacement = _FUNCTIONS.get(func)
        values = pytree.tree_leaves((args, kwargs)) if replacement is not None else ()
        needed = replacement in _ASKING or any(isinstance(x, Tensor) and has_free_symbols(x) for x in values)
        if replacement is not None and needed and "out" not in (kwargs or {}):
            result = replacement(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return (lambda: result), (), {}
        return original(mode, func, args, kwargs)  # type: ignore[misc]

    with contextlib.ExitStack() as stack:
        if original is not None:
            stack.enter_context(patched(NonStrictFunctions, "_override", override))
        stack.enter_context(patched(FakeImplCtx, "create_unbacked_symint", _any_size))
        if constrain := getattr(ShapeEnv, _CONSTRAIN, None):
            stack.enter_context(patched(ShapeEnv, _CONSTRAIN, _without_the_largest(constrain)))
        layer = nn.AdaptiveLogSoftmaxWithLoss
        if mentions(lambda name: name == layer.__name__):
            stack.enter_context(patched(layer, "forward", _loss_of(layer.forward)))
            stack.enter_context(patched(layer, "predict", _prediction))
        yield
