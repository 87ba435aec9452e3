"""A model's questions about dynamic sizes during capture, and the sizes for which the captured graph is right.

torch.export takes the example's answer to ``if x.shape[1] > 4``, ``range(n // 2)`` and ``int(n * 1.5)``, and keeps a guard with
the graph; an ONNX model has no guards. A guard that the ranges of the dimensions imply (:mod:`onnxplug.capture.implication`)
is dropped. Every other guard limits the model; with ``{0: "rows"}`` exported with 5 rows::

    if x.shape[0] * 2 > 8:      the same as s0 >= 5, a bound: it becomes the range of the dimension
    if x.shape[0] != 77:        no bound: a warning, "right only where rows != 77"
    if x.shape[0] >= 0:         implied: nothing
    for i in range(x.shape[0])  Eq(s0, 5) fixes the size: an error, as "rows" must be dynamic

Guards of operators give no warning, as PyTorch refuses the other sizes too, unless the graph has the answer as a constant
(:mod:`onnxplug.capture.constants`). A condition that only the sizes 0 and 1 do not fulfil is an assumption.
"""

from __future__ import annotations

import bisect
import dataclasses
import linecache
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy
import torch

from onnxplug.capture.broadcasts import Broadcast, first_use
from onnxplug.capture.constants import Constants
from onnxplug.capture.dimensions import in_names, same_symbols
from onnxplug.capture.implication import Ranges, contradicted, implied, is_bounded
from onnxplug.capture.locations import is_torch_file, source_location, user_line
from onnxplug.capture.questions import Fixing, Question, Recorded, is_of_python
from onnxplug.errors import FixedDimensionError
from onnxplug.torch_private import backed_values, python_notation

#: Larger than the numbers in a model's code: bounds are searched below.
_LARGE = 2**40
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_NOTHING = Recorded()
#: Parts of the names of torch's functions that ask about sizes to decide strides, which ONNX doesn't have.
_LAYOUT = ("contiguous", "channels_last", "strides", "dense", "memory_format")


@dataclass(frozen=True)
class Condition:
    """A condition that holds for the example's sizes, and not for all.

    Attributes:
        expr: sympy's expression of torch's symbols.
        place: The user's ``file:line``, ``None`` when torch recorded none.
        fixed: Whether it sets an expression of sizes to a constant, so that it holds for few sizes.
        of_code: Whether it comes from Python code, and gives a warning; else from an operator or ``torch._check``.
    """

    expr: Any
    place: str | None
    fixed: bool
    of_code: bool = True

    @property
    def symbols(self) -> frozenset[Any]:
        """torch's symbols of the sizes concerned."""
        return frozenset(self.expr.free_symbols)

    def named(self, names: Mapping[str, str]) -> Any:
        """The expression with the user's names for the sizes, without torch's assumption that sizes are positive."""
        return in_names(names, same_symbols(self.expr))

    def text(self, names: Mapping[str, str]) -> str:
        """The condition in Python's notation, with the user's names for torch's symbols."""
        text = str(python_notation().doprint(self.named(names))).replace("torch.sym_float", "float")
        text = re.sub(r"(\d\.\d*?)0+(?!\d)", r"\1", text)  # sympy writes 1.5 with all digits of its precision
        return re.sub(r"(\d)\.(?!\w)", r"\1.0", text)

    def allows(self, sizes: Mapping[Any, Any]) -> bool:
        """Whether it holds for given sizes; True where that is unknown, False where the model divides by 0."""
        try:
            return self.expr.xreplace(dict(sizes)) is not sympy.false
        except ZeroDivisionError:
            return False


def used_sizes(
    program: torch.export.ExportedProgram, broadcasts: Iterable[Broadcast]
) -> Iterator[tuple[Broadcast, Condition]]:
    """The broadcasts whose result size the model uses other than by broadcasting, with the conditions under which that is right."""
    for broadcast in dict.fromkeys(broadcasts):
        node = first_use(program, broadcast)
        if node is not None:
            expr = sympy.Or(sympy.Ne(broadcast.size, 1), sympy.Eq(broadcast.small, 1))
            yield broadcast, Condition(expr, source_location(node), fixed=False)


class SizeGuards(NamedTuple):
    """The conditions of a captured model on its sizes.

    Attributes:
        conditions: Conditions that the ranges don't imply.
        assumptions: Conditions that the ranges imply for sizes of 2 or more.
        bounds: The smallest and largest sizes at which the model is right, ``n <= 64``, at most one each for a size.
    """

    conditions: list[Condition]
    assumptions: list[Condition]
    bounds: list[Condition]


def size_guards(
    program: torch.export.ExportedProgram,
    declared: Ranges,
    recorded: Recorded = _NOTHING,
    *,
    one_size: bool = True,
) -> SizeGuards:
    """The conditions of a captured model on its dynamic sizes, beyond their ranges.

    Args:
        declared: Symbol to the smallest and largest size that the user declared for it; sizes without a range may be anything.
        recorded: The recorded questions; torch's guards lack conditions that follow from earlier guards.
        one_size: Whether the equality of two sizes is such a condition; the types of the program's inputs have it too.
    """
    sizes = list(_input_sizes(program))
    if not sizes:
        return SizeGuards([], [], [])
    env, hints = sizes[0].node.shape_env, _hints(sizes)
    ranges = {**ranges_of(sizes), **declared}
    larger = from_two_on(ranges)
    conditions, assumptions, bounds = [], [], []
    seen: set[tuple[Any, str | None]] = set()
    for question in (*recorded.questions, *_guards(program, recorded)):
        expr = _replaced(question.expr, env)
        if one_size and not expr.free_symbols and all(env.replace(s).free_symbols for s in question.expr.free_symbols):
            expr = (
                question.expr
            )  # torch replaces a size by its equal from here on, which makes the guard itself trivial
        # For other symbols torch knows the answer from facts about the data.
        backed = expr.free_symbols <= backed_values(env).keys()
        if not expr.free_symbols or not backed or (expr, question.place) in seen:
            continue
        seen.add((expr, question.place))
        if implied(expr, larger if question.asker in ("operator", "list") else ranges):
            continue
        fixed = _holds_for_small_sizes(expr, hints, ranges) or is_bounded(expr)
        condition = Condition(expr, question.place, fixed, of_code=question.asker != "check")
        is_of_small = not fixed and implied(expr, larger)
        if is_of_small and question.asker == "constant":  # torch's ranges can't tell this bound of 2 from none
            conditions.append(condition)
        elif is_of_small:
            named = question.place if question.asker == "code" else None
            assumptions += [] if question.asker == "check" else [dataclasses.replace(condition, place=named)]
        elif ends := [] if fixed else _ends(condition, hints, ranges):
            bounds += ends if question.asker != "operator" else []
        else:
            conditions.append(condition)
    bounds = _tightest([*bounds, *_bounds_of_operators(env, recorded, hints, ranges)])
    within = narrowed(ranges, bounds)
    conditions = [c for c in _unique(conditions) if c.fixed or not implied(c.expr, within)]
    return SizeGuards(conditions, assumptions, bounds)


def _holds_for_small_sizes(expr: Any, hints: Mapping[Any, Any], ranges: Ranges) -> bool:
    """Whether a condition holds for the example's sizes of 0 and 1, and for no larger sizes."""
    small = {symbol: (2, None) for symbol in expr.free_symbols if hints.get(symbol, 2) < 2}
    return bool(small) and contradicted(expr, {**ranges, **small})


def _bounds_of_operators(env: Any, recorded: Recorded, hints: Mapping[Any, Any], ranges: Ranges) -> Iterator[Condition]:
    """The bounds of operators; an operator that asks for a number may have another form elsewhere."""
    by_code = {question.expr for question in recorded.questions if question.asker != "operator"}
    for guard in env.guards:
        at_a_number = isinstance(guard.expr, sympy.Eq) and any(side.is_number for side in guard.expr.args)
        is_of_operator = guard.expr in recorded.of_kernels or not is_of_python(guard.sloc)
        if is_of_operator and guard.expr not in by_code and not at_a_number:
            place = recorded.places.get(guard.expr) or user_line(guard.sloc)
            condition = Condition(_replaced(guard.expr, env), place, fixed=False, of_code=False)
            # Sizes of 0 and 1 are often a special case for torch, and never for ONNX.
            yield from _ends(condition, hints, from_two_on(ranges))


def _ends(condition: Condition, hints: Mapping[Any, Any], ranges: Ranges) -> list[Condition]:
    """A condition as bounds of a single size; empty where it is not equivalent to bounds, or concerns several sizes."""
    expr = condition.expr
    symbol: Any = next(iter(expr.free_symbols)) if len(expr.free_symbols) == 1 else None
    low, high = ranges.get(symbol, (None, None))
    if symbol not in hints or isinstance(expr, sympy.Ne) or low is None:
        return []  # a number that may be negative has no such bound
    example, end = int(hints[symbol]), _LARGE if high is None else high
    if not low <= example <= end:
        return []
    least = _first(lambda n: contradicted(expr, {symbol: (low, example - n - 1)}), example - low)
    most = _first(lambda n: contradicted(expr, {symbol: (example + n + 1, high)}), end - example)
    smallest = low if least is None else example - least
    largest = high if most is None else example + most
    if not implied(expr, {symbol: (smallest, largest)}):
        return []
    bounds = [symbol >= smallest] if least is not None else []
    bounds += [symbol <= largest] if most is not None else []
    return [dataclasses.replace(condition, expr=bound) for bound in bounds]


def _first(holds: Callable[[int], bool], end: int) -> int | None:
    """The first number below ``end`` from which on a predicate holds, ``None`` where it does not hold there."""
    if end <= 0 or not holds(end - 1):
        return None
    reached = 1
    while reached < end and not holds(reached - 1):
        reached *= 2
    return bisect.bisect_left(range(min(reached, end)), True, lo=reached // 2, key=holds)


def _tightest(bounds: Iterable[Condition]) -> list[Condition]:
    """The smallest upper and the largest lower bound of each size; of equal bounds the first, which is Python code's."""
    tightest: dict[Any, Condition] = {}
    for bound in bounds:
        key, other = (type(bound.expr), bound.expr.lhs), bound.expr.rhs
        limit = tightest.setdefault(key, bound).expr.rhs
        if other < limit if isinstance(bound.expr, sympy.Le) else other > limit:
            tightest[key] = bound
    return list(tightest.values())


def narrowed(ranges: Ranges, bounds: Iterable[Condition]) -> dict[Any, tuple[int | None, int | None]]:
    """Ranges within bounds."""
    result = dict(ranges)
    for bound in bounds:
        symbol, number = bound.expr.lhs, int(bound.expr.rhs)
        low, high = result.get(symbol, (0, None))
        if isinstance(bound.expr, sympy.Le):
            result[symbol] = low, number if high is None else min(high, number)
        else:
            result[symbol] = number if low is None else max(low, number), high
    return result


def _replaced(expr: Any, env: Any) -> Any:
    """A condition with torch's replacements of sizes; nothing else of it is evaluated."""
    replaced = {s: env.replace(s) for s in expr.free_symbols}
    return expr.xreplace({s: new for s, new in replaced.items() if new != s})


def _unique(conditions: Iterable[Condition]) -> list[Condition]:
    """A condition for each expression: the first with a place if any has one."""
    by_expression: dict[Any, Condition] = {}
    for condition in conditions:
        if by_expression.setdefault(condition.expr, condition).place is None:
            by_expression[condition.expr] = condition
    return list(by_expression.values())


def _guards(program: torch.export.ExportedProgram, recorded: Recorded) -> Iterator[Question]:
    """torch's guards that limit a model, in addition to the recorded questions.

    Guards of operators are left out unless the graph has the answer as a constant. Its line is the first that has this number
    where the guard's own was not recorded.
    """
    constants, places = Constants(program), recorded.places
    known = {question.expr for question in recorded.questions if question.place or question.asker == "check"}
    for guard in next(_input_sizes(program)).node.shape_env.guards:
        place = user_line(guard.sloc)
        if is_of_python(guard.sloc):
            if guard.expr not in known | recorded.of_kernels:
                yield Question(guard.expr, place or places.get(guard.expr) or constants.place_of(guard.expr))
        elif (constant := constants.of_guard(guard)) is not None:
            is_free = constant.is_joined or guard.expr in recorded.unpacked
            place = places.get(guard.expr) or constant.place or place
            yield Question(guard.expr, place, "list" if is_free else "constant")


def small_sizes(
    program: torch.export.ExportedProgram, sizes: Iterable[torch.SymInt], places: Mapping[Any, str]
) -> list[Condition]:
    """Conditions of operators that hold for the example's sizes of 0 and 1, and for no larger sizes.

    Args:
        sizes: The sizes of its inputs that should be dynamic.
        places: Condition of an operator to the user's line, where it was recorded.
    """
    hints = _hints(sizes)
    if all(hint >= 2 for hint in hints.values()):
        return []
    ranges = ranges_of(_input_sizes(program))
    return [
        Condition(guard.expr, places.get(guard.expr) or user_line(guard.sloc), True)
        for guard in next(_input_sizes(program)).node.shape_env.guards
        if not is_of_python(guard.sloc) and _holds_for_small_sizes(guard.expr, hints, ranges)
    ]


def ranges_of(sizes: Iterable[torch.SymInt]) -> dict[Any, tuple[int | None, int | None]]:
    """The range of each symbol where none is declared: sizes are 0 or more, numbers are anything."""
    return {s: (0 if s.is_nonnegative else None, None) for size in sizes for s in size.node.expr.free_symbols}


def from_two_on(ranges: Ranges) -> Ranges:
    """Ranges without the sizes 0 and 1."""
    return {s: (low if low is None else max(low, 2), high) for s, (low, high) in ranges.items()}


def _hints(sizes: Iterable[torch.SymInt]) -> dict[Any, Any]:
    """Symbol to its size in the example inputs."""
    return {s.node.expr: sympy.Integer(s.node.hint) for s in sizes if s.node.expr.is_Symbol and s.node.hint is not None}


def at_least_two(declared: Ranges) -> list[Condition]:
    """A condition for each size that is declared to be 2 or more; torch writes the same range where nothing is declared."""
    return [Condition(symbol >= 2, None, fixed=False) for symbol, (low, _) in declared.items() if low == 2]


# -- messages ----------------------------------------------------------------------------------------------------------


class FixedExpressionError(FixedDimensionError):
    """The model's code turns an expression of dynamic sizes into a constant."""


def fixed_by(name: str, condition: Condition, names: Mapping[str, str], example: Any) -> FixedDimensionError:
    """The error for a dimension that must be dynamic, and that the model's code turns into a constant.

    Args:
        name: The dimension's name in messages.
        condition: The condition that makes it constant.
        names: Symbol of torch to the user's name for it.
    """
    line, fixes = line_of(condition.place), f"but the model's code{_at(condition.place)} fixes it"
    if example in (0, 1):
        return FixedDimensionError(
            f"{name} was declared dynamic, {fixes}: what is done for the example's size {example} is right only where "
            f"{condition.text(names)}{line}",
            hint="Give an example input of size 2 or more, make the dimension static, or change the code (torch.cond).",
        )
    return FixedExpressionError(
        f"{name} was declared dynamic, {fixes}: torch.export makes {condition.text(names)} a constant, with its value for "
        f"the example inputs{line}",
        hint="Compute it with //, int, math.floor or math.sqrt, not with other functions of plain numbers (math.log); avoid a loop "
        "over a size, a branch on it (torch.cond), a number of tensors that depends on it (split), and an argument that is an int "
        "(kernel_size; adaptive_avg_pool2d(x, 1) takes the mean over any size); or make the dimension static.",
    )


def outside_declared(name: str, bound: Condition, names: Mapping[str, str], low: int, high: int) -> FixedDimensionError:
    """The error for a dimension whose declared range exceeds the model's bound."""
    return FixedDimensionError(
        f"{name} was declared dynamic, from {low} to {high}, but the model{_at(bound.place)} accepts it only where "
        f"{bound.text(names)}{line_of(bound.place)}",
        hint=f"Declare torch.export.Dim(name, max={bound.expr.rhs}), or leave out max=: the model's own bound is then applied.",
    )


def fixed_by_operator(name: str, fixing: Fixing, tensors: Mapping[str, Sequence[int]]) -> FixedDimensionError:
    """The error for a dimension that must be dynamic, where an operator accepts a single size.

    Args:
        name: The dimension's name in messages.
        fixing: The operator and its size.
        tensors: Shape of each parameter and buffer of the model, by its name.
    """
    other = ""
    if fixing.shape is not None:
        same = [tensor for tensor, shape in tensors.items() if tuple(shape) == fixing.shape]
        known = f" ({same[0]})" if len(same) == 1 else ""
        other = f", the size of its other argument of shape {list(fixing.shape)}{known}"
    return FixedDimensionError(
        f"{name} was declared dynamic, but {fixing.operator or 'the model'}{_at(fixing.place)} fixes it at "
        f"{fixing.number}{other}{line_of(fixing.place)}",
        hint="Make that dimension static in dynamic_shapes, or change the code that depends on its value.",
    )


def warning_text(condition: Condition, names: Mapping[str, str]) -> str:
    """The warning about a condition that holds only for some sizes."""
    return (
        f"the exported model is right only where {condition.text(names)}: the model's code{_at(condition.place)} branches on it"
        f"{line_of(condition.place)}, and the exported model takes the branch of the example inputs at every size. Declare the "
        "range (torch.export.Dim(name, min=..., max=...)), or use torch.cond."
    )


def bound_warnings(bounds: Iterable[Condition], names: Mapping[str, str]) -> list[str]:
    """The warnings about bounds of Python code: one for each in the user's own code, a single one for installed packages."""
    of_code = [bound for bound in bounds if bound.of_code]
    groups = [[bound] for bound in of_code if is_own(bound.place)]
    groups.append([bound for bound in of_code if not is_own(bound.place)])
    return [_bounds_text(group, names) for group in groups if group]


def _bounds_text(bounds: Sequence[Condition], names: Mapping[str, str]) -> str:
    places = dict.fromkeys(f"{bound.place}{line_of(bound.place)}" for bound in bounds if bound.place)
    return (
        f"the exported model is right only where {' and '.join(bound.text(names) for bound in bounds)}: the model's code"
        f"{_at(', '.join(places))} asks for it, and what it does at other sizes is not in the exported model. That is the "
        f"{'range of this dimension' if len(bounds) == 1 else 'range of these dimensions'} now."
    )


def used_size_text(broadcast: Broadcast, condition: Condition, names: Mapping[str, str]) -> str:
    """The warning about a broadcast whose result's size is used."""
    small, size = (str(in_names(names, expr)) for expr in broadcast)
    return (
        f"the exported model is right only where {condition.text(names)}: {small}, of size 1 in the example inputs, is broadcast "
        f"to {size}, and the model{_at(condition.place)} uses the size of the result{line_of(condition.place)}. Give example "
        f"inputs of larger sizes, and one name to both where they are equal."
    )


def text_warnings(texts: Iterable[str]) -> list[str]:
    """A warning for each line of the user's own code that uses a text of a size or tensor other than in ``print``."""
    return [
        f"the model's code at {place} takes the text of a dynamic size, of a tensor or of a number read from a tensor. While the "
        "model is captured, that is torch's name ('s77'), and what is computed from it is the same in the exported model for all "
        "inputs. For a log it does no harm."
        for place in dict.fromkeys(texts)
        if is_own(place)
    ]


def truth_warnings(truths: Iterable[str]) -> list[str]:
    """A warning for each line of code that gets a condition of tensors' values, where code may compare it by ``is``."""
    return [
        f"the model's code at {place} gets a condition of a tensor's values{line_of(place)}, and code of the model compares by "
        "`is` with True or False. While the model is captured, such a condition is neither of them, so that `condition is True` "
        "never holds in the exported model. Keep the condition in a tensor, and use torch.where or torch.cond."
        for place in dict.fromkeys(truths)
    ]


def _at(place: str | None) -> str:
    return f" at {place}" if place else ""


def line_of(place: str | None) -> str:
    """The text of a line of the model's code."""
    file, _, number = (place or "").rpartition(":")
    line = linecache.getline(file, int(number)).strip() if file and number.isdigit() else ""
    return f" (`{line}`)" if line else ""


def is_own(place: str | None) -> bool:
    """Whether a line is in the user's own code, and not in an installed package."""
    return place is not None and not is_torch_file(place) and not _INSTALLED.search(place)


def _input_sizes(program: torch.export.ExportedProgram) -> Iterator[torch.SymInt]:
    for node in program.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            yield from (size for size in sizes if isinstance(size, torch.SymInt))


# -- conditions of decompositions --------------------------------------------------------------------------------------


def conditions_of_decompositions(
    program: torch.export.ExportedProgram, allowed: Ranges, *, since: int
) -> list[Condition]:
    """Conditions on the sizes of a decomposed program by its decompositions, in addition to :func:`size_guards`.

    torch runs decompositions in capture too, to compute the shapes of results. Their guards don't matter for a graph with the
    operator itself, but they do for a graph with its decomposition.

    Args:
        allowed: Symbol to the smallest and largest size that it may have.
        since: The first of torch's guards that can't come from the model's code.
    """
    sizes = list(_input_sizes(program))
    if not sizes:
        return []
    env, larger = sizes[0].node.shape_env, from_two_on({**ranges_of(sizes), **allowed})
    by_expression: dict[Any, Condition] = {}
    for position, guard in enumerate(env.guards):
        known = (
            is_of_python(guard.sloc)
            or _equates_two(guard.expr)
            or is_of_layout(getattr(guard.sloc, "framework_loc", None))
        )
        # Different sizes are the general case, which ONNX's operators, broadcasting at run time, compute for equal sizes too.
        if (position < since and known) or isinstance(guard.expr, sympy.Ne) or holds_from_two_on(guard.expr):
            continue
        expr = env.replace(guard.expr)
        if not expr.free_symbols:
            expr = (
                guard.expr
            )  # torch replaces the size by a constant from here on, which makes the guard itself trivial
        if not implied(expr, larger):
            condition = Condition(expr, user_line(guard.sloc), is_bounded(expr))
            # (n + 127) // 128 == 1 is n <= 128, which leaves the size dynamic.
            ends = _ends(dataclasses.replace(condition, fixed=False), _hints(sizes), larger) if condition.fixed else []
            leave_more = len({bound.expr.rhs for bound in ends}) == len(ends) > 0
            for bound in ends if leave_more else [condition]:
                by_expression.setdefault(bound.expr, bound)
    return list(by_expression.values())


def _equates_two(expr: Any) -> bool:
    """Whether a condition is the equality of two sizes, without which an operator rejects them."""
    return isinstance(expr, sympy.Eq) and all(side.is_Symbol for side in expr.args)


def holds_from_two_on(expr: Any) -> bool:
    """Whether a condition such as ``s**2 >= s`` is known to hold for all sizes of 2 or more."""
    return implied(expr, dict.fromkeys(expr.free_symbols, (2, None)))


def is_of_layout(frame: Any) -> bool:
    """Whether torch asked in a function that decides strides."""
    name = getattr(frame, "name", "")
    if any(part in name for part in _LAYOUT):
        return True
    # Axes are sorted by their strides; the kernel of a convolution, which a size of the batch decides, is looked up for its format.
    asker = name, getattr(frame, "filename", "").replace(os.sep, "/").partition("/torch/")[2]
    return asker in (("__lt__", "_prims_common/__init__.py"), ("conv", "_subclasses/fake_impls.py"))
