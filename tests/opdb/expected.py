"""What is expected not to pass, each with its reason. Strict: what passes all the same is reported too."""

from __future__ import annotations

_C32 = "ONNX has no element type for torch.complex32"
_SPARSE = "ONNX has no sparse tensors that ONNX Runtime computes with"

#: Entry name, or ``name|dtype``, ``name||dynamic``, ``name|dtype|opset``, to (status, reason).
EXPECTED: dict[str, tuple[str, str]] = {
    "chalf": ("unsupported", _C32),
    "to_sparse": ("missing", _SPARSE),
    "nn.functional.linear_cross_entropy.chunked": (
        "missing",
        "torch's own memory-saving kernel, without decomposition",
    ),
    "nn.functional.linear_cross_entropy.chunked_none": (
        "missing",
        "torch's own memory-saving kernel, without decomposition",
    ),
    "hash_tensor": ("missing", "a hash of a tensor's bits is no model's output"),
}


def expected(name: str, dtype: str, opset: int | None, dynamic: bool) -> tuple[str, str] | None:
    """The row for one run of an entry, the closest first."""
    keys = [f"{name}|{dtype}", name]
    if opset is not None:
        keys.insert(0, f"{name}|{dtype}|{opset}")
        keys.insert(1, f"{name}||{opset}")
    if dynamic:
        keys.insert(0, f"{name}|{dtype}|dynamic")
        keys.insert(1, f"{name}||dynamic")
    for key in keys:
        if key in EXPECTED:
            return EXPECTED[key]
    return None
