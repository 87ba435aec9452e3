"""Dimensions named by an expression of others: ``"past + sequence"``."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from onnxplug.errors import UsageError
from onnxplug.text import shortened

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}
#: sympy writes them with a capital letter.
_FUNCTIONS = frozenset(("min", "max", "Min", "Max"))


class Multiple(NamedTuple):
    """A declared size, ``factor * root + offset``; ``root`` is the name of a ``Dim``."""

    root: str
    factor: int
    offset: int


def names_in(text: str) -> list[str]:
    """The names in a sum, difference, product, ``min`` or ``max``, in order; empty for a plain name or another text."""
    tree = _parse(text)
    if tree is None:
        return []
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions)
    return list(dict.fromkeys(names))


def is_expression(text: str, known: Mapping[str, Any]) -> bool:
    """Whether a dimension's name is an expression of others.

    Args:
        known: The names of the other dimensions.

    Raises:
        UsageError: Some of its names are dimensions and others are not.
    """
    names = names_in(text)
    unknown = [name for name in names if name not in known]
    if len(unknown) == len(names):
        return False  # a name that happens to contain an operator: "batch-size"
    if unknown:
        raise UsageError(
            f"the dimension {text!r} names {unknown[0]!r}, but no dimension has that name",
            hint=f"The dimensions are {', '.join(sorted(name for name in known if not names_in(name)))}.",
        )
    return True


def evaluate(text: str, values: Mapping[str, Any]) -> Any:
    """The value of an expression (:func:`names_in`), of numbers or of sympy's symbols by their names."""
    tree = _parse(text)
    assert tree is not None
    return _value(tree, values)


def named(names: Mapping[str, str], symbol: Any) -> Any:
    """One of torch's symbols as sympy's expression of the user's names.

    Args:
        names: Symbol of torch (``"s77"``) to the user's name, which may be an expression of other names.
        symbol: sympy's symbol, kept if it has no name.
    """
    text = names.get(str(symbol))
    if text is None:
        return symbol
    from sympy import Symbol

    parts = names_in(text)
    if parts and set(parts) <= set(names.values()):
        return evaluate(text, {part: Symbol(part, **symbol.assumptions0) for part in parts})
    return Symbol(text, **symbol.assumptions0)


def in_names(names: Mapping[str, str], size: Any) -> Any:
    """A size, an int or torch's expression of symbols, with the user's names for the symbols."""
    return size if isinstance(size, int) else size.xreplace({s: named(names, s) for s in size.free_symbols})


def same_symbols(expr: Any) -> Any:
    """An expression with a single symbol for each name: torch declares sizes not negative and numbers unrestricted."""
    from sympy import Symbol

    if not hasattr(expr, "free_symbols"):
        return expr
    return expr.xreplace({s: Symbol(s.name, integer=True) for s in expr.free_symbols})


def expand(difference: Any) -> Any:
    """An expression or number multiplied out: 0 if it is always 0."""
    import sympy

    return sympy.expand(difference)


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    sides, name = [_value(argument, values) for argument in node.args], node.func.id.lower()
    if not any(hasattr(side, "free_symbols") for side in sides):
        return min(sides) if name == "min" else max(sides)
    import sympy

    return sympy.Min(*sides) if name == "min" else sympy.Max(*sides)


def _parse(text: str) -> ast.expr | None:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    except (RecursionError, MemoryError) as error:
        raise UsageError(f"the expression of a dimension is too long: {shortened(text, 80)!r}") from error
    return tree if isinstance(tree, ast.BinOp | ast.Call) and _allowed(tree) else None


def _allowed(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _OPERATORS and _allowed(node.left) and _allowed(node.right)
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
        return known and len(node.args) > 1 and not node.keywords and all(map(_allowed, node.args))
    return isinstance(node, ast.Name) or (isinstance(node, ast.Constant) and type(node.value) is int)
