"""Dynamic sizes, and numbers computed from them, in expressions with Python's other numbers, as Python computes these.

torch's symbolic numbers take ints, floats and bools alone. Every other number is unequal to them without a question, such as the
member of an ``IntEnum`` or a ``Fraction``, and ``(n > 3) is True`` never holds.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from onnxplug.torch_private import backed_values, pytree

#: The functions by which code reads numbers from a tensor.
_READS = frozenset((torch.Tensor.item, torch.Tensor.tolist))

#: The methods of numbers that are operators: ``__eq__``, ``__add__``, ``__radd__``, …
_OPERATORS = frozenset(
    method
    for name in vars(operator)
    if name.startswith("__") and callable(getattr(operator, name))
    for method in (name, f"__r{name[2:]}")
    if method in vars(int) or method in vars(float)
)


def plain_operand(number: Any, *, of_condition: bool) -> Any:
    """A number as an int or float, where its class only adds to these, such as an enumeration; else the number itself.

    Args:
        number: The other operand of a symbolic number.
        of_condition: Whether the symbolic number is a ``SymBool``, which takes bools as they are.
    """
    if type(number) is bool:
        return number if of_condition else int(number)
    base: Any
    for base in (int, float):
        if isinstance(number, base):
            own = type(number).__mro__[: type(number).__mro__.index(base)]
            return number if any(_OPERATORS & vars(kind).keys() for kind in own) else base.__pos__(number)
    return number


def constant(number: Any) -> Any:
    """A symbolic number as Python's number, which makes it a constant: torch.export's guards tell."""
    kinds: tuple[tuple[type, Any], ...] = ((torch.SymBool, bool), (torch.SymInt, int), (torch.SymFloat, float))
    return next((kind(number) for symbolic, kind in kinds if isinstance(number, symbolic)), number)


def divided(operation: Callable[[Any, Any], Any], first: Any, second: Any) -> Any:
    """``first // second`` or ``first % second`` of floats as in Python, where ``1.0 // 0.1`` is 9.0 and ``2.5 % 1`` is 0.5.

    torch rounds the quotient ``1.0 / 0.1`` down, and takes every remainder for an integer. By a power of two the quotient is exact;
    any other float makes the symbolic numbers constants, and so does a whole number that a float does not hold exactly.
    """
    if isinstance(second, int | float):
        if isinstance(first, torch.SymInt) and abs(second) < 1 << 53 and float(second).is_integer():
            return torch.sym_float(operation(first, int(second)))
        if math.frexp(abs(second))[0] == 0.5:
            quotient = math.floor(first / second)
            return torch.sym_float(quotient) if operation is operator.floordiv else first - quotient * second
    return operation(constant(first), constant(second))


def is_unequal_by_class(answer: Any, other: Any) -> bool:
    """Whether Python would take a symbolic number for unequal to another number only because of their classes."""
    return answer is NotImplemented and isinstance(other, numbers.Number)


def is_of_sizes(number: Any) -> bool:
    """Whether a symbolic number is computed from sizes of the inputs alone, and not from data."""
    env = getattr(getattr(number, "node", None), "shape_env", None)
    return env is not None and number.node.expr.free_symbols <= backed_values(env).keys()


def observing_reads(original: Callable[..., Any], note: Callable[[FrameType], None]) -> Callable[..., Any]:
    """A function mode's method that notes the frame of each call that reads conditions from a tensor."""

    def call(mode: Any, function: Any, *args: Any) -> Any:
        result = original(mode, function, *args)
        if function in _READS and any(isinstance(leaf, torch.SymBool) for leaf in pytree.tree_leaves(result)):
            note(sys._getframe(1))
        return result

    return call
