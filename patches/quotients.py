"""Quotients of sizes while a model is captured, without sympy's search for simpler forms.

torch divides both operands of ``a // b`` by a common factor of their terms, and has sympy simplify the results, for seconds or
minutes where sizes come from many layers. A common factor of terms cancels term by term.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import sympy

from onnxplug.capture.patching import patched
from onnxplug.torch_private import sympy_functions


def cancelled(quotient: Any) -> Any:
    """A quotient of an expression and a factor of all its terms as an expression without denominators; else simplified by sympy."""
    if not isinstance(quotient, sympy.Expr):
        return sympy.simplify(quotient)
    # 2 * n + 2 and n + 1 have a factor in common.
    result = sympy.Mul(*(part for factor in sympy.Mul.make_args(quotient) for part in _without_number(factor)))
    sums = [factor for factor in sympy.Mul.make_args(result) if isinstance(factor, sympy.Add)]
    if len(sums) == 1 and not _is_whole(result):
        others = result / sums[0]
        result = sympy.Add(*(term * others for term in sums[0].args))
    return result if _is_whole(result) else sympy.simplify(quotient)


def _without_number(factor: Any) -> tuple[Any, ...]:
    """A factor, or the number that all terms of a sum have in common and the sum divided by it, each to the factor's power."""
    base, power = factor.as_base_exp()
    return tuple(part**power for part in base.primitive()) if isinstance(base, sympy.Add) else (factor,)


def _is_whole(expr: Any) -> bool:
    """Whether an expression is a sum of products of whole numbers and of factors that are no fractions."""
    factors = [factor for term in sympy.Add.make_args(expr) for factor in sympy.Mul.make_args(term)]
    return not any(
        (isinstance(factor, sympy.Number) and not isinstance(factor, sympy.Integer))
        or (isinstance(factor, sympy.Pow) and not factor.exp.is_nonnegative)
        for factor in factors
    )


@contextlib.contextmanager
def quotients_cancelled() -> Iterator[None]:
    """While it holds, torch's expressions cancel common factors so."""
    changed: Any = types.ModuleType(sympy.__name__)
    vars(changed).update(vars(sympy), simplify=cancelled)
    with patched(sympy_functions, "sympy", changed):
        yield
