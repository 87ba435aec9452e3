"""Whether ranges of sizes imply a condition: by bounds of expressions, complete case distinction, and enumeration of few cases.

Nothing is concluded from some sizes for others. A condition that can't be decided is not implied.

Examples, for a size ``n`` of 0 or more unless another range is given::

    n // 2 >= 1 for 2 <= n <= 64    implied, by the bounds of n // 2
    2*(n // 2) + n % 2 == n         implied, by the cases n = 2*q and n = 2*q + 1
    n % 64 != 1 for 2 <= n <= 64    implied, by trying each n
    n**2 >= n                       implied, by the cases n = 0, n = 1 and n >= 2
    n != 77                         not implied
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
from sympy.core.relational import Relational

from onnxplug.torch_private import ValueRanges, bound_sympy, int_oo

Ranges = Mapping[Any, tuple[int | None, int | None]]
"""Symbol to its smallest and its largest number; ``None`` for an open end."""

#: The largest number of cases to distinguish.
_MOST = 1024
#: Larger than any number in a model's code; the largest size.
_LARGE, _LARGEST = 2**40, 2**62
_DIVISIONS = ("FloorDiv", "Mod", "PythonMod", "CeilDiv")


def implied(expr: Any, ranges: Ranges) -> bool:
    """Whether a condition holds for all numbers in some ranges; False where that is unknown.

    Args:
        ranges: The range of each of its symbols; a missing symbol is 0 or more if sympy knows it to be, else any number.
    """
    if expr.is_Boolean and not expr.free_symbols:
        return bool(expr is sympy.true)
    ranges = {s: ranges.get(s, (0 if s.is_nonnegative else None, None)) for s in expr.free_symbols}
    if isinstance(expr, sympy.And):
        return all(implied(part, ranges) for part in expr.args)
    if isinstance(expr, sympy.Or) and any(implied(part, ranges) for part in expr.args):
        return True
    if _holds(expr, ranges):
        return True
    whole = _without_quotient(expr, ranges)
    whole = _without_smallest(expr) if whole is None else whole
    if whole is not None:
        return implied(whole, ranges)
    return any(_by_cases(cases(expr, ranges)) for cases in (_numbers, _smallest, _residues))


def contradicted(expr: Any, ranges: Ranges) -> bool:
    """Whether a condition holds for none of the numbers in some ranges; False where that is unknown."""
    return implied(sympy.Not(expr), ranges)


def is_bounded(expr: Any) -> bool:
    """Whether a condition is an equality with a number that is known to fail at large sizes, unlike ``n % 2 == 0``."""
    if not isinstance(expr, sympy.Eq) or not any(side.is_number for side in expr.args):
        return False
    return contradicted(expr, dict.fromkeys(expr.free_symbols, (_LARGE, _LARGEST)))


def _without_quotient(expr: Any, ranges: Ranges) -> Any:
    """``a // b == 3`` as ``3*b <= a and a < 4*b``; ``None`` for other conditions, or where ``b`` may be 0 or less."""
    if not isinstance(expr, Relational) or type(expr.lhs).__name__ not in ("FloorDiv", "CleanDiv"):
        return None
    (a, b), number = expr.lhs.args, expr.rhs
    if not number.is_Integer or b.is_Integer or not implied(b >= 1, ranges):
        return None
    least, more = a >= number * b, a >= (number + 1) * b
    forms = {sympy.Ge: least, sympy.Gt: more, sympy.Lt: sympy.Not(least), sympy.Le: sympy.Not(more)}
    forms |= {sympy.Eq: sympy.And(least, sympy.Not(more)), sympy.Ne: sympy.Or(sympy.Not(least), more)}
    return forms[type(expr)]


def _without_smallest(expr: Any) -> Any:
    """``n == min(n, 64)`` as ``n <= 64``; ``None`` for other conditions."""
    if not isinstance(expr, sympy.Eq | sympy.Ne):
        return None
    for side, other in (expr.args, expr.args[::-1]):
        if type(other).__name__ in ("Min", "Max") and side in other.args:
            compare = sympy.Le if type(other).__name__ == "Min" else sympy.Ge
            holds = sympy.And(*(compare(side, limit) for limit in other.args if limit != side))
            return holds if isinstance(expr, sympy.Eq) else sympy.Not(holds)
    return None


def _by_cases(cases: Iterator[tuple[Any, Ranges]] | None) -> bool:
    if cases is None:
        return False
    try:
        return all(case is sympy.true or (case is not sympy.false and _holds(case, ranges)) for case, ranges in cases)
    except ZeroDivisionError:
        return False


def _holds(expr: Any, ranges: Ranges) -> bool:
    """Whether the bounds of its sides decide that a comparison holds."""
    if not isinstance(expr, Relational):
        return False
    try:
        expr, within = _from_zero_on(expr, ranges)
        if not isinstance(expr, Relational):
            return bool(expr is sympy.true)
        difference = _without_powers(expr.lhs - expr.rhs, within)
        bounds = bound_sympy(difference, {s: within[s] for s in difference.free_symbols})
        compared = type(expr)(bounds.lower, 0), type(expr)(bounds.upper, 0)
    except (ArithmeticError, TypeError, ValueError, AssertionError, AttributeError, KeyError, RecursionError):
        return False  # an expression that the analysis does not know
    if isinstance(expr, sympy.Ne):
        return bool(bounds.lower > 0) or bool(bounds.upper < 0)
    return all(side is sympy.true or side is True for side in compared)


def _without_powers(expr: Any, within: dict[Any, Any]) -> Any:
    """An expression with a symbol for each root, as torch has no bounds for roots; their ranges are added to ``within``."""
    whole = {p: p.args[0] ** p.args[1] for p in _parts(expr, "PowByNatural") if p.args[1] in range(1, 9)}
    expr = sympy.expand(expr.xreplace(whole))
    for power in _parts(expr, "FloatPow"):
        base, exponent = power.args
        bounds = bound_sympy(base, {s: within[s] for s in base.free_symbols})
        if exponent.is_number and 0 < exponent <= 1 and bounds.lower >= 0:
            root = sympy.Symbol(f"power_{len(within)}", real=True)
            # An end is moved by more than the error of a float.
            low, high = (float(e) ** float(exponent) if e.is_finite else math.inf for e in (bounds.lower, bounds.upper))
            within[root] = ValueRanges(sympy.Float(low * (1 - 1e-9)), sympy.Float(high) * (1 + 1e-9))
            expr = expr.xreplace({power: root})
    return expr


def _parts(expr: Any, *kinds: str) -> list[Any]:
    """The calls of given torch functions within an expression."""
    return [part for part in sympy.preorder_traversal(expr) if type(part).__name__ in kinds]


def _from_zero_on(expr: Any, ranges: Ranges) -> tuple[Any, dict[Any, Any]]:
    """The condition with symbols whose ranges begin at 0 instead of elsewhere, and these ranges."""
    replaced, within = {}, {}
    for number, (symbol, (low, high)) in enumerate(ranges.items()):
        if low is None:
            within[symbol] = ValueRanges(-int_oo, int_oo if high is None else high)
            continue
        above = sympy.Symbol(f"above_{number}", nonnegative=True, integer=True)
        replaced[symbol] = above + low
        within[above] = ValueRanges(0, int_oo if high is None else high - low)
    return expr.xreplace(replaced), within


def _numbers(expr: Any, ranges: Ranges) -> Iterator[tuple[Any, Ranges]] | None:
    """The condition at each combination of sizes; ``None`` where there are many."""
    spans = [range(low, high + 1) for low, high in ranges.values() if low is not None and high is not None]
    if len(spans) < len(ranges) or math.prod(max(0, s.stop - s.start) for s in spans) > _MOST:
        return None
    return (
        (expr.xreplace(dict(zip(ranges, map(sympy.Integer, n), strict=True))), {}) for n in itertools.product(*spans)
    )


def _smallest(expr: Any, ranges: Ranges) -> Iterator[tuple[Any, Ranges]] | None:
    """The condition for the two smallest sizes, and for all larger sizes, as ``n**2 >= n`` needs it."""
    begins = {s: low for s, (low, high) in ranges.items() if low is not None and (high is None or high >= low + 2)}
    if len(begins) < len(ranges) or len(ranges) > 3:
        return None
    cases = (dict(zip(begins, n, strict=True)) for n in itertools.product(range(3), repeat=len(begins)))
    return (
        (
            expr.xreplace({s: sympy.Integer(begins[s] + n) for s, n in case.items() if n < 2}),
            {s: (begins[s] + 2, ranges[s][1]) for s, n in case.items() if n == 2},
        )
        for case in cases
    )


def _residues(expr: Any, ranges: Ranges) -> Iterator[tuple[Any, Ranges]] | None:
    """The condition for each remainder of its symbols by their divisors; ``None`` where nothing is divided.

    With ``n = 4*q + 1``, ``n // 2`` is ``2*q`` and ``n % 4`` is 1.
    """
    periods = dict.fromkeys(ranges, 1)
    for part in _parts(expr, *_DIVISIONS):
        if part.args[1].is_Integer:
            for symbol in part.args[0].free_symbols:
                periods[symbol] = math.lcm(periods[symbol], abs(int(part.args[1])) or 1)
    count = math.prod(periods.values())
    if not 1 < count <= _MOST or any(low is None for low, _ in ranges.values()):
        return None
    divided = [s for s, period in periods.items() if period > 1]
    return (
        _residue(expr, ranges, {s: (periods[s], rest) for s, rest in zip(divided, chosen, strict=True)})
        for chosen in itertools.product(*(range(periods[s]) for s in divided))
    )


def _residue(expr: Any, ranges: Ranges, chosen: Mapping[Any, tuple[int, int]]) -> tuple[Any, Ranges]:
    replaced: dict[Any, Any] = {}
    within = dict(ranges)
    for number, (symbol, (period, rest)) in enumerate(chosen.items()):
        low, high = within.pop(symbol)
        assert low is not None
        least = -((rest - low) // period)
        if high is not None and (high - rest) // period < least:
            return sympy.true, {}  # no such number is in the range
        quotient = sympy.Symbol(f"quotient_{number}", nonnegative=True, integer=True)
        replaced[symbol] = period * quotient + rest
        within[quotient] = (least, None if high is None else (high - rest) // period)
    return _divided(expr.xreplace(replaced)), within


def _divided(expr: Any) -> Any:
    """An expression with divisions by integers carried out where the indivisible parts are numbers."""
    if not expr.args:
        return expr
    args = [_divided(arg) for arg in expr.args]
    kind = type(expr).__name__
    if kind in _DIVISIONS and args[1].is_Integer and args[1] > 0:
        divisor = args[1]
        constant, terms = sympy.expand(args[0]).as_coeff_add()
        factors = [term.as_coeff_Mul() for term in terms]
        whole = all(number.is_Integer and number % divisor == 0 and rest.is_integer for number, rest in factors)
        if constant.is_Integer and whole:
            if kind in ("Mod", "PythonMod"):
                return constant % divisor
            rest = constant // divisor if kind == "FloorDiv" else -((-constant) // divisor)
            return sum((term / divisor for term in terms), rest)
    return expr.func(*args)
