"""Sizes that are divided, or rounded up to a multiple, in one form: torch has a form for each way to write them.

Code pads a size ``n`` to a multiple of 7 by ``-n % 7``, ``(7 - n % 7) % 7``, ``-(-n // 7) * 7 - n`` or
``math.ceil(n / 7) * 7 - n``, and for a convolution that keeps sizes by ``max((math.ceil(n / 2) - 1) * 2 + 3 - n, 0)``. Here all
are written with ``(n + 6) // 7``: the padding is ``7 * ((n + 6) // 7) - n``, and the padded size is a multiple of 7 by its form.
torch's forms mention ``n`` several times, and those of ten layers have millions of terms.

The size after a convolution of stride 2, ``(n - 1) // 2 + 1``, is ``(n + 1) // 2``, and after another one ``(n + 3) // 4``: the
number in a dividend is not negative and less than the divisor, and a quotient in a dividend is divided at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import sympy

from onnxplug.capture.patching import patched
from onnxplug.torch_private import sympy_functions as functions

#: The largest factor of a size that is divided as a float: the product is less than 2**53 for any size in memory.
_LARGEST_FACTOR = 2**10
#: Expressions that are not larger than their operands.
_LINEAR = (sympy.Add, functions.FloorDiv, functions.Mod, functions.PythonMod, functions.Max, functions.Min)


def _negated(dividend: Any, divisor: Any) -> Any:
    """``n`` of ``-n``, or of ``-n`` and a multiple of the divisor; ``None`` for other dividends and divisors."""
    if not (divisor.is_Integer and divisor.is_positive):
        return None
    number, rest = dividend.as_coeff_Add()
    factors = [term.as_coeff_Mul()[0] for term in sympy.Add.make_args(rest)]
    is_negated = all(factor.is_negative for factor in factors) and number.is_Integer and number % divisor == 0
    return -dividend if is_negated and dividend.is_integer else None


def _remainder(dividend: Any, divisor: Any) -> Any:
    """``-n % 7`` as ``7 * ((n + 6) // 7) - n``."""
    size = _negated(dividend, divisor)
    if size is None:
        return None
    _, size = size.as_coeff_Add()  # without a multiple of the divisor
    if isinstance(size, functions.Mod | functions.PythonMod) and size.args[1] == divisor:  # (7 - n % 7) % 7 is -n % 7
        size = size.args[0]
    return divisor * functions.FloorDiv(size + divisor - 1, divisor) - size


def _is_of_slice(size: Any) -> bool:
    """Whether a minimum or maximum is a term, as in sizes of slices: torch decides their signs in its own form alone."""
    return any(isinstance(term.as_coeff_Mul()[1], functions.Max | functions.Min) for term in sympy.Add.make_args(size))


def _quotient(dividend: Any, divisor: Any) -> Any:
    """``-n // 7`` as ``-((n + 6) // 7)``, ``(n - 1) // 2`` as ``(n + 1) // 2 - 1``, ``(n // 2 + 1) // 3`` as ``(n + 2) // 6``."""
    if not (divisor.is_Integer and divisor.is_positive):
        return None
    size = _negated(dividend, divisor)
    if size is not None:
        return -functions.FloorDiv(size + divisor - 1, divisor)
    number, rest = dividend.as_coeff_Add()
    if number.is_zero or not number.is_Integer or not rest.is_integer or _is_of_slice(rest):
        return None
    whole, part = divmod(number, divisor)
    if whole:
        return functions.FloorDiv(rest + part, divisor) + whole
    if isinstance(rest, functions.FloorDiv) and rest.args[1].is_Integer and rest.args[1].is_positive:
        inner, by = rest.args
        return functions.FloorDiv(inner + number * by, by * divisor)
    return None


def _is_multiple(expr: Any) -> bool:
    """Whether an expression is a small number of times another."""
    factor, rest = expr.as_coeff_Mul()
    return expr.is_Mul and not rest.is_Mul and bool(factor.is_Integer) and abs(factor) <= _LARGEST_FACTOR


def _ceiling(number: Any) -> Any:
    """``ceil(n / 7)`` as ``(n + 6) // 7``, for sums of sizes and their multiples: floats divide them exactly enough."""
    if not isinstance(number, functions.IntTrueDiv):
        return None
    size, divisor = number.args
    parts = [part for part in sympy.preorder_traversal(size) if not (part.is_Symbol or part.is_Integer)]
    is_exact = all(isinstance(part, _LINEAR) or _is_multiple(part) for part in parts)
    if not (is_exact and divisor.is_Integer and divisor.is_positive):
        return None
    return functions.FloorDiv(size + divisor - 1, divisor)


def _extreme(is_largest: bool, *operands: Any) -> Any:
    """``max(a, b)`` or ``min(a, b)``, where the difference of a quotient and its dividend decides it."""
    if len(operands) != 2:
        return None
    first, second = operands
    bounds = _rounding(first - second)
    if bounds is None or (bounds[0] < 0 < bounds[1]):
        return None
    return first if (bounds[0] >= 0) is is_largest else second


def _rounding(difference: Any) -> tuple[int, int] | None:
    """The ends of the range of ``7 * (n // 7) - n + 3``, or of its opposite; ``None`` for expressions of another form."""
    for term in sympy.Add.make_args(difference):
        factor, quotient = term.as_coeff_Mul()
        if not (isinstance(quotient, functions.FloorDiv) and factor.is_Integer and quotient.args[1].is_Integer):
            continue
        dividend, divisor = quotient.args
        rounded = abs(factor)
        if divisor % rounded == 0:  # n // 14 is n // 2 // 7
            whole = functions.FloorDiv(dividend, divisor / rounded)
            rest = sympy.expand(difference - term + sympy.sign(factor) * whole)
            if rest.is_Integer:
                ends = int(rest), int(rest - sympy.sign(factor) * (rounded - 1))
                return min(ends), max(ends)
    return None


def _in_one_form(kind: Any, form: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Has a class of torch's expressions make an operand's or operands' other form where it has one."""
    new = kind.__new__

    @functools.wraps(new)
    def create(cls: Any, *operands: Any, **options: Any) -> Any:
        operands = tuple(map(sympy.sympify, operands))
        other = form(*operands) if cls is kind and not options else None
        return new(cls, *operands, **options) if other is None else other

    return patched(kind, "__new__", staticmethod(create))


@contextlib.contextmanager
def sizes_rounded_up() -> Iterator[None]:
    """While it holds, torch's expressions of padded sizes have one form."""
    forms: dict[Any, Callable[..., Any]] = {
        functions.Mod: _remainder,
        functions.PythonMod: _remainder,
        functions.FloorDiv: _quotient,
        functions.CeilToInt: _ceiling,
        functions.Max: functools.partial(_extreme, True),
        functions.Min: functools.partial(_extreme, False),
    }
    with contextlib.ExitStack() as stack:
        for kind, form in forms.items():
            stack.enter_context(_in_one_form(kind, form))
        yield
