"""Tolerances other than torch.testing's own, and forms in which results are compared, each with its reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Entry name to (dtype or None for any, rtol, atol, reason).
TOLERANCES: dict[str, tuple[torch.dtype | None, float, float, str]] = {
    "addbmm": (torch.float32, 1.3e-6, 3e-5, "a sum of 50 products that nearly cancel, added in another order"),
    "nn.functional.interpolate.bicubic": (
        torch.float32,
        1.3e-6,
        3e-5,
        "sixteen weights, rounded elsewhere than torch's",
    ),
    "special.hermite_polynomial_he": (
        torch.float32,
        2e-5,
        1e-5,
        "torch's recurrence in float32 loses 4 digits to cancellation near the zeros; ours, in float64, doesn't",
    ),
    "nn.functional.conv3d": (torch.float32, 1.3e-6, 1e-4, "sums of 64 products of numbers up to 9, in another order"),
    "nn.functional.hinge_embedding_loss": (
        torch.float16,
        5e-3,
        1e-3,
        "torch rounds to half between the steps of a composite loss, in which numbers cancel",
    ),
    "_upsample_bilinear2d_aa": (
        torch.float32,
        1.3e-6,
        5e-5,
        "weights of a step of 1 / 1.7, rounded to float elsewhere",
    ),
    "baddbmm": (torch.complex64, 1.3e-6, 1e-4, "four sums of real products that nearly cancel"),
    "nn.functional.conv2d": (torch.complex64, 1.3e-6, 1e-4, "four sums of real products that nearly cancel"),
    "fft.hfft2": (torch.float32, 1.3e-6, 5e-5, "sums of 100 numbers, in another order"),
    "nn.functional.conv_transpose3d": (torch.float32, 1.3e-6, 5e-5, "sums of hundreds of products, in another order"),
}


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


def _complex(x: Tensor) -> Tensor:
    """A complex result of PyTorch's, or of a model, whose last axis holds both parts."""
    return x if x.is_complex() else torch.complex(x[..., 0], x[..., 1])


def _power_sums(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The largest size of eigenvalues, and means of powers of the scaled ones: these determine them in any order."""
    values = _complex(outputs[0])
    if not values.numel():
        return [values.abs()]
    scale = values.abs().amax(-1, keepdim=True)
    ratio = values / torch.where(scale == 0, 1.0, scale)
    powers = torch.stack([ratio**k for k in range(1, values.shape[-1] + 1)], -1)
    return [scale, torch.view_as_real(powers.mean(-2))]


def _general_eigen(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Eigenvalues in any order, the matrix that the eigenvectors make with them, and the vectors' lengths."""
    values, vectors = map(_complex, outputs)
    product = (vectors * values.unsqueeze(-2)) @ torch.linalg.inv(vectors)
    return [*_power_sums([values]), torch.view_as_real(product), vectors.norm(dim=-2)]


def _relative(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Each matrix divided by its largest element."""
    return [x / x.abs().amax((-2, -1), keepdim=True) if x.numel() else x for x in outputs]


def _relative_complex(outputs: Sequence[Tensor]) -> list[Tensor]:
    """As :func:`_relative`, of complex matrices."""
    return [torch.view_as_real(x) for x in _relative([_complex(x) for x in outputs])]


#: Entries whose row in FORMS holds for complex inputs too.
_COMPLEX_FORMS = ("linalg.eig", "linalg.eigvals", "matrix_exp")
#: Entry name, or ``name|complex64``, to (dtype or None for any, the function of the results to compare, reason).
FORMS: dict[str, tuple[torch.dtype | None, Callable[[Sequence[Tensor]], list[Tensor]], str]] = {
    "linalg.eigh": (None, _eigen, "the sign of an eigenvector is free"),
    "linalg.eig": (None, _general_eigen, "the order of eigenvalues and the phase of an eigenvector are free"),
    "linalg.eigvals": (None, _power_sums, "the order of eigenvalues is free"),
    "linalg.svd": (None, lambda x: _singular(x, True), "signs, and the basis of the null spaces, are free"),
    "svd": (None, lambda x: _singular(x, False), "signs, and the basis of the null spaces, are free"),
    "matrix_exp|complex64": (None, _relative_complex, "as of float32"),
    "matrix_exp": (
        torch.float32,
        _relative,
        "torch's own error is 5e-7 of the norm (ours is rounding), and elements differ in size by 6 decades",
    ),
}


def comparable(name: str, dtype: torch.dtype, outputs: Sequence[Tensor]) -> list[Tensor]:
    """The values by which an entry's results are compared: the results themselves where there is no row."""
    row = (FORMS.get(f"{name}|complex64") if dtype == torch.complex64 else None) or FORMS.get(name)
    if row is None or row[0] not in (None, dtype) or (dtype.is_complex and name not in _COMPLEX_FORMS):
        return list(outputs)
    return row[1](outputs)


def _dominant(position: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """A multiple of the identity added to the matrices at a position."""

    def change(inputs: list[Tensor]) -> list[Tensor]:
        x = inputs[position]
        m, n = x.shape[-2:]
        inputs[position] = x / x.abs().amax().clamp(min=1) + 2 * max(m, n) * torch.eye(m, n, dtype=x.dtype)
        return inputs

    return change


def _dominant_tensor(inputs: list[Tensor]) -> list[Tensor]:
    """As :func:`_dominant`, for a tensor that is a square matrix when its axes are joined."""
    x = inputs[0]
    side = round(x.numel() ** 0.5)
    if side * side == x.numel():
        inputs[0] = x / x.abs().amax().clamp(min=1) + 2 * side * torch.eye(side, dtype=x.dtype).reshape(x.shape)
    return inputs


def _definite(inputs: list[Tensor]) -> list[Tensor]:
    """A positive definite matrix made of the first input."""
    x = inputs[0]
    inputs[0] = x @ x.mT + torch.eye(x.shape[-2], dtype=x.dtype)
    return inputs


def _valid_pivots(inputs: list[Tensor]) -> list[Tensor]:
    """As many pivots as steps, each within the matrix."""
    packed, pivots = inputs[:2]
    m, n = packed.shape[-2:]
    k = min(m, n)
    inputs[1] = torch.arange(1, k + 1, dtype=pivots.dtype).expand(*packed.shape[:-2], k).contiguous()
    return inputs


def _ascending(position: int) -> Callable[[list[Tensor]], list[Tensor]]:
    """The boundaries at a position sorted."""

    def change(inputs: list[Tensor]) -> list[Tensor]:
        inputs[position] = inputs[position].sort(-1)[0]
        return inputs

    return change


def _same_heads(inputs: list[Tensor]) -> list[Tensor]:
    """Keys and values with the query's batch, heads and features."""
    query, key, value, *masks = inputs
    shape = (*query.shape[:2], key.shape[2], query.shape[3])
    return [query, *(x.new_zeros(shape) + x.mean() for x in (key, value)), *masks]


#: Entry name to the function that makes random inputs of other sizes valid, and the reason.
INPUTS: dict[str, tuple[Callable[[list[Tensor]], list[Tensor]], str]] = {
    **dict.fromkeys(
        (
            "linalg.inv",
            "linalg.inv_ex",
            "linalg.solve",
            "linalg.solve_ex",
            "linalg.solve_triangular",
            "linalg.lu_solve",
            "cholesky_inverse",
            "linalg.matrix_power",
            "linalg.pinv.hermitian",
        ),
        (_dominant(0), "a random matrix may be too ill-conditioned for any two algorithms to agree"),
    ),
    **dict.fromkeys(
        ("cholesky_solve", "triangular_solve", "lu_solve"),
        (_dominant(1), "a random matrix may be too ill-conditioned for any two algorithms to agree"),
    ),
    **dict.fromkeys(
        ("linalg.tensorinv", "linalg.tensorsolve"),
        (_dominant_tensor, "a random matrix may be too ill-conditioned for any two algorithms to agree"),
    ),
    **dict.fromkeys(
        ("cholesky", "linalg.cholesky", "linalg.cholesky_ex"),
        (_definite, "torch leaves the factor of a matrix that is not positive definite unspecified"),
    ),
    "linalg.matrix_sqrth": (
        _definite,
        "the root of an eigenvalue near 0 changes without bound with the rounding of the matrix",
    ),
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": (
        _same_heads,
        "torch checks neither batch nor heads and reads beyond the keys",
    ),
    "bucketize": (_ascending(1), "the boundaries must be sorted"),
    "searchsorted": (_ascending(0), "the sequence must be sorted"),
    "lu_unpack": (_valid_pivots, "torch reads beyond the rows when there are more pivots than rows"),
}


def valid_inputs(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """Inputs of other sizes that the entry is defined for."""
    row = INPUTS.get(name)
    return inputs if row is None else row[0](inputs)
