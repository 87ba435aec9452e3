"""Maxima and minima of sizes, which torch simplifies because it takes every size for positive: ``max(1, n)`` as ``n``."""

from __future__ import annotations

import functools
from typing import Any

import sympy

from onnxplug.torch_private import sympy_functions


@functools.lru_cache(maxsize=1024, typed=True)
def conditions_of_limit(name: str, first: Any, second: Any, result: Any) -> tuple[Any, ...]:
    """The conditions that sizes are not 0, without which a simplified maximum or minimum is wrong.

    Args:
        name: ``Max`` or ``Min``.
        first, second: The expressions of the operands.
        result: That of torch's result.

    Returns:
        sympy's conditions, one for each size; none where the result is right for sizes of 0 too.
    """
    exprs = [sympy.sympify(expr) for expr in (first, second, result)]
    sizes = [size for size in exprs[0].free_symbols | exprs[1].free_symbols if size.is_positive]
    conditions = []
    for size in sorted(sizes, key=str):
        at_zero = [expr.xreplace({size: sympy.S.Zero}) for expr in exprs]
        if getattr(sympy_functions, name)(*at_zero[:2]) != at_zero[2]:
            conditions.append(sympy.Ne(size, 0, evaluate=False))
    return tuple(conditions)
