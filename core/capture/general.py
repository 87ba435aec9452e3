"""The answer to an operator that asks whether a size is 1: the answer for other sizes, which the example may not show.

A squeeze of a size that is 1 at most, ``x[1:2]``, gets the example's answer: the other size, 0, is the special case.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from types import FrameType
from typing import Any

import sympy
import torch
from sympy.logic.boolalg import Boolean
from torch.fx.experimental import sym_node, symbolic_shapes

from onnxplug.capture.implication import implied
from onnxplug.torch_private import backed_values

_OF_SIZES = (sym_node.__file__, symbolic_shapes.__file__)
_ENDS = ("Min", "Max")
_REFERENCES = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "_refs", "__init__.py")


def general_answer(env: Any, expr: Any, frame: FrameType) -> Any:
    """The answer for all sizes of 2 or more, where it differs from the answer for the example's size 1; else ``None``.

    ``x.contiguous()`` asks about strides and about sizes that follow from those of inputs: the number of windows in a row of an
    image, for example. It copies ``x`` where it does so for some sizes: the copy has the sizes and values of ``x``.

    Args:
        frame: The frame that asks.
    """
    examples = backed_values(env)
    if not isinstance(expr, Boolean) or not expr.free_symbols <= examples.keys():
        return None
    example = {symbol: sympy.Integer(examples[symbol]) for symbol in expr.free_symbols}
    if isinstance(expr, sympy.Eq | sympy.Ne) and _copies(frame):
        return _answer_of_copy(expr, example)
    ones = [symbol for symbol, size in example.items() if size == 1 and env.replace(symbol) == symbol]
    if not ones:
        return None
    holds = expr.xreplace(example)
    opposite = {sympy.true: sympy.Not(expr), sympy.false: expr}.get(holds)
    return sympy.Not(holds) if opposite is not None and implied(opposite, dict.fromkeys(ones, (2, None))) else None


def _answer_of_copy(expr: Any, example: dict[Any, Any]) -> Any:
    """The answer with which ``x.contiguous()`` copies, where the example's is another; ``None`` where no sizes need a copy."""
    if isinstance(expr, sympy.Eq):  # a size, compared with 1
        return sympy.false if expr.rhs == 1 and expr.xreplace(example) is sympy.true else None
    equal = sympy.Eq(*expr.args)  # a stride, compared with a copy's
    if equal.xreplace(example) is not sympy.true or implied(equal, dict.fromkeys(example, (1, None))):
        return None
    return sympy.true


def _copies(frame: FrameType | None) -> bool:
    """Whether the question is of ``x.contiguous()``, in torch.export's non-strict or strict mode."""
    while frame is not None and frame.f_code.co_filename in _OF_SIZES:
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in ("__torch_function__", "run_node"):
        return False
    called = frame.f_locals.get("func", getattr(frame.f_locals.get("node"), "target", None))
    return getattr(called, "__name__", called) == "contiguous"


def removes_axis(condition: torch.SymBool, frame: FrameType | None) -> bool:
    """Whether a squeeze asks if a size is 1 that is 1 in the example, and is 1 at most or made 1 by ``unbind``."""
    expr = condition.node.expr
    if not isinstance(expr, sympy.Eq) or 1 not in expr.args or not condition.node.hint:
        return False
    asking = (f.f_code for f in itertools.islice(_outwards(frame), 3))
    if not any(code.co_name == "squeeze" and code.co_filename == _REFERENCES for code in asking):
        return False
    size = expr.lhs if expr.rhs == 1 else expr.rhs
    return is_one_at_most(size, condition.node.shape_env) or any(
        f.f_code.co_name == "unbind" and f.f_code.co_filename == _REFERENCES for f in _outwards(frame)
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_one_at_most(size: Any, env: Any) -> bool:
    """Whether an expression of sizes is 1 at most: ``min(m + 1, n) - min(m, n)``, the size of ``x[m : m + 1]``, is.

    A ``min`` is no larger than either of its operands; where it is subtracted, it is each of them in one case. For ``max`` it is
    the other way round.
    """
    ends = [(part, sign) for part, sign in size.as_coefficients_dict().items() if type(part).__name__ in _ENDS]
    for is_by_cases in (True, False):
        for part, sign in ends:
            if ((type(part).__name__ == "Max") == (sign > 0)) is is_by_cases:
                others = (is_one_at_most(size + sign * (operand - part), env) for operand in part.args)
                return (all if is_by_cases else any)(others)
    return bool(env.bound_sympy(size).upper <= 1)
