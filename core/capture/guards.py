"""What the Python code of a model asks of dynamic sizes, and torch.export takes for granted.

``if x.shape[1] > 4``, ``range(n // 2)`` and ``int(n * 1.5)`` need a bool or an int while the model is traced.
torch.export takes the example's and keeps a guard beside the graph; an ONNX model has no guards. What operators ask
of sizes is left out, as PyTorch refuses other sizes itself, unless the graph has the answer as a constant
(:mod:`onnxplug.capture.constants`). So is what the code asks only in order to raise an error.
"""

from __future__ import annotations

import ast
import functools
import glob
import itertools
import linecache
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from onnxplug.capture.constants import Constants
from onnxplug.capture.dimensions import in_names
from onnxplug.capture.locations import is_torch_file
from onnxplug.errors import CaptureError
from onnxplug.torch_private import python_notation

#: Sizes tried to find out whether a guard holds for every size, of one symbol, of two and of more; the last ones are
#: beyond any limit in a model's code.
_TRIED = (*range(2, 18), 24, 32, 48, 64, 100, 128, 224, 256, 512, 1000, 1024, 5040, 65536, 2**20 + 6, 2**31 + 11)
_FEW = (2, 3, 4, 5, 6, 7, 8, 30, 65536, 2**31 + 11)
_FEWER = (2, 3, 5, 8, 2**31 + 11)
#: A multiple of every number that models pad to, or divide their inputs by.
_PERIOD = 2**12 * 3**2 * 5 * 7 * 11 * 13
#: Parts of torch that work out the shapes of operators' results, or run operators written in C++.
_OPERATORS = (
    *("_meta_registrations.py", "_ops.py", "_dynamo/utils.py"),
    *(f"{folder}{os.sep}" for folder in ("_subclasses", "_refs", "_prims", "_prims_common", "_decomp", "_library")),
    *(f"{folder}{os.sep}" for folder in ("_export", "export", "fx", "utils", "_inductor", "_functorch")),
    *("_higher_order_ops" + os.sep,),
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_CHECKS = re.compile(r"_check\w*|_assert\w*")


#: Parts of the names of torch's functions that ask for sizes to settle strides, which ONNX doesn't have.
_LAYOUT = ("contiguous", "channels_last", "strides", "dense", "memory_format")
#: Sizes that are tried to find out whether a condition holds for all but 0 and 1: fewer where several are combined.
_SIZES = (2, 3, 4, 5, 7, 8, 9, 16, 17, 64, 100, 1000, 1023, 10**5, 2**31, 2**40)
_FEWER_SIZES = (2, 3, 17, 2**31)
_MOST_COMBINATIONS = 4096


@dataclass(frozen=True)
class Condition:
    """What holds for the example's sizes, and not for all.

    Attributes:
        expr: sympy's expression of torch's symbols.
        place: The user's ``file:line``, ``None`` when torch recorded none.
        fixed: Whether it sets an expression of sizes to a constant, so that it holds for few sizes.
    """

    expr: Any
    place: str | None
    fixed: bool

    @property
    def symbols(self) -> frozenset[Any]:
        """torch's symbols of the sizes concerned."""
        return frozenset(self.expr.free_symbols)

    def text(self, names: Mapping[str, str]) -> str:
        """The condition in Python's notation.

        Args:
            names: Symbol of torch to the user's name for it.
        """
        text = _python(in_names(names, self.expr)).replace("torch.sym_float", "float")
        text = re.sub(r"(\d\.\d*?)0+(?!\d)", r"\1", text)  # sympy writes 1.5 with all digits of its precision
        return re.sub(r"(\d)\.(?!\d)", r"\1.0", text)

    def allows(self, sizes: Mapping[Any, Any]) -> bool:
        """Whether it holds for some sizes; True where that is unknown, False where the model divides by 0."""
        return may_hold(self.expr, sizes) is True


def conditions(
    program: torch.export.ExportedProgram, allowed: Mapping[Any, tuple[int, int]], *, one_size: bool = True
) -> list[Condition]:
    """What the Python code of a captured model asks of its dynamic sizes, beyond their being no 0 and no 1.

    Args:
        program: The captured program.
        allowed: Symbol to the smallest and largest size that the user declared for it.
        one_size: Whether that two sizes are the same one is such a condition; the types of the program's inputs say it too.
    """
    found: dict[Any, Condition] = {}
    sizes = list(_input_sizes(program))
    if not sizes:
        return []
    env = sizes[0].node.shape_env
    constants = Constants(program)
    hints = _hints(sizes)
    for guard in env.guards:
        expr = env.replace(guard.expr)
        if one_size and not expr.free_symbols and all(env.replace(s).free_symbols for s in guard.expr.free_symbols):
            expr = guard.expr  # sizes are what others are from here on, so that the guard is true of itself
        if not expr.free_symbols or expr in found:
            continue
        place = user_line(guard.sloc)
        if not is_of_python(guard.sloc):
            if (constant := constants.of_guard(guard)) is None:
                continue
            place = constant.place or place
        place = place or constants.place_of(expr)
        if not holds_for_all(expr, allowed) and not only_raises(place):
            examples = {s: env.replace(s).xreplace(hints) for s in expr.free_symbols}
            found[expr] = Condition(expr, place, _is_fixed(expr, examples))
    return list(found.values())


def condition_of(
    guard: Any, program: torch.export.ExportedProgram, allowed: Mapping[Any, tuple[int, int]]
) -> Condition | None:
    """What a guard asks of the sizes of a program, whoever asked for it; ``None`` where it holds for all that are allowed.

    Args:
        guard: torch's guard.
        program: The program.
        allowed: Symbol to the smallest and largest size that it may have.
    """
    sizes = list(_input_sizes(program))
    expr = sizes[0].node.shape_env.replace(guard.expr) if sizes else guard.expr
    if not expr.free_symbols:
        expr = guard.expr  # a size is a constant from here on, so that the guard is true of itself
    if holds_for_all(expr, allowed):
        return None
    hints = _hints(sizes)
    examples = {s: s.xreplace(hints) for s in expr.free_symbols}
    return Condition(expr, user_line(guard.sloc), _is_fixed(expr, examples))


def _hints(sizes: Iterable[torch.SymInt]) -> dict[Any, Any]:
    """Symbol to its size in the example inputs."""
    import sympy

    return {s.node.expr: sympy.Integer(s.node.hint) for s in sizes if s.node.expr.is_Symbol and s.node.hint is not None}


def at_least_two(declared: Mapping[Any, tuple[int, int]]) -> list[Condition]:
    """A condition for each size that is declared to be 2 or more; torch writes the same range where nothing is declared."""
    return [Condition(symbol >= 2, None, fixed=False) for symbol, (low, _) in declared.items() if low == 2]


def python_guards(program: torch.export.ExportedProgram) -> Iterator[tuple[Any, str | None]]:
    """torch's guards that Python code asked for, each with the user's line."""
    for size in itertools.islice(_input_sizes(program), 1):
        for guard in size.node.shape_env.guards:
            if is_of_python(guard.sloc):
                yield size.node.shape_env.replace(guard.expr), user_line(guard.sloc)


def fixed_by(name: str, condition: Condition, names: Mapping[str, str]) -> CaptureError:
    """The error for a dimension that must be dynamic.

    Args:
        name: What to call the dimension.
        condition: What the model's code makes constant.
        names: Symbol of torch to the user's name for it.
    """
    where = f" at {condition.place}" if condition.place else ""
    return FixedExpressionError(
        f"{name} was asked to be dynamic, but the model's code{where} fixes it: torch.export makes "
        f"{condition.text(names)} a constant, with its value for the example inputs",
        hint="Compute it with //, math.floor or torch.sym_int instead of int(); avoid a Python loop over a size, a branch on it "
        "(torch.cond), a number of tensors that depends on it (split), and an argument that PyTorch takes as a plain int "
        "(kernel_size; adaptive_avg_pool2d(x, 1) takes the mean over any size); or make the dimension static.",
    )


class FixedExpressionError(CaptureError):
    """The model's code makes a constant of an expression of dynamic sizes."""


def warning_text(condition: Condition, names: Mapping[str, str]) -> str:
    """What to say of a condition that holds for some sizes and not for others."""
    where = f" at {condition.place}" if condition.place else ""
    return (
        f"the exported model is right only where {condition.text(names)}: the model's code{where} branches on it, and the "
        "exported model takes the branch of the example inputs at every size. Declare the range "
        "(torch.export.Dim(name, min=..., max=...)), or use torch.cond."
    )


def user_line(sloc: Any) -> str | None:
    """The user's line at which a guard was made."""
    frame = getattr(sloc, "framework_loc", None)
    if frame is not None and not is_torch_file(frame.filename):
        return f"{frame.filename}:{frame.lineno}"
    user = re.search(r"#\s*(\S+):(\d+) in ", str(getattr(sloc, "maybe_user_loc", None) or ""))
    return f"{_whole_path(user[1])}:{user[2]}" if user is not None else None


@functools.lru_cache(maxsize=1024)
def _whole_path(path: str) -> str:
    """The path of a file, of which torch leaves out the beginning that it shares with torch's own folder."""
    if os.path.isabs(path):
        return path
    # Where only the root is shared, torch leaves out a letter of the next folder too.
    shared = [str(folder / path) for folder in Path(_TORCH).parents]
    candidates = [*shared, *glob.glob(f"{os.sep}?{glob.escape(path)}")]
    return next(filter(os.path.isfile, candidates), path)


def _input_sizes(program: torch.export.ExportedProgram) -> Iterator[torch.SymInt]:
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            yield from (size for size in sizes if isinstance(size, torch.SymInt))


def is_of_python(sloc: Any) -> bool:
    """Whether code in Python asked, of the model or of torch's layers and functions, and no operator."""
    file = getattr(getattr(sloc, "framework_loc", None), "filename", None)
    if file is None or not is_torch_file(file):
        return True
    return not file.removeprefix(_TORCH).startswith(_OPERATORS)


def holds_for_all(expr: Any, allowed: Mapping[Any, tuple[int, int]]) -> bool:
    """Whether a guard holds for every size of at least 2 that is tried, within the ranges allowed."""
    symbols = sorted(expr.free_symbols, key=str)
    choices: Sequence[int] = _TRIED if len(symbols) == 1 else _FEW if len(symbols) == 2 else _FEWER
    ranges = [allowed.get(s, (0, 2**63)) for s in symbols]
    tried = [[n for n in choices if low <= n <= high] or [low] for low, high in ranges]
    return all(_holds(expr, symbols, sizes) for sizes in itertools.islice(itertools.product(*tried), 1000))


def _is_fixed(expr: Any, examples: Mapping[Any, Any]) -> bool:
    """Whether a guard is an equality with a number that does not come back at large sizes, as ``n % 2 == 0`` does."""
    import sympy

    if expr.func.__name__ != "Equality" or not any(side.is_number for side in expr.args):
        return False
    symbols = sorted(expr.free_symbols, key=str)
    sizes = [examples[s] if examples[s].is_Integer else sympy.Integer(2) for s in symbols]
    further = ([n + _PERIOD for n in sizes], [n * _PERIOD for n in sizes])
    return not any(_holds(expr, symbols, large) for large in further)


def _holds(expr: Any, symbols: Sequence[Any], sizes: Sequence[Any]) -> bool:
    import sympy

    return may_hold(expr, {s: sympy.Integer(n) for s, n in zip(symbols, sizes, strict=True)}) is not False


def may_hold(expr: Any, sizes: Mapping[Any, Any]) -> bool | None:
    """Whether a guard may hold for some sizes; ``None`` where it divides by 0, as the model does then."""
    import sympy

    try:
        return expr.xreplace(dict(sizes)) is not sympy.false
    except ZeroDivisionError:
        return None


def _python(expr: Any) -> str:
    return str(python_notation().doprint(expr))


def only_raises(place: str | None) -> bool:
    """Whether a line asks something in order to raise an error: an assertion, a check, an ``if`` before a ``raise``."""
    file, _, line = (place or "").rpartition(":")
    return any(_is_check(node) for node in _statements(file, int(line))) if file and line.isdigit() else False


def discards_its_value(place: str) -> bool:
    """Whether the statement on a line is an expression alone, as a call of ``print`` or of a logger."""
    file, _, line = place.rpartition(":")
    return any(isinstance(node, ast.Expr) for node in _statements(file, int(line)))


def _statements(file: str, line: int) -> Iterable[ast.AST]:
    """The statements whose expressions stand on a line."""
    for node in _parsed(file):
        head = getattr(node, "test", node)
        if head.lineno <= line <= head.end_lineno:
            yield node


@functools.lru_cache(maxsize=64)
def _parsed(file: str) -> tuple[Any, ...]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.If | ast.Assert | ast.Expr))


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return any(way and isinstance(way[-1], ast.Raise) for way in (node.body, node.orelse))
    if isinstance(node, ast.Expr):
        function = getattr(node.value, "func", None)
        name = getattr(function, "attr", getattr(function, "id", ""))
        return isinstance(node.value, ast.Call) and _CHECKS.fullmatch(name) is not None
    return isinstance(node, ast.Assert)


# -- conditions of decompositions --------------------------------------------------------------------------------------


def conditions_of_decompositions(
    program: torch.export.ExportedProgram, allowed: Mapping[Any, tuple[int, int]], *, since: int
) -> list[Condition]:
    """What decompositions ask of the sizes of a program that has them in its graph, beyond what :func:`conditions` finds.

    torch runs decompositions in capture too, to work out the shapes of results. What they ask of sizes there doesn't matter for a
    graph that has the operator itself, but it does for one that has its decomposition.

    Args:
        program: The program.
        allowed: Symbol to the smallest and largest size that it may have.
        since: The first of torch's guards that no code of the model can have asked for.
    """
    found: dict[Any, Condition] = {}
    for size in itertools.islice(_input_sizes(program), 1):
        for position, guard in enumerate(size.node.shape_env.guards):
            if position < since and (is_of_python(guard.sloc) or _equates_two(guard.expr)):
                continue
            condition = condition_of(guard, program, allowed) if narrows(guard, layout=position >= since) else None
            if condition is not None:
                found.setdefault(condition.expr, condition)
    return list(found.values())


def _equates_two(expr: Any) -> bool:
    """Whether a condition is that two sizes are the same one, without which an operator rejects them."""
    return expr.func.__name__ == "Equality" and all(side.is_Symbol for side in expr.args)


def narrows(guard: Any, *, layout: bool) -> bool:
    """Whether a guard of torch's makes a trace hold for some sizes alone.

    That sizes differ or are more than 1 doesn't: the general way was taken then, which ONNX's operators, broadcasting at run
    time, follow where they are equal or 1 too.

    Args:
        guard: The guard.
        layout: Whether conditions on the memory's layout, which ONNX doesn't have, may have answered other questions too.
    """
    import sympy

    if isinstance(guard.expr, sympy.Ne) or holds_from_two_on(guard.expr):
        return False
    return layout or not is_of_layout(getattr(guard.sloc, "framework_loc", None))


def holds_from_two_on(expr: Any) -> bool:
    """Whether a condition such as ``s**2 >= s`` holds for all sizes of 2 or more, as far as trying tells.

    False where it has too many sizes to try them together.
    """
    import sympy

    symbols = sorted(expr.free_symbols, key=str)
    sizes = _SIZES if len(symbols) <= 2 else _FEWER_SIZES
    if len(sizes) ** len(symbols) > _MOST_COMBINATIONS:
        return False
    return all(
        expr.xreplace(dict(zip(symbols, map(sympy.Integer, chosen), strict=True))) is sympy.true
        for chosen in itertools.product(sizes, repeat=len(symbols))
    )


def is_of_layout(frame: Any) -> bool:
    """Whether torch asked in a function that settles strides."""
    name = getattr(frame, "name", "")
    if any(part in name for part in _LAYOUT):
        return True
    # Axes are sorted by their strides.
    return name == "__lt__" and frame.filename.replace(os.sep, "/").endswith("torch/_prims_common/__init__.py")
