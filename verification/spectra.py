"""Eigenvectors and singular vectors: PyTorch leaves open their phases and, for general matrices, the order of the eigenvalues.

PyTorch's result is equally right in any order and with any phases. So ONNX's order and phases are read off its result and need
no judgement: verification then compares ONNX's result with PyTorch's in this order and with these phases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

#: Operators with eigenvalues in any order, and the vectors with them.
_EIGENVALUES = frozenset({"aten.linalg_eig.default", "aten.linalg_eigvals.default", "aten._linalg_eigvals.default"})
#: Operators with eigenvalues in ascending order.
_SYMMETRIC = frozenset({"aten.linalg_eigh.default", "aten._linalg_eigh.default"})
#: Operators with singular vectors: the last result has the right vectors as its conjugate rows, or as its columns.
_SINGULAR = {"aten.linalg_svd.default": True, "aten._linalg_svd.default": True, "aten.svd.default": False}
#: More than the distance of any two columns.
_FAR = 1e6
#: From how many angles the best one is looked for, and in how many steps.
_STARTS, _STEPS = 8, 8
#: How many units of rounding a phase may be from 1 or -1 and be that.
_UNITS = 256

OPERATORS = _EIGENVALUES | _SYMMETRIC | _SINGULAR.keys()


def taken(name: str, expected: Any, actual: Sequence[Any]) -> Any:
    """PyTorch's result in the order and with the phases of ONNX's result.

    Args:
        name: One of ``OPERATORS``.
        expected: PyTorch's result.
        actual: ONNX's results in the order of PyTorch's; ``None`` for unknown results, NaN for unknown parts.

    Returns:
        Of the form of ``expected``; ``None`` where nothing is known of ONNX's results.
    """
    arrange = arrangement(name, expected, actual)
    return arrange(expected) if arrange is not None else None


def arrangement(name: str, expected: Any, actual: Sequence[Any]) -> Callable[[Any], Any] | None:
    """What gives a result of PyTorch the order and the phases in which its result ``expected`` is nearest to ONNX's.

    Args:
        name, expected, actual: As for :func:`taken`.

    Returns:
        A function of results whose order and phases are those of ``expected``; ``None`` where nothing is known of ONNX's results.
    """
    wanted = expected if isinstance(expected, tuple | list) else (expected,)
    known = [
        a
        if isinstance(a, torch.Tensor)
        and (a.shape, a.dtype) == (e.shape, e.dtype)
        and bool((torch.view_as_real(a) if a.is_complex() else a).isfinite().any())
        else None
        for a, e in zip(actual, wanted, strict=True)
    ]
    if all(a is None for a in known):
        return None
    if name in _SINGULAR:
        return _singular(wanted, known, adjoint=_SINGULAR[name])
    order = _order(wanted, known) if name in _EIGENVALUES else None
    phases = None
    if len(wanted) > 1 and known[1] is not None:
        phases = _phases(wanted[1] if order is None else _columns(wanted[1], order), known[1])
    return partial(_arranged, order, phases)


def _arranged(order: torch.Tensor | None, phases: torch.Tensor | None, result: Any) -> Any:
    values, *vectors = result if isinstance(result, tuple | list) else (result,)
    if order is not None:
        values, vectors = values.gather(-1, order), [_columns(v, order) for v in vectors]
    if not vectors:
        return values
    return values, vectors[0] if phases is None else vectors[0] * phases.to(vectors[0].dtype)


def _singular(
    wanted: Sequence[torch.Tensor], known: Sequence[torch.Tensor | None], *, adjoint: bool
) -> Callable[[Any], Any]:
    """The left and the right vector of a singular value share a phase; vectors without a value are any basis of the rest."""
    left, values, right = wanted
    count = values.shape[-1]
    ours_left, _, ours_right = known
    if adjoint:
        right, ours_right = _adjoint(right), _adjoint(ours_right) if ours_right is not None else None
    pairs = ((left, ours_left), (right, ours_right))
    shared = next((_phases(w, o)[..., :count] for w, o in pairs if o is not None), None)
    if shared is None:
        return tuple
    turns = [_turn(w[..., count:], o[..., count:] if o is not None else None) for w, o in pairs]

    def arranged(result: Any) -> Any:
        left, values, right = result
        left, right = (
            torch.cat([w[..., :count] * shared, w[..., count:] if turn is None else w[..., count:] @ turn], -1)
            for w, turn in zip((left, _adjoint(right) if adjoint else right), turns, strict=True)
        )
        return left, values, _adjoint(right) if adjoint else right

    return arranged


def _order(wanted: Sequence[torch.Tensor], known: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The index of PyTorch's eigenvalue at each place of ONNX's result, ``[*batch, n]``: the nearest are paired first."""
    distance = torch.zeros((), dtype=torch.float64)
    if known[0] is not None:
        scale = wanted[0].abs().amax(-1)[..., None, None].clamp_min(torch.finfo(wanted[0].abs().dtype).tiny)
        ours, theirs = torch.view_as_real(known[0]), torch.view_as_real(wanted[0])
        # What is not known of ONNX's value is not far from anything.
        gap = (ours[..., :, None, :] - theirs[..., None, :, :]).nan_to_num(0, _FAR, -_FAR).norm(dim=-1)
        distance = distance + gap.double() / scale
    if len(known) > 1 and known[1] is not None:
        distance = distance + _apart(known[1], wanted[1])
    n = distance.shape[-1]
    flat = distance.nan_to_num(_FAR, _FAR).clamp(max=_FAR).reshape(-1, n, n)
    order, matrices = torch.zeros(flat.shape[:2], dtype=torch.int64), torch.arange(flat.shape[0])
    for _ in range(n):
        nearest = flat.flatten(1).argmin(-1)
        place, source = nearest // n, nearest % n
        order[matrices, place] = source
        flat[matrices, place, :] = flat[matrices, :, source] = 2 * _FAR
    return order.reshape(distance.shape[:-1])


def _apart(ours: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """How far each column of ONNX's is from each of PyTorch's but for its phase, ``[*batch, n, n]``: 0 to about 1."""
    wanted, ours, is_part = _visible(wanted, ours)
    if not is_part:
        return 1 - (_adjoint(ours) @ wanted).abs().double()
    wanted, ours = wanted.to(torch.complex128), ours.double()
    squares, products = wanted.square().sum(-2)[..., None, :], ours.mT.to(wanted.dtype) @ wanted
    lengths = ours.square().sum(-2)[..., :, None] + wanted.abs().square().sum(-2)[..., None, :] / 2
    return (lengths + _cost(squares, products, _best_angle(squares, products))).clamp_min(0).sqrt()


def _columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, order.unsqueeze(-2).expand(x.shape))


def _adjoint(x: torch.Tensor) -> torch.Tensor:
    """``x.mH``, but computed: in a torch dispatch mode, operators take no notice of a tensor that is marked as conjugated."""
    return x.mT.conj_physical() if x.is_complex() else x.mT


def _turn(wanted: torch.Tensor, ours: torch.Tensor | None) -> torch.Tensor | None:
    """The unitary matrix that makes of PyTorch's columns the basis that is nearest to ONNX's; ``None``: as it is."""
    if ours is None or not wanted.numel():
        return None
    left, _, right = torch.linalg.svd(_adjoint(wanted) @ ours.nan_to_num())
    turn: torch.Tensor = left @ right
    return turn


def _phases(wanted: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """The numbers of absolute value 1 that turn PyTorch's columns to ONNX's, ``[*batch, 1, n]``; for real columns ±1."""
    real = (wanted.imag == 0).all(-2, keepdim=True) if wanted.is_complex() else None
    wanted, ours, is_part = _visible(wanted, ours)
    turn = (wanted.conj_physical() * ours).sum(-2, keepdim=True)
    signs = torch.where(turn.real < 0, -1, 1).to(wanted.dtype)
    if real is None:
        return signs
    if is_part:
        squares, products = (x.sum(-2, keepdim=True).to(torch.complex128) for x in (wanted.square(), wanted * ours))
        turn = _refined(wanted, ours, _best_angle(squares, products)).to(wanted.dtype)
    size = turn.abs()
    # A phase that is 1 or -1 but for rounding: another would make of zeros numbers as small, which zeros are compared with.
    real = real | ~(turn.imag.abs() > _UNITS * torch.finfo(turn.dtype).eps * size)
    return torch.where(real, signs, turn / torch.where(real, 1, size))


def _refined(wanted: torch.Tensor, ours: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """The phases near some angles that make the real part of ``wanted`` most like ``ours``.

    The differences themselves tell them to the last digits, which the squares in :func:`_cost` have lost.
    """
    wanted, ours = wanted.to(torch.complex128), ours.double()
    for _ in range(_STEPS):
        turned = wanted * torch.polar(torch.ones(()).double(), angles)
        apart = turned.real - ours
        slope = -(apart * turned.imag).sum(-2, keepdim=True)
        bend = (turned.imag.square() - apart * turned.real).sum(-2, keepdim=True)
        angles = angles - torch.where(bend > 0, slope / bend, 0.0).clamp(-0.01, 0.01)
    return torch.polar(torch.ones(()).double(), angles)


def _visible(wanted: torch.Tensor, ours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Columns of PyTorch's and what is known of ONNX's; where that is one part of complex numbers, it is the real part of both."""
    known = [bool(part.isfinite().any()) for part in (ours.real, ours.imag)] if ours.is_complex() else [True, True]
    if known[0] == known[1]:
        return wanted, ours.nan_to_num(), False
    return (wanted, ours.real.nan_to_num(), True) if known[0] else (wanted * -1j, ours.imag.nan_to_num(), True)


def _cost(squares: torch.Tensor, products: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """``|Re(z w) - b|²`` but for terms without z, of an angle and absolute value 1; ``squares`` is w·w, ``products`` w·b."""
    z = torch.polar(torch.ones(()).double(), angles)
    return (z.square() * squares).real / 2 - 2 * (z * products).real


def _best_angle(squares: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """The angle for which :func:`_cost` is least: by Newton's method from several, as there may be two minima."""
    best, least = torch.zeros_like(products.real), torch.full_like(products.real, torch.inf)
    for start in range(_STARTS):
        angles = torch.full_like(best, 2 * math.pi * start / _STARTS)
        for _ in range(_STEPS):
            z = torch.polar(torch.ones(()).double(), angles)
            slope = 2 * (z * products).imag - (z.square() * squares).imag
            bend = 2 * (z * products).real - 2 * (z.square() * squares).real
            angles = angles - torch.where(bend > 0, slope / bend, slope.sign()).clamp(-0.2, 0.2)
        cost = _cost(squares, products, angles)
        best, least = torch.where(cost < least, angles, best), torch.minimum(cost, least)
    return best
