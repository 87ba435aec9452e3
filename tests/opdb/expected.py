"""Runs that are expected not to pass, each with its reason. Strict: an unexpected pass is reported too."""

from __future__ import annotations

import torch

_C32 = "ONNX has no element type for torch.complex32"
_SPARSE = "ONNX has no sparse tensors that ONNX Runtime computes with"
_PRIVATE = "torch's own memory-saving kernel, without a decomposition"
_EMPTY = "a dynamic axis of size 0: ONNX Runtime's own MatMul and Reshape refuse it"
_STATIC = "needs this size static; the error says so"
_TRACE = "torch's decomposition holds for the exported sizes alone: refused with an error"

#: Entries that only the oldest or only the newest of the tested releases of torch has.
ONLY = {
    "cholesky": "2.13",
    "qr": "2.13",
    "linalg.matrix_sqrth": "2.15",
    "linalg.polar": "2.15",
}

#: Entries that factor a matrix; complex matrices have no rules yet.
_FACTOR = """
cholesky geqrf linalg.cholesky_ex linalg.cholesky linalg.cond linalg.det
linalg.eigh linalg.eigvalsh linalg.householder_product linalg.inv_ex linalg.inv
linalg.lu_factor_ex linalg.lu_factor linalg.lu_solve linalg.lu linalg.matrix_rank.hermitian linalg.matrix_rank linalg.matrix_sqrth
linalg.pinv.hermitian linalg.pinv.singular linalg.pinv linalg.polar linalg.qr linalg.slogdet linalg.solve_ex
linalg.solve_triangular linalg.solve linalg.svdvals linalg.tensorinv linalg.tensorsolve logdet
lu_solve lu_unpack lu norm.nuc ormqr pca_lowrank pinverse qr svd_lowrank triangular_solve
""".split()

#: Entry name, or ``name|dtype``, ``name||dynamic``, ``name||opset``, to (status, reason); the closest row counts.
EXPECTED: dict[str, tuple[str, str]] = {
    "chalf": ("unsupported", _C32),
    "complex|float16": ("unsupported", _C32),
    "view_as_complex|float16": ("unsupported", _C32),
    "to_sparse": ("missing", _SPARSE),
    "hash_tensor": ("missing", "a hash of a tensor's bits is no model's output"),
    "nn.functional.linear_cross_entropy.chunked_none": ("missing", _PRIVATE),
    **{f"{name}|complex64": ("missing", "factorisations of complex matrices") for name in _FACTOR},
    "logcumsumexp|complex64": ("missing", "not of complex numbers yet"),
    "_segment_reduce.lengths|float32": ("unsupported", "segments along another axis than the first"),
    "_segment_reduce.offsets|float32": ("unsupported", "segments along another axis than the first"),
    "nn.functional.adaptive_avg_pool3d||dynamic": ("run", _EMPTY),
    "nn.functional.bilinear||dynamic": ("run", _EMPTY),
    "nn.functional.linear_cross_entropy.chunked||dynamic": ("missing", _TRACE),
}


def expected(name: str, dtype: str, opset: int | None, dynamic: bool) -> tuple[str, str] | None:
    """The row for one run of an entry, the closest first."""
    # A row of one dtype is of its plain run: with other opsets or dynamic sizes fewer samples run.
    plain = opset is None and not dynamic
    keys = [f"{name}|{dtype}", name] if plain else [name]
    if opset is not None:
        keys.insert(0, f"{name}||{opset}")
    if dynamic:
        keys.insert(0, f"{name}||dynamic")
    for key in keys:
        if key in EXPECTED:
            return EXPECTED[key]
    return None


_SYNC = "it returns a Python bool of the values, which torch.export can't know"
_CUDA = "it runs on CUDA alone"
_CSR = "its sparse CSR inputs have no storage that torch can copy"
_NO_SHAPES = "torch has no kernel for the shapes of its results"

#: Entries of which eager torch or torch.export refuses every sample, with the reason: by name, ``name|dtype`` or
#: ``name||dynamic``. Strict as well: an entry that can be captured is reported.
UNCAPTURED: dict[str, str] = {
    "allclose": _SYNC,
    "equal": _SYNC,
    "item|complex64": "torch's fake tensors have no item() of complex numbers",
    **{
        f"jiterator_{name}": _CUDA
        for name in ("2inputs_2outputs", "4inputs_with_extra_args", "binary", "binary_return_by_ref", "unary")
    },
    "linalg.lstsq": _NO_SHAPES,
    "linalg.lstsq.grad_oriented": _NO_SHAPES,
    "nn.functional.ctc_loss": _NO_SHAPES,
    "sparse.mm.reduce": _CSR,
    "sparse.sampled_addmm": _CSR,
    **{f"{name}||dynamic": f"{_NO_SHAPES} where sizes are dynamic" for name in ("geqrf", "to_sparse")},
}
if torch.__version__.startswith("2.13."):
    UNCAPTURED["histogramdd||dynamic"] = f"{_NO_SHAPES} where sizes are dynamic (torch 2.15 has one)"


def uncaptured(name: str, dtype: str, dynamic: bool) -> str | None:
    """Why torch or torch.export refuses every sample of one run of an entry; ``None`` where it is expected not to."""
    keys = [name, f"{name}|{dtype}", *([f"{name}||dynamic"] if dynamic else [])]
    return next((UNCAPTURED[key] for key in keys if key in UNCAPTURED), None)
