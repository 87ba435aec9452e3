"""What is expected not to pass, each with its reason. Strict: what passes all the same is reported too."""

from __future__ import annotations

_C32 = "ONNX has no element type for torch.complex32"
_SPARSE = "ONNX has no sparse tensors that ONNX Runtime computes with"
_PRIVATE = "torch's own memory-saving kernel, without a decomposition"
_EIG = "eigenvalues of a general matrix: nobody deploys them"
_LDL = "an indefinite factorisation: nobody deploys it"
_INTEGER_MEAN = "torch's mean of integers, cut off: nobody pools integers"

#: Entry name, or ``name|dtype``, ``name||dynamic``, ``name||opset``, to (status, reason); the closest row counts.
EXPECTED: dict[str, tuple[str, str]] = {
    "chalf": ("unsupported", _C32),
    "complex|float16": ("unsupported", _C32),
    "view_as_complex|float16": ("unsupported", _C32),
    "to_sparse": ("missing", _SPARSE),
    "hash_tensor": ("missing", "a hash of a tensor's bits is no model's output"),
    "nn.functional.linear_cross_entropy.chunked": ("missing", _PRIVATE),
    "nn.functional.linear_cross_entropy.chunked_none": ("missing", _PRIVATE),
    "linalg.eig": ("missing", _EIG),
    "linalg.eigvals": ("missing", _EIG),
    "linalg.ldl_factor": ("missing", _LDL),
    "linalg.ldl_factor_ex": ("missing", _LDL),
    "linalg.ldl_solve": ("missing", _LDL),
    "nn.functional.fractional_max_pool2d|bfloat16": (
        "run",
        "numpy's bfloat16 in onnx.reference; ONNX Runtime has no kernel",
    ),
    "nn.functional.fractional_max_pool3d|bfloat16": (
        "run",
        "numpy's bfloat16 in onnx.reference; ONNX Runtime has no kernel",
    ),
    "nn.functional.avg_pool1d|int64": ("unsupported", _INTEGER_MEAN),
    "nn.functional.avg_pool2d|int64": ("unsupported", _INTEGER_MEAN),
    "nn.functional.avg_pool3d|int64": ("unsupported", _INTEGER_MEAN),
    "nn.functional.local_response_norm|int64": ("unsupported", _INTEGER_MEAN),
}


def expected(name: str, dtype: str, opset: int | None, dynamic: bool) -> tuple[str, str] | None:
    """The row for one run of an entry, the closest first."""
    keys = [f"{name}|{dtype}", name]
    if opset is not None:
        keys.insert(0, f"{name}||{opset}")
    if dynamic:
        keys.insert(0, f"{name}||dynamic")
    for key in keys:
        if key in EXPECTED:
            return EXPECTED[key]
    return None
