"""Conclusions from the ranges of sizes: by expressions and intervals, never by trying some sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxplug.torch_private import ValueRanges, bound_sympy, int_oo

Ranges = Mapping[Any, tuple[int, int | None]]
"""Symbol to its smallest and its largest size in a model; ``None`` for an open end."""


class Sizes:
    """Facts about sizes from their ranges.

    Args:
        ranges: The sizes that the model may have.
        least: The smallest size to assume without a range, and instead of smaller sizes in a range.
    """

    def __init__(self, ranges: Ranges, least: int = 1) -> None:
        self.ranges = dict(ranges)
        self.least = least

    def range_of(self, symbol: Any) -> tuple[int, int | None]:
        """The smallest and the largest size of a symbol."""
        low, high = self.ranges.get(symbol, (self.least, None))
        return max(low, self.least), high

    def _bounds(self, expr: Any) -> Any:
        known = {}
        for symbol in expr.free_symbols:
            low, high = self.range_of(symbol)
            known[symbol] = ValueRanges(low, int_oo if high is None else high)
        return bound_sympy(expr, known)

    def difference(self, a: Any, b: Any) -> list[Any]:
        """The factors of ``a - b``; a single factor 0 where both are the same at all sizes."""
        import sympy

        distance = sympy.expand(a - b)
        factors: list[Any] = (distance if distance.is_number else sympy.factor(distance)).as_ordered_factors()
        return factors

    def may_be_zero(self, factor: Any) -> bool:
        """Whether a number is 0 at some size, as far as intervals tell."""
        return 0 in self._bounds(factor)

    def are_equal(self, a: Any, b: Any) -> bool:
        """Whether two numbers are the same at all sizes."""
        return self.difference(a, b) == [0]

    def are_distinct(self, a: Any, b: Any) -> bool:
        """Whether two numbers are the same at no size."""
        return not any(map(self.may_be_zero, self.difference(a, b)))

    def is_above(self, a: Any, b: Any, *, or_equal: bool = False) -> bool:
        """Whether a number is larger than another at all sizes."""
        sign = 1
        for factor in self.difference(a, b):
            bounds = self._bounds(factor)
            if bounds.upper < 0 or (or_equal and bounds.upper <= 0):
                sign = -sign
            elif not (bounds.lower > 0 or (or_equal and bounds.lower >= 0)):
                return False
        return sign > 0

    def hold(self, condition: Any) -> bool:
        """Whether sizes fulfil a condition at all sizes that they may have; False where that is not known."""
        import sympy

        if condition in (sympy.true, sympy.false):
            return bool(condition)
        if isinstance(condition, sympy.And):
            return all(map(self.hold, condition.args))
        if isinstance(condition, sympy.Or):
            return any(map(self.hold, condition.args))
        if isinstance(condition, sympy.Not):
            return self.hold(sympy.Not(condition.args[0])) if condition.args[0].is_Relational else False
        if not condition.is_Relational:
            return False
        a, b = condition.args
        if isinstance(condition, sympy.Eq):
            return self.are_equal(a, b)
        if isinstance(condition, sympy.Ne):
            return self.are_distinct(a, b)
        if isinstance(condition, (sympy.Lt, sympy.Le)):
            a, b = b, a
        return self.is_above(a, b, or_equal=isinstance(condition, (sympy.Ge, sympy.Le)))
