"""Eigenvectors and singular vectors: PyTorch leaves open their phases and, for general matrices, the order of the eigenvalues.

PyTorch's result is equally right in any order and with any phases. So ONNX's order and phases are read off its result and need
no judgement: verification then compares ONNX's result with PyTorch's in this order and with these phases.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    wanted = expected if isinstance(expected, tuple | list) else (expected,)
    known = [
        a.nan_to_num()
        if isinstance(a, torch.Tensor) and (a.shape, a.dtype) == (e.shape, e.dtype) and a.numel()
        else None
        for a, e in zip(actual, wanted, strict=True)
    ]
    if all(a is None for a in known):
        return None
    if name in _SINGULAR:
        return _singular(wanted, known, adjoint=_SINGULAR[name])
    order = _order(wanted, known) if name in _EIGENVALUES else None
    values, *vectors = wanted
    if order is not None:
        values, vectors = values.gather(-1, order), [_columns(v, order) for v in vectors]
    if not vectors:
        return values
    return values, vectors[0] if known[1] is None else vectors[0] * _phases(vectors[0], known[1])


def _singular(wanted: Sequence[torch.Tensor], known: Sequence[torch.Tensor | None], *, adjoint: bool) -> Any:
    """The left and the right vector of a singular value share a phase; vectors without a value are any basis of the rest."""
    left, values, right = wanted
    count = values.shape[-1]
    ours_left, _, ours_right = known
    if adjoint:
        right, ours_right = right.mH, ours_right.mH if ours_right is not None else None
    phases = [None if o is None else _phases(w, o) for w, o in ((left, ours_left), (right, ours_right))]
    shared = next((p[..., :count] for p in phases if p is not None), None)
    if shared is None:
        return tuple(wanted)
    left, right = (
        torch.cat([w[..., :count] * shared, _turned(w[..., count:], o[..., count:] if o is not None else None)], -1)
        for w, o in ((left, ours_left), (right, ours_right))
    )
    return left, values, right.mH if adjoint else right


def _order(wanted: Sequence[torch.Tensor], known: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The index of PyTorch's eigenvalue at each place of ONNX's result, ``[*batch, n]``: the nearest are paired first."""
    distance = torch.zeros((), dtype=torch.float64)
    if known[0] is not None:
        scale = wanted[0].abs().amax(-1)[..., None, None].clamp_min(torch.finfo(wanted[0].abs().dtype).tiny)
        gap = torch.view_as_real(known[0][..., :, None] - wanted[0][..., None, :]).norm(dim=-1)
        distance = distance + gap.double() / scale
    if len(known) > 1 and known[1] is not None:
        distance = distance + 1 - (known[1].mH @ wanted[1]).abs().double()
    n = distance.shape[-1]
    flat = distance.nan_to_num(_FAR, _FAR).clamp(max=_FAR).reshape(-1, n, n)
    order, matrices = torch.zeros(flat.shape[:2], dtype=torch.int64), torch.arange(flat.shape[0])
    for _ in range(n):
        nearest = flat.flatten(1).argmin(-1)
        place, source = nearest // n, nearest % n
        order[matrices, place] = source
        flat[matrices, place, :] = flat[matrices, :, source] = 2 * _FAR
    return order.reshape(distance.shape[:-1])


def _columns(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(-1, order.unsqueeze(-2).expand(x.shape))


def _turned(wanted: torch.Tensor, ours: torch.Tensor | None) -> torch.Tensor:
    """The basis of PyTorch's columns that is nearest to ONNX's: their product with a unitary matrix."""
    if ours is None or not wanted.numel():
        return wanted
    left, _, right = torch.linalg.svd(wanted.mH @ ours)
    return wanted @ (left @ right)


def _phases(wanted: torch.Tensor, ours: torch.Tensor) -> torch.Tensor:
    """The numbers of absolute value 1 that turn PyTorch's columns to ONNX's, ``[*batch, 1, n]``; for real columns ±1."""
    turn = (wanted.conj() * ours).sum(-2, keepdim=True)
    signs = torch.where(turn.real < 0, -1, 1).to(wanted.dtype)
    if not wanted.is_complex():
        return signs
    size = turn.abs()
    real = (wanted.imag == 0).all(-2, keepdim=True) | ~(size > 0)
    return torch.where(real, signs, turn / torch.where(real, 1, size))
