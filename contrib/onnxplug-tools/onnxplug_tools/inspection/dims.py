"""Sizes of dimensions in numbers: names and expressions of names, evaluated at given sizes of the names."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from onnxplug.errors import UsageError
from onnxplug.text import did_you_mean

Dim = int | str | None

#: The longest text of a size; an exporter writes no longer text, and it is not evaluated.
_LONGEST = 2000
#: The largest size of a tensor, and the largest intermediate result of an expression.
_LARGEST = 1 << 62

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
#: The functions of sizes that torch writes, by their names.
_FUNCTIONS: dict[str, Callable[..., int]] = {
    "max": max,
    "min": min,
    "mod": lambda a, b: a % b,
    "pythonmod": lambda a, b: a % b,
    "floordiv": lambda a, b: a // b,
    "cleandiv": lambda a, b: a // b,
    "ceildiv": lambda a, b: -(-a // b),
    "modularindexing": lambda a, b, c: a // b % c,
    "abs": abs,
}


def size_of(dim: Dim, sizes: Mapping[str, int]) -> int | None:
    """A dimension's size; ``None`` where it is not known.

    Nothing of the text is run as code: models come from anywhere.

    Args:
        dim: A number, a name, an expression (``"2*batch + 1"``, ``"Max(1, s//2)"``), or ``None``.
    """
    if not isinstance(dim, str):
        return dim
    if dim in sizes:  # a name that reads like an expression too
        return sizes[dim]
    tree = _parsed(dim)
    if tree is None:
        return None
    try:
        size = _computed(tree, sizes)
    except (_Unknown, ZeroDivisionError, TypeError, ValueError, RecursionError):
        return None
    return size if 0 <= size <= _LARGEST else None


def names_in(dim: str) -> set[str]:
    """The names that give a dimension its size: those in its expression, and the whole text, which may be a name itself."""
    tree = _parsed(dim)
    nodes = list(ast.walk(tree)) if tree is not None else []
    others = {
        node.func if isinstance(node, ast.Call) else node.value
        for node in nodes
        if isinstance(node, ast.Call | ast.Attribute)
    }
    return {dim} | {node.id for node in nodes if isinstance(node, ast.Name) and node not in others}


def check_names(sizes: Iterable[str], dims: Collection[str], what: str) -> None:
    """Checks that each name gives a dimension its size.

    Args:
        dims: Names and expressions.
        what: The beginning of the error: ``"no input has"``.
    """
    names = set().union(*map(names_in, dims))
    unknown = next((name for name in sizes if name not in names), None)
    if unknown is not None:
        known = f"They are {', '.join(sorted(dims))}." if dims else "All are static."
        raise UsageError(f"{what} a dimension {unknown!r}", hint=did_you_mean(unknown, names, otherwise=known))


def shape_of(shape: Sequence[Dim] | None, sizes: Mapping[str, int]) -> tuple[int, ...] | None:
    """A shape in numbers; ``None`` where a dimension is not known."""
    if shape is None:
        return None
    sizes_ = []
    for dim in shape:
        size = dim if isinstance(dim, int) else size_of(dim, sizes)
        if size is None or size < 0:  # some exporters write -1 for a dynamic size
            return None
        sizes_.append(size)
    return tuple(sizes_)


class _Unknown(Exception):
    """A part of an expression has no size."""


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr | None:
    if len(text) > _LONGEST:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _computed(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    size = _compute(tree, sizes)
    if abs(size) > _LARGEST:
        raise _Unknown
    return size


def _compute(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    match tree:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.Name(id=name) if name in sizes:
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand, sizes)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_computed(left, sizes), _computed(right, sizes))
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _quotient(_computed(left, sizes), _computed(right, sizes))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_computed(left, sizes), _computed(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=[ast.BinOp(left=left, op=ast.Div(), right=right)], keywords=[]) if (
            name.lower() in ("floor", "ceiling", "ceil")
        ):
            a, b = _computed(left, sizes), _computed(right, sizes)
            return a // b if name.lower() == "floor" else -(-a // b)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name.lower() in _FUNCTIONS:
            return _called(_FUNCTIONS[name.lower()], [_computed(arg, sizes) for arg in args])
    raise _Unknown


def _called(function: Callable[..., int], args: Sequence[int]) -> Any:
    # With one argument, max and min would expect a list.
    if not args or (len(args) == 1 and function in (max, min)):
        return args[0] if args else _unknown()
    return function(*args)


def _unknown() -> int:
    raise _Unknown


def _power(base: int, exponent: int) -> int:
    if not 0 <= exponent <= 64 or abs(base) > 1 << 31:
        raise _Unknown
    return base**exponent


def _quotient(a: int, b: int) -> int:
    """Torch writes ``/`` where it knows that the quotient is whole."""
    if a % b:
        raise _Unknown
    return a // b
