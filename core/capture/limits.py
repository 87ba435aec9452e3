"""Maxima and minima of sizes, which torch simplifies because it takes every size for positive: ``max(1, n)`` as ``n``."""

from __future__ import annotations

import functools
from typing import Any

import sympy

from onnxplug.torch_private import sympy_functions


@functools.lru_cache(maxsize=1024, typed=True)
def condition_of_limit(name: str, first: Any, second: Any, result: Any) -> Any:
    """The condition that a size is not 0, without which a simplified maximum or minimum is wrong.

    Args:
        name: ``Max`` or ``Min``.
        first, second: The expressions of the operands.
        result: That of torch's result.

    Returns:
        sympy's condition; ``None`` where the result is right for the size 0 too.
    """
    exprs = [sympy.sympify(expr) for expr in (first, second, result)]
    for size in sorted(exprs[0].free_symbols | exprs[1].free_symbols, key=str):
        at_zero = [expr.xreplace({size: sympy.S.Zero}) for expr in exprs]
        if size.is_positive and getattr(sympy_functions, name)(*at_zero[:2]) != at_zero[2]:
            return sympy.Ne(size, 0, evaluate=False)
    return None
