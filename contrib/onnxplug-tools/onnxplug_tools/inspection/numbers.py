"""How much the numbers of two tensors differ, read in pieces."""

from __future__ import annotations

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxplug.errors import OnnxplugError

#: Elements that are compared at once.
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """How much two tensors differ.

    Attributes:
        count, total: Number of elements that differ, and of all elements. NaN is equal to NaN.
        largest: The largest difference of two elements; infinite where one is not finite and the other differs.
            NaN for texts.
        relative: ``largest`` divided by the largest finite magnitude in the first tensor; infinite where that is 0.
    """

    count: int
    total: int
    largest: float
    relative: float

    @property
    def equal(self) -> bool:
        """Whether all elements are equal."""
        return not self.count

    def __str__(self) -> str:
        if self.equal:
            return "equal"
        if math.isnan(self.largest):
            return f"{self.count:,} of {self.total:,} texts"
        return f"{self.count:,} of {self.total:,} elements, by {self.largest:.3g} at most ({self.relative:.2g} of the largest)"


def difference_of(before: ir.TensorProtocol, after: ir.TensorProtocol) -> tuple[Difference | None, bool]:
    """The difference of two tensors, which may have different dtypes; ``None`` where they can't be compared.

    Returns:
        The difference, and whether the second tensor was transposed for it: a matrix is transposed where only then the
        shapes agree, or only then the numbers are equal.
    """
    texts = [tensor.dtype == ir.DataType.STRING for tensor in (before, after)]
    if any(texts) and not all(texts):
        return None, False
    try:
        return _compared(_numbers(before), _numbers(after))
    finally:
        for tensor in (before, after):
            _release(tensor)


def _compared(a: Any, b: Any) -> tuple[Difference | None, bool]:
    shape, other = a.shape, b.shape
    if shape == other:
        difference = _difference(a, b)
        if difference.count and len(shape) == 2 and shape[0] == shape[1] and _difference(a, b.T).equal:
            return _difference(a, b.T), True
        return difference, False
    if len(shape) == 2 and shape == other[::-1]:
        return _difference(a, b.T), True
    return None, False


def digests_of(tensor: ir.TensorProtocol) -> list[bytes]:
    """The digest of a tensor's numbers, dtype and shape; for a matrix also the digest of the transposed matrix."""
    try:
        numbers = _numbers(tensor)
        digests = [_digest(tensor, numbers)]
        return [*digests, _digest(tensor, numbers.T)] if numbers.ndim == 2 else digests
    finally:
        _release(tensor)


def _digest(tensor: ir.TensorProtocol, numbers: Any) -> bytes:
    digest = hashlib.blake2b(f"{tensor.dtype} {numbers.shape}".encode(), digest_size=16)
    if numbers.dtype == object:
        digest.update(repr(numbers.tolist()).encode())
    else:
        digest.update(np.ascontiguousarray(numbers).reshape(-1).view(np.uint8).data)
    return digest.digest()


def _release(tensor: ir.TensorProtocol) -> None:
    """Releases the file of a tensor, so that one tensor at a time is in memory."""
    if isinstance(tensor, ir.ExternalTensor):
        with contextlib.suppress(BufferError):  # a view of it is held by somebody else
            tensor.release()


def _numbers(tensor: ir.TensorProtocol) -> Any:
    try:
        return _texts(tensor) if tensor.dtype == ir.DataType.STRING else np.asarray(tensor.numpy())
    except Exception as error:
        raise OnnxplugError(
            f"the numbers of the weight {tensor.name!r} can't be read: {error}",
            hint="External data must lie beside the model, under the name that it was saved with.",
        ) from error


def _texts(tensor: ir.TensorProtocol) -> Any:
    """The texts as they are: NumPy's own arrays of texts have a width, and drop null characters at the end."""
    strings = getattr(tensor, "string_data", None)
    texts = strings() if strings is not None else tensor.numpy().reshape(-1).tolist()
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode() if isinstance(text, str) else text for text in texts]
    return array.reshape(tensor.shape.numpy())


def _difference(a: Any, b: Any) -> Difference:
    """The difference of tensors of one shape, by pieces of whole rows: no whole copy is made of a transposed tensor."""
    if not a.size:
        return Difference(0, 0, 0.0, 0.0)
    if a.dtype == object:
        count = int(np.asarray(a != b).sum())
        return Difference(count, a.size, math.nan if count else 0.0, math.nan if count else 0.0)
    rows = a.reshape(1) if not a.ndim else a
    others = b.reshape(1) if not b.ndim else b
    step = max(1, _PIECE // max(1, rows[0].size))
    count, largest, size = 0, 0.0, 0.0
    for start in range(0, len(rows), step):
        x, y = rows[start : start + step], others[start : start + step]
        differing, most = _piece(x, y)
        count, largest = count + differing, max(largest, most)
        magnitude = np.abs(_double(x))
        magnitude = magnitude[np.isfinite(magnitude)]
        size = max(size, float(magnitude.max(initial=0.0)))
    relative = 0.0 if not count else largest / size if size else float("inf")
    return Difference(count, a.size, largest, relative)


def _double(x: Any) -> Any:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def _piece(x: Any, y: Any) -> tuple[int, float]:
    """The number of elements that differ, and the largest difference."""
    a, b = _double(x), _double(y)
    whole = [v.dtype.kind in "iub" for v in (x, y)]
    # A double cannot distinguish integers beyond 2**53.
    differs = x != y if all(whole) else ~((a == b) | (np.isnan(a) & np.isnan(b)))
    count = int(differs.sum())
    if not count:
        return 0, 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        by = np.abs(a[differs] - b[differs])
    by[np.isnan(by)] = np.inf  # a NaN against a number
    return count, max(float(by.max()), 1.0 if all(whole) else 0.0)
