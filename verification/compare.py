"""Comparison of results: the function that every check of onnxplug uses.

Elements are compared one by one, ``|actual - expected| <= atol + rtol * |expected|``. ``docs/verification.md`` says how
``atol`` follows from the ordinary elements of the expected tensor, and why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import torch

from onnxplug.strings import STRING, string_array

#: Above this number of elements, the size of ordinary elements is estimated from a sample of this number.
_SAMPLE = 1 << 18

#: A value that fills at least this share of a tensor is a fill (a mask's -1e9, a constant) and counts as one element.
_FILL_SHARE = 1 / 16

#: How much farther than PyTorch's an element may be from the float64 result, and how many tolerances at most.
_NEAR, _FARTHEST = 2, 10

#: The most that rounding of larger elements adds to the tolerance, in shares of the small ordinary elements.
_CEILING = 30


@dataclass(frozen=True)
class Tolerance:
    """How far an element may be from the expected element, for a dtype.

    Attributes:
        rtol: Share of the expected element.
        share: Share of the ordinary size of the tensor's elements, added to the above; ``None`` where ``atol`` is fixed.
        rounding: Share of the tensor's larger ordinary elements by which rounding alone may change a small element.
        atol: Absolute tolerance where there are no ordinary elements, and everywhere if ``share`` is ``None``.
        normal: The dtype's smallest normal number: the steps between smaller numbers are those at this number.
    """

    rtol: float
    share: float | None
    rounding: float
    atol: float
    normal: float = 0.0


def _model(dtype: torch.dtype, rtol: float, atol: float) -> Tolerance:
    return Tolerance(rtol, rtol, 8 * torch.finfo(dtype).eps, atol, torch.finfo(dtype).smallest_normal)


_MODEL = {
    torch.float64: _model(torch.float64, 1e-9, 1e-12),
    torch.float32: _model(torch.float32, 1e-4, 1e-5),
    torch.float16: _model(torch.float16, 1e-2, 1e-3),
    torch.bfloat16: _model(torch.bfloat16, 5e-2, 1e-2),
    # The step to the next number: rounding may go to either neighbour.
    torch.float8_e4m3fn: Tolerance(0.125, None, 0.0, 2.0**-9),
    torch.float8_e4m3fnuz: Tolerance(0.125, None, 0.0, 2.0**-10),
    torch.float8_e5m2: Tolerance(0.25, None, 0.0, 2.0**-16),
    torch.float8_e5m2fnuz: Tolerance(0.25, None, 0.0, 2.0**-17),
}

#: torch.testing's own.
_OPERATOR = {
    torch.float64: Tolerance(1e-7, None, 0.0, 1e-7),
    torch.float32: Tolerance(1.3e-6, None, 0.0, 1e-5),
    torch.float16: Tolerance(1e-3, None, 0.0, 1e-5),
    torch.bfloat16: Tolerance(1.6e-2, None, 0.0, 1e-5),
}

_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


class Scale(Enum):
    """The kind of results; it decides the tolerance of each dtype. Dtypes without a row (integers, bool) must be equal."""

    MODEL = "model"
    """A whole model: relative to the size of its results. Rounding adds up over its layers."""
    OPERATOR = "operator"
    """One operator: the tolerances of ``torch.testing.assert_close``."""

    def tolerance(self, dtype: torch.dtype) -> Tolerance | None:
        """The row of a dtype; for a complex dtype the row of its parts."""
        table: Mapping[torch.dtype, Tolerance] = _MODEL if self is Scale.MODEL else _OPERATOR
        return table.get(_PARTS.get(dtype, dtype))


@dataclass(frozen=True)
class Comparison:
    """The result of comparing two tensors.

    Attributes:
        count, total: Number of elements that differ by more than the tolerance, and of all.
        max_abs_difference: Largest difference of two finite elements.
        index: The index of the element that exceeds its tolerance most; empty for a scalar, ``None`` where none does.
        actual, expected: Its two values.
        allowed: Its tolerance.
        dtype: Dtype of the expected tensor.
        problem: Another dtype or shape, in words; nothing else is compared then.
        histogram: The result of ``measure`` for the differences of all elements.
    """

    count: int = 0
    total: int = 0
    max_abs_difference: float = 0.0
    index: tuple[int, ...] | None = None
    actual: Any = None
    expected: Any = None
    allowed: float = 0.0
    dtype: torch.dtype | None = None
    problem: str = ""
    histogram: Any = None

    @property
    def equal(self) -> bool:
        """Whether every element agrees."""
        return not self.problem and not self.count

    def __str__(self) -> str:
        if self.problem:
            return self.problem
        if not self.count:
            return f"agrees; the largest difference is {self.max_abs_difference:.3g}"
        return (
            f"differs at index {list(self.index or ())}: ONNX has {self.actual!r}, PyTorch {self.expected!r} "
            f"({str(self.dtype).removeprefix('torch.')}, tolerance {self.allowed:.3g}); {self.count} of {self.total} "
            f"element{'' if self.total == 1 else 's'} differ{'s' if self.count == 1 else ''} by more than the tolerance"
        )


def compare(
    actual: torch.Tensor | np.ndarray,
    expected: torch.Tensor | complex | str,
    *,
    scale: Scale = Scale.MODEL,
    rtol: float | None = None,
    atol: float | None = None,
    slack: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    measure: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any] | None = None,
    precision: torch.dtype | None = None,
) -> Comparison:
    """Compares two tensors element by element.

    NaN equals NaN, an infinity equals itself and nothing else. Integers and bools must be equal unless a tolerance is given.
    A complex tensor may be given as a real tensor whose last axis of size 2 holds both parts; each part is compared.

    Args:
        actual: The exported model's result; strings as an array.
        expected: PyTorch's result. For a Python number, ``actual`` may have any dtype and no axes.
        scale: The kind of results, which decides the tolerances.
        rtol, atol: Tolerances instead of these.
        slack: Added to each element's tolerance: doubles, of the shape of ``actual``.
        exact: PyTorch's result in float64: doubles, of the shape of ``actual``. An element that is as near to it as
            PyTorch's own elements of its size is equal.
        measure: Makes a histogram of ``|ONNX - PyTorch|``, the tolerance and the equality of each element.
        precision: The type that the exported model computes in: floats may have this type, and its tolerances hold.
    """
    if isinstance(expected, torch.Tensor) and expected.dtype == STRING:
        return _compare_strings(actual, string_array(expected))
    if isinstance(expected, str) or not isinstance(actual, torch.Tensor):
        same = not isinstance(actual, torch.Tensor) and actual.shape == () and actual.item() == expected
        shown = f"is {actual.dtype}" if isinstance(actual, torch.Tensor) else f"is {actual.tolist()!r}"
        return Comparison(total=1, problem="" if same else f"{shown}, PyTorch has {expected!r}")
    if not isinstance(expected, torch.Tensor):
        if _kind(torch.tensor(expected).dtype) != _kind(actual.dtype):
            return Comparison(problem=f"is {actual.dtype}, PyTorch has the number {expected!r}")
        expected = torch.tensor(expected, dtype=actual.dtype)
    actual, expected = _comparable(actual), _comparable(expected)
    is_narrow = precision is not None and expected.is_floating_point() and actual.is_floating_point()
    actual = actual.to(expected.dtype) if is_narrow else actual
    dtype = expected.dtype
    is_complex = dtype.is_complex
    if is_complex:
        expected = torch.view_as_real(expected.resolve_conj())
        actual = torch.view_as_real(actual.resolve_conj()) if actual.is_complex() else actual
    if actual.dtype != expected.dtype:
        return Comparison(dtype=dtype, problem=f"is {actual.dtype}, PyTorch has {dtype}")
    if actual.shape != expected.shape:
        return Comparison(dtype=dtype, problem=f"has the shape {list(actual.shape)}, PyTorch {list(expected.shape)}")
    if not actual.numel():
        nothing = torch.zeros(0, dtype=torch.float64)
        return Comparison(dtype=dtype, histogram=measure(nothing, nothing, nothing == 0) if measure else None)
    ours, theirs = actual.to(torch.float64), expected.to(torch.float64)
    real = expected.is_floating_point()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan()) if real else actual == expected
    difference = torch.where(same, 0.0, (ours - theirs).abs())
    if not real:
        # A double cannot represent differences between integers beyond 2**53.
        difference = torch.where(same, difference, difference.clamp_min(1.0))
    allowed = _allowed(theirs, precision if is_narrow and precision else dtype, scale, rtol, atol, is_complex)
    if slack is not None:
        allowed = allowed + slack
    bad = ~(same | (theirs.isfinite() & (difference <= allowed)))
    if exact is not None and exact.shape == bad.shape and bad.any():
        bad = bad & ~_equally_near(ours, theirs, exact, allowed, bad)
    comparison = _result(actual, expected, difference, allowed, bad, dtype)
    return replace(comparison, histogram=measure(difference, allowed, same)) if measure else comparison


def _compare_strings(actual: torch.Tensor | np.ndarray, expected: np.ndarray) -> Comparison:
    if isinstance(actual, torch.Tensor):
        return Comparison(problem=f"is {actual.dtype}, PyTorch has strings")
    if actual.shape != expected.shape:
        return Comparison(problem=f"has the shape {list(actual.shape)}, PyTorch {list(expected.shape)}")
    different = [index for index in np.ndindex(expected.shape) if actual[index] != expected[index]]
    if not different:
        return Comparison(total=expected.size)
    first = f"at index {list(different[0])} is {actual[different[0]]!r}, PyTorch has {expected[different[0]]!r}"
    return Comparison(problem=f"{first}; {len(different)} of {expected.size} strings differ")


def _comparable(x: torch.Tensor) -> torch.Tensor:
    """A tensor to compute with on the CPU; two numbers of four bits as the byte that holds them in ONNX."""
    x = x.detach().cpu()
    return x.view(torch.uint8) if x.dtype == torch.float4_e2m1fn_x2 else x


def _equally_near(
    actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor, bad: torch.Tensor
) -> torch.Tensor:
    """The differing elements that are as near to the float64 result as PyTorch's elements of that size or smaller.

    PyTorch's error is the 99th percentile of these elements' errors, so that no single large rounding excuses others. No element
    may be farther off than a few tolerances: where PyTorch itself is, its result proves nothing.
    """
    error, own, size = (actual - exact).abs(), (expected - exact).abs(), exact.abs()
    near = torch.zeros_like(bad)
    known = own.isfinite() & size.isfinite()
    ordinary = _ordinary(exact)
    if not ordinary.numel():
        return near
    sizes, order = size[known].sort()
    errors = own[known][order]
    octaves = torch.where(size > 0, size, 5e-324).log2().ceil()
    for octave in octaves[bad & known].unique().tolist():
        limit = max(2.0**octave, float(ordinary[(ordinary.numel() - 1) // 4]))
        count = int(torch.searchsorted(sizes, torch.tensor(limit, dtype=torch.float64), right=True))
        common = float(errors[:count].kthvalue(math.ceil(0.99 * count))[0])
        near |= (octaves == octave) & (error <= _NEAR * common)
    return near & bad & known & (error.maximum(own) <= _FARTHEST * allowed)


def _kind(dtype: torch.dtype) -> str:
    if dtype is torch.bool:
        return "bool"
    return "complex" if dtype.is_complex else "float" if dtype.is_floating_point else "integer"


def _allowed(
    expected: torch.Tensor, dtype: torch.dtype, scale: Scale, rtol: float | None, atol: float | None, is_complex: bool
) -> torch.Tensor:
    """The tolerance of each element of a tensor of doubles; 0 for an infinity."""
    row = scale.tolerance(dtype) or Tolerance(0.0, None, 0.0, 0.0)
    relative = row.rtol if rtol is None else rtol
    absolute = absolute_tolerance(expected, row) if atol is None else atol
    size = expected.abs()
    if is_complex:
        size = torch.where(expected.isfinite().all(-1, keepdim=True), size.norm(dim=-1, keepdim=True), size)
    return absolute + relative * torch.where(expected.isfinite(), size, 0.0)


def absolute_tolerance(expected: torch.Tensor, row: Tolerance) -> float:
    """The part of the tolerance that is the same for all elements, from the size of the ordinary elements.

    Ordinary elements are finite and not zero; a fill counts once. Sorted by size, with the quantiles q: ``lower`` is
    q(0.25), and at most 16 q(0.05), so that a group of large elements can't hide a small group of small ones, and at least the
    smallest normal number; ``upper`` is q(0.9), or a smaller quantile, never the largest element. The tolerance is
    ``share * lower``, or if it is more the rounding of larger elements that remains in a small element, ``rounding * upper``;
    but at most ``30 * share * lower``.

    Args:
        expected: Doubles.
        row: The dtype's tolerances.
    """
    if row.share is None:
        return row.atol
    sizes = _ordinary(expected)
    if not sizes.numel():
        return row.atol
    last = sizes.numel() - 1
    lower = max(min(float(sizes[last // 4]), 16 * float(sizes[last // 20])), row.normal)
    upper = float(sizes[last * 9 // 10])
    return max(row.share * lower, min(row.rounding * upper, _CEILING * row.share * lower))


def _ordinary(expected: torch.Tensor) -> torch.Tensor:
    """Sizes of the ordinary elements, ascending."""
    elements = expected[expected.isfinite() & (expected != 0)]
    if elements.numel() > _SAMPLE:
        chosen = torch.randint(0, elements.numel(), (_SAMPLE,), generator=torch.Generator().manual_seed(0))
        elements = elements[chosen]
    values, counts = elements.unique(return_counts=True)
    fills = (counts > 1) & (counts >= _FILL_SHARE * elements.numel())
    return values.abs().repeat_interleave(torch.where(fills, 1, counts)).sort()[0]


def _result(
    actual: torch.Tensor,
    expected: torch.Tensor,
    difference: torch.Tensor,
    allowed: torch.Tensor,
    bad: torch.Tensor,
    dtype: torch.dtype,
) -> Comparison:
    finite = difference[difference.isfinite()]
    largest = float(finite.max()) if finite.numel() else 0.0
    count = int(bad.sum())
    if not count:
        return Comparison(total=bad.numel(), max_abs_difference=largest, dtype=dtype)
    excess = torch.nan_to_num(difference / allowed, nan=float("inf"))
    worst = torch.where(bad, excess, -1.0).argmax()
    index = tuple(int(i) for i in torch.unravel_index(worst, bad.shape)) if bad.dim() else ()
    return Comparison(
        count=count,
        total=bad.numel(),
        max_abs_difference=largest,
        index=index,
        actual=actual[index].item(),
        expected=expected[index].item(),
        allowed=float(allowed[index]),
        dtype=dtype,
    )
