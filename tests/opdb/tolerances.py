"""Tolerances other than torch.testing's own, and results compared by what they stand for, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Entry name to (dtype or None for any, rtol, atol, reason).
TOLERANCES: dict[str, tuple[torch.dtype | None, float, float, str]] = {}


def tolerance(name: str, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """rtol and atol for one entry; ``None``: torch.testing's own."""
    row = TOLERANCES.get(name)
    if row is None or (row[0] is not None and row[0] != dtype):
        return None, None
    return row[1], row[2]


def _eigen(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Eigenvalues, the matrix that the eigenvectors make with them, and the vectors' products."""
    values, vectors = outputs
    return [values, (vectors * values.unsqueeze(-2)) @ vectors.mT, vectors.mT @ vectors]


def _singular(outputs: Sequence[Tensor], transposed: bool) -> list[Tensor]:
    """Singular values, the matrix that the vectors make with them, and the vectors' products."""
    u, s, v = outputs
    v = v.mT if transposed else v
    k = s.shape[-1]
    return [s, (u[..., :k] * s.unsqueeze(-2)) @ v[..., :k].mT, u.mT @ u, v.mT @ v]


def _relative(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Each matrix divided by its largest element."""
    return [x / x.abs().amax((-2, -1), keepdim=True) if x.numel() else x for x in outputs]


#: Entry name to (dtype or None for any, what to compare instead of the results, reason).
FORMS: dict[str, tuple[torch.dtype | None, Callable[[Sequence[Tensor]], list[Tensor]], str]] = {
    "linalg.eigh": (None, _eigen, "the sign of an eigenvector is free"),
    "linalg.svd": (None, lambda x: _singular(x, True), "signs, and the basis of the null spaces, are free"),
    "svd": (None, lambda x: _singular(x, False), "signs, and the basis of the null spaces, are free"),
    "matrix_exp": (
        torch.float32,
        _relative,
        "torch's own error is 5e-7 of the norm (ours 2e-7), and elements differ in size by 6 decades",
    ),
}


def comparable(name: str, dtype: torch.dtype, outputs: Sequence[Tensor]) -> list[Tensor]:
    """What of an entry's results is compared: they themselves where no row says otherwise."""
    row = FORMS.get(name)
    return list(outputs) if row is None or row[0] not in (None, dtype) else row[1](outputs)
