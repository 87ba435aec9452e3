"""What a model asks of dynamic sizes while it is captured, and for which sizes the captured graph is right.

``if x.shape[1] > 4``, ``range(n // 2)`` and ``int(n * 1.5)`` need a bool or an int while the model is traced.
torch.export takes the example's and keeps a guard beside the graph; an ONNX model has no guards. Here it is decided which
guards the ranges of the dimensions imply (:mod:`onnxplug.capture.implication`); every other one limits the model, and is an
error, a warning or a range:

- What Python code asks is a condition. If it fixes a size that must be dynamic, that is an error.
- What Python code asks in order to raise an error is none, for PyTorch refuses the other sizes too
  (:mod:`onnxplug.capture.questions`).
- What operators ask is none for the same reason, unless the graph has the answer as a constant
  (:mod:`onnxplug.capture.constants`). The bounds that torch finds there become the ranges of the dimensions.
- What only the sizes 0 and 1 do not fulfil is an assumption: both branches often compute the same there.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from onnxplug.capture.broadcasts import Broadcast, first_use
from onnxplug.capture.constants import Constants
from onnxplug.capture.dimensions import in_names, same_symbols
from onnxplug.capture.implication import Ranges, contradicted, implied, is_bounded
from onnxplug.capture.locations import is_torch_file, source_location, user_line
from onnxplug.capture.questions import Fixing, Question, is_of_python
from onnxplug.errors import CaptureError
from onnxplug.torch_private import python_notation

_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")
#: Parts of the names of torch's functions that ask for sizes to settle strides, which ONNX doesn't have.
_LAYOUT = ("contiguous", "channels_last", "strides", "dense", "memory_format")


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

    def named(self, names: Mapping[str, str]) -> Any:
        """The expression with the user's names for the sizes, of which nothing is assumed: torch takes sizes to be positive."""
        return in_names(names, same_symbols(self.expr))

    def text(self, names: Mapping[str, str]) -> str:
        """The condition in Python's notation.

        Args:
            names: Symbol of torch to the user's name for it.
        """
        text = _python(self.named(names)).replace("torch.sym_float", "float")
        text = re.sub(r"(\d\.\d*?)0+(?!\d)", r"\1", text)  # sympy writes 1.5 with all digits of its precision
        return re.sub(r"(\d)\.(?!\d)", r"\1.0", text)

    def allows(self, sizes: Mapping[Any, Any]) -> bool:
        """Whether it holds for some sizes; True where that is unknown, False where the model divides by 0."""
        import sympy

        try:
            return self.expr.xreplace(dict(sizes)) is not sympy.false
        except ZeroDivisionError:
            return False


@dataclass(frozen=True)
class UsedSize:
    """A size of a broadcast result that an operator uses in another way than by broadcasting.

    Attributes:
        broadcast: The broadcast.
        place: The user's ``file:line``.
    """

    broadcast: Broadcast
    place: str | None

    @property
    def condition(self) -> Condition:
        """Where the result has the size that it is taken to have."""
        import sympy

        small, size = self.broadcast
        return Condition(sympy.Or(sympy.Ne(size, 1), sympy.Eq(small, 1)), self.place, fixed=False)


def used_sizes(program: torch.export.ExportedProgram, broadcasts: Iterable[Broadcast]) -> Iterator[UsedSize]:
    """The broadcasts whose result has a size that the model uses.

    Args:
        program: The captured program.
        broadcasts: What was broadcast while it was captured.
    """
    for broadcast in dict.fromkeys(broadcasts):
        node = first_use(program, broadcast)
        if node is not None:
            yield UsedSize(broadcast, source_location(node))


@dataclass(frozen=True)
class Found:
    """What a captured model asks of its sizes.

    Attributes:
        conditions: What the ranges don't imply.
        assumptions: What they imply for sizes of 2 or more.
        bounds: The largest sizes that operators, and checks of Python code, accept: ``n <= 64``.
    """

    conditions: list[Condition]
    assumptions: list[Condition]
    bounds: list[Condition]


def size_guards(
    program: torch.export.ExportedProgram,
    declared: Ranges,
    questions: Sequence[Question] = (),
    places: Mapping[Any, str] = MappingProxyType({}),
    *,
    one_size: bool = True,
) -> Found:
    """What the Python code of a captured model asks of its dynamic sizes, beyond what their ranges imply.

    Args:
        program: The captured program.
        declared: Symbol to the smallest and largest size that the user declared for it; sizes without a range may be anything.
        questions: What was recorded while the model was captured; torch's guards lack what followed from earlier guards.
        places: Condition that an operator asked for to the user's line, where it was recorded.
        one_size: Whether that two sizes are the same one is such a condition; the types of the program's inputs say it too.
    """
    result = Found([], [], [])
    sizes = list(_input_sizes(program))
    if not sizes:
        return result
    env, hints = sizes[0].node.shape_env, _hints(sizes)
    ranges = {**ranges_of(sizes), **declared}
    small = {symbol: (2, None) for symbol, hint in hints.items() if hint < 2}
    seen: set[tuple[Any, str | None]] = set()
    for asked, of_operator in (*((q, False) for q in questions), *_guards(program, questions)):
        expr = _replaced(asked.expr, env)
        if one_size and not expr.free_symbols and all(env.replace(s).free_symbols for s in asked.expr.free_symbols):
            expr = asked.expr  # sizes are what others are from here on, so that the guard is true of itself
        if (
            not expr.free_symbols
            or (expr, asked.place) in seen
            or not expr.free_symbols <= env.backed_var_to_val.keys()
        ):
            continue  # without an example's value torch knows the answer from what it knows of the value
        seen.add((expr, asked.place))
        concerned = {s: small[s] for s in expr.free_symbols & small.keys()}
        alone = bool(concerned) and contradicted(expr, {**ranges, **concerned})
        if (asked.raises and not alone) or implied(expr, from_two_on(ranges) if of_operator else ranges):
            continue
        examples = {s: env.replace(s).xreplace(hints) for s in expr.free_symbols}
        condition = Condition(expr, asked.place, alone or is_bounded(expr, examples))
        if condition.fixed or not implied(expr, from_two_on(ranges)):
            result.conditions.append(condition)
        else:
            result.assumptions.append(dataclasses.replace(condition, place=None) if asked.of_torch else condition)
    return Found(_unique(result.conditions), result.assumptions, _bounds(env, questions, places, hints, ranges))


def _bounds(
    env: Any, questions: Iterable[Question], places: Mapping[Any, str], hints: Mapping[Any, Any], ranges: Ranges
) -> list[Condition]:
    """The largest sizes for which what operators and checks ask may hold, each with the line that asks."""
    found: dict[Any, Condition] = {}
    checks = [(question.expr, question.place) for question in questions if question.raises]
    branches = {question.expr for question in questions if not question.raises}
    operators = [
        guard
        for guard in env.guards
        if not is_of_python(guard.sloc) and guard.expr not in branches and not _is_at_a_number(guard.expr)
    ]
    accepted = [(guard.expr, places.get(guard.expr) or user_line(guard.sloc)) for guard in operators]
    for expr, place in [*checks, *accepted]:
        expr = _replaced(expr, env)
        symbol = next(iter(expr.free_symbols)) if len(expr.free_symbols) == 1 else None
        if symbol not in hints or ranges[symbol][0] is None:  # a number that may be negative has no such bound
            continue
        assert symbol is not None
        largest = _largest(expr, symbol, hints[symbol])
        if largest is not None and (symbol not in found or largest < found[symbol].expr.rhs):
            found[symbol] = Condition(symbol <= largest, place, fixed=False)
    return list(found.values())


def _is_at_a_number(expr: Any) -> bool:
    """Whether a condition is that an expression has one number: an operator that asks so may have another form elsewhere."""
    import sympy

    return isinstance(expr, sympy.Eq) and any(side.is_number for side in expr.args)


def _largest(expr: Any, symbol: Any, hint: Any) -> int | None:
    """The largest size for which a condition may hold, by the numbers in it; ``None`` where no largest one is known."""
    import sympy

    if isinstance(expr, sympy.Ne):
        return None
    candidates = sorted({int(n) + d for n in expr.atoms(sympy.Integer) for d in (-1, 0, 1)})
    return next((n for n in candidates if n >= hint and contradicted(expr, {symbol: (n + 1, None)})), None)


def _replaced(expr: Any, env: Any) -> Any:
    """A condition with the sizes that torch has put in the place of others; nothing else of it is evaluated."""
    replaced = {s: env.replace(s) for s in expr.free_symbols}
    return expr.xreplace({s: new for s, new in replaced.items() if new != s})


def _unique(conditions: Iterable[Condition]) -> list[Condition]:
    """One condition for each expression, the first with a place if any has one."""
    found: dict[Any, Condition] = {}
    for condition in conditions:
        if found.setdefault(condition.expr, condition).place is None:
            found[condition.expr] = condition
    return list(found.values())


def _guards(program: torch.export.ExportedProgram, questions: Iterable[Question]) -> Iterator[tuple[Question, bool]]:
    """torch's guards that limit a model beside what was recorded, each with whether an operator asked.

    What an operator asks is left out unless the graph has the answer as a constant.
    """
    constants = Constants(program)
    asked = {question.expr for question in questions if question.place or question.raises}
    for guard in next(_input_sizes(program)).node.shape_env.guards:
        place = user_line(guard.sloc)
        if is_of_python(guard.sloc):
            if guard.expr not in asked:
                yield Question(guard.expr, place or constants.place_of(guard.expr), False), False
        elif (constant := constants.of_guard(guard)) is not None:
            yield Question(guard.expr, constant.place or place, False), True


def small_sizes(
    program: torch.export.ExportedProgram, sizes: Iterable[torch.SymInt], places: Mapping[Any, str]
) -> list[Condition]:
    """What operators ask that holds for the example's sizes of 0 and 1, and for no larger ones.

    Args:
        program: The captured program.
        sizes: The sizes of its inputs that were asked to be dynamic.
        places: Condition that an operator asked for to the user's line, where it was recorded.
    """
    hints = _hints(sizes)
    small = {symbol: (2, None) for symbol, hint in hints.items() if hint < 2}
    found = []
    for guard in next(_input_sizes(program)).node.shape_env.guards if small else ():
        expr = guard.expr
        concerned = {s: small[s] for s in expr.free_symbols & small.keys()}
        if (
            concerned
            and not is_of_python(guard.sloc)
            and contradicted(expr, {**ranges_of(_input_sizes(program)), **concerned})
        ):
            found.append(Condition(expr, places.get(expr) or user_line(guard.sloc), True))
    return found


def ranges_of(sizes: Iterable[torch.SymInt]) -> dict[Any, tuple[int | None, int | None]]:
    """The range of each symbol where none is declared: sizes are 0 or more, numbers are anything."""
    return {s: (0 if s.is_nonnegative else None, None) for size in sizes for s in size.node.expr.free_symbols}


def from_two_on(ranges: Ranges) -> Ranges:
    """Ranges without the sizes 0 and 1."""
    return {s: (low if low is None else max(low, 2), high) for s, (low, high) in ranges.items()}


def _hints(sizes: Iterable[torch.SymInt]) -> dict[Any, Any]:
    """Symbol to its size in the example inputs."""
    import sympy

    return {s.node.expr: sympy.Integer(s.node.hint) for s in sizes if s.node.expr.is_Symbol and s.node.hint is not None}


def at_least_two(declared: Ranges) -> list[Condition]:
    """A condition for each size that is declared to be 2 or more; torch writes the same range where nothing is declared."""
    return [Condition(symbol >= 2, None, fixed=False) for symbol, (low, _) in declared.items() if low == 2]


# -- messages ----------------------------------------------------------------------------------------------------------


class FixedExpressionError(CaptureError):
    """The model's code makes a constant of an expression of dynamic sizes."""


def fixed_by(name: str, condition: Condition, names: Mapping[str, str]) -> CaptureError:
    """The error for a dimension that must be dynamic.

    Args:
        name: What to call the dimension.
        condition: What the model's code makes constant.
        names: Symbol of torch to the user's name for it.
    """
    return FixedExpressionError(
        f"{name} was asked to be dynamic, but the model's code{_at(condition.place)} fixes it: torch.export makes "
        f"{condition.text(names)} a constant, with its value for the example inputs{_line(condition.place)}",
        hint="Compute it with //, math.floor or torch.sym_int instead of int(); avoid a Python loop over a size, a branch on it "
        "(torch.cond), a number of tensors that depends on it (split), and an argument that PyTorch takes as a plain int "
        "(kernel_size; adaptive_avg_pool2d(x, 1) takes the mean over any size); or make the dimension static.",
    )


def fixed_by_small_size(name: str, condition: Condition, names: Mapping[str, str], size: Any) -> CaptureError:
    """The error for a dimension that must be dynamic, where the example's size is 0 or 1.

    Args:
        name: What to call the dimension.
        condition: What holds for few sizes.
        names: Symbol of torch to the user's name for it.
        size: The example's size.
    """
    return CaptureError(
        f"{name} was asked to be dynamic, but the model's code{_at(condition.place)} fixes it: what is done for the example's "
        f"size {size} is right only where {condition.text(names)}{_line(condition.place)}",
        hint="Give an example input of size 2 or more, make the dimension static, or change the code (torch.cond).",
    )


def outside_declared(name: str, bound: Condition, names: Mapping[str, str], low: int, high: int) -> CaptureError:
    """The error for a dimension whose declared range is larger than what the model accepts.

    Args:
        name: What to call the dimension.
        bound: What the model accepts.
        names: Symbol of torch to the user's name for it.
        low, high: The declared range.
    """
    return CaptureError(
        f"{name} was asked to be dynamic, from {low} to {high}, but the model{_at(bound.place)} accepts it only where "
        f"{bound.text(names)}{_line(bound.place)}",
        hint=f"Declare torch.export.Dim(name, max={bound.expr.rhs}), or leave out max=: the model's own bound is then applied.",
    )


def fixed_by_operator(name: str, fixing: Fixing, tensors: Mapping[str, Sequence[int]]) -> CaptureError:
    """The error for a dimension that must be dynamic, where an operator accepts one size alone.

    Args:
        name: What to call the dimension.
        fixing: What the operator accepts.
        tensors: Shape of each parameter and buffer of the model, by its name.
    """
    operator = f"{fixing.operator}" if fixing.operator else "the model"
    other = ""
    if fixing.shape is not None:
        same = [tensor for tensor, shape in tensors.items() if tuple(shape) == fixing.shape]
        known = f" ({same[0]})" if len(same) == 1 else ""
        other = f", the size of its other argument of shape {list(fixing.shape)}{known}"
    return CaptureError(
        f"{name} was asked to be dynamic, but {operator}{_at(fixing.place)} fixes it at {fixing.number}{other}"
        f"{_line(fixing.place)}",
        hint="Make that dimension static in dynamic_shapes, or change the code that depends on its value.",
    )


def warning_text(condition: Condition, names: Mapping[str, str]) -> str:
    """What to say of a condition that holds for some sizes and not for others."""
    return (
        f"the exported model is right only where {condition.text(names)}: the model's code{_at(condition.place)} branches on it"
        f"{_line(condition.place)}, and the exported model takes the branch of the example inputs at every size. Declare the "
        "range (torch.export.Dim(name, min=..., max=...)), or use torch.cond."
    )


def used_size_text(used: UsedSize, names: Mapping[str, str]) -> str:
    """What to say of a broadcast whose result's size is used."""
    small, size = (str(in_names(names, expr)) for expr in used.broadcast)
    return (
        f"the exported model is right only where {used.condition.text(names)}: {small}, of size 1 in the example inputs, is "
        f"broadcast to {size}, and the model{_at(used.place)} uses the size of the result{_line(used.place)}. Give example inputs "
        f"of larger sizes, and one name to both where they are equal."
    )


def text_warnings(texts: Sequence[str]) -> list[str]:
    """A warning for each line of the user's own code that takes a size's text and does not only print it."""
    return [
        f"the model's code at {place} takes the text of a dynamic size. While the model is captured, that is torch's name of "
        "the size ('s77'), and what is computed from it is the same in the exported model at every size."
        for place in dict.fromkeys(texts)
        if is_own(place)
    ]


def _at(place: str | None) -> str:
    return f" at {place}" if place else ""


def _line(place: str | None) -> str:
    """The line of the model's code itself."""
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


def _python(expr: Any) -> str:
    return str(python_notation().doprint(expr))


# -- conditions of decompositions --------------------------------------------------------------------------------------


def conditions_of_decompositions(
    program: torch.export.ExportedProgram, allowed: Ranges, *, since: int
) -> list[Condition]:
    """What decompositions ask of the sizes of a program that has them in its graph, beyond what :func:`size_guards` finds.

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
            condition = _condition_of(guard, program, allowed) if narrows(guard, layout=position >= since) else None
            if condition is not None:
                found.setdefault(condition.expr, condition)
    return list(found.values())


def _condition_of(guard: Any, program: torch.export.ExportedProgram, allowed: Ranges) -> Condition | None:
    """What a guard asks of the sizes of a program, whoever asked for it; ``None`` where it holds for all of 2 or more."""
    sizes = list(_input_sizes(program))
    expr = sizes[0].node.shape_env.replace(guard.expr) if sizes else guard.expr
    if not expr.free_symbols:
        expr = guard.expr  # a size is a constant from here on, so that the guard is true of itself
    if implied(expr, from_two_on({**ranges_of(sizes), **allowed})):
        return None
    examples = {s: s.xreplace(_hints(sizes)) for s in expr.free_symbols}
    return Condition(expr, user_line(guard.sloc), is_bounded(expr, examples))


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
    """Whether a condition such as ``s**2 >= s`` is known to hold for all sizes of 2 or more."""
    return implied(expr, dict.fromkeys(expr.free_symbols, (2, None)))


def is_of_layout(frame: Any) -> bool:
    """Whether torch asked in a function that settles strides."""
    name = getattr(frame, "name", "")
    if any(part in name for part in _LAYOUT):
        return True
    # Axes are sorted by their strides.
    return name == "__lt__" and frame.filename.replace(os.sep, "/").endswith("torch/_prims_common/__init__.py")
