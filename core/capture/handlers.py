"""Whether the model's code may handle an error: whether it may go on where an operator refuses its operands.

That is read off the table of handlers and their instructions: a handler lets an error pass only where each way through it
raises again, and a ``with`` only where its manager is known to. Every other handler may take the error.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

#: Methods that Python calls by itself, and whose errors it may take for an answer.
_PROTOCOLS = frozenset(
    f"__{name}__" for name in "getattr getattribute getitem get missing next iter len length_hint".split()
)


class Spot(NamedTuple):
    """An instruction of code that is running.

    Attributes:
        code: The code.
        offset: That of the instruction.
        globals, locals: What names stand for.
    """

    code: CodeType
    offset: int
    globals: Mapping[str, Any]
    locals: Mapping[str, Any]


def spot_of(frame: FrameType) -> Spot:
    """Where a frame is."""
    return Spot(frame.f_code, frame.f_lasti, frame.f_globals, frame.f_locals)


class _Code:
    """The instructions of a code, the position of each by its offset, and the ranges in which errors are handled."""

    def __init__(self, code: CodeType) -> None:
        left_out = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN", "PRECALL")
        self.instructions = [step for step in dis.get_instructions(code) if step.opname not in left_out]
        self.positions = {step.offset: n for n, step in enumerate(self.instructions)}
        self.handlers: list[Any] = list(dis.Bytecode(code).exception_entries)  # type: ignore[attr-defined]

    def handler(self, offset: int) -> Any:
        """The range with an instruction in which errors are handled; ``None`` where there is none."""
        return next((entry for entry in self.handlers if entry.start <= offset < entry.end), None)

    def within(self, whole: dis.Instruction) -> list[dis.Instruction]:
        """The instructions of the expression that ends in one of them."""
        first, last = _span(whole)
        return [step for step in self.instructions if first <= _span(step)[0] and _span(step)[1] <= last]


_code = functools.lru_cache(maxsize=256)(_Code)
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _span(step: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where an instruction begins and ends in the source."""
    at: Any = step.positions
    return (at.lineno or 0, at.col_offset or 0), (at.end_lineno or 0, at.end_col_offset or 0)


def may_handle(spot: Spot) -> bool:
    """Whether code that is running may handle an error at its instruction.

    Python takes errors of some methods, which it calls by itself, for an answer, as ``hasattr`` does that of a property.
    """
    names = spot.code.co_varnames[: spot.code.co_argcount]
    owner = spot.locals.get(names[0]) if names else None
    return _is_handled_at(spot) or _is_called_by_python(spot.code, owner)


def _is_handled_at(spot: Spot) -> bool:
    """Whether a handler of the code itself may take an error at an instruction."""
    entry = _code(spot.code).handler(spot.offset)
    if entry is None:
        return False
    again = _raised_again(spot, entry)
    return again is None or any(_is_handled_at(spot._replace(offset=offset)) for offset in again)


def _is_called_by_python(code: CodeType, owner: Any) -> bool:
    """Whether code, with its first argument, is that of a property or of another protocol of Python's."""
    found = next((vars(kind)[code.co_name] for kind in type(owner).__mro__ if code.co_name in vars(kind)), None)
    is_descriptor = hasattr(found, "__get__") and not isinstance(found, types.FunctionType | staticmethod | classmethod)
    return code.co_name in _PROTOCOLS or is_descriptor


def _raised_again(spot: Spot, entry: Any) -> set[int] | None:
    """Where a handler raises the error again, or another one, on every way through it; ``None`` where it may go on without."""
    code = _code(spot.code)
    found: set[int] = set()
    seen: set[int] = set()
    waiting = [code.positions[entry.target]]
    lets_pass = False
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        step = code.instructions[at]
        if step.opname in ("RERAISE", "RAISE_VARARGS"):
            found.add(step.offset)
            continue
        is_left = step.opname == "POP_EXCEPT" and code.instructions[at + 1].opname != "RERAISE"
        if is_left or step.opname.startswith(("RETURN", "YIELD", "SEND")):
            return None
        if step.opname == "WITH_EXCEPT_START":
            lets_pass = _lets_pass(spot, entry)
        jumps = step.opcode in _JUMPS
        if jumps and not lets_pass:
            waiting.append(code.positions[step.argval])
        if not step.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")):
            waiting.append(at + 1)
        lets_pass = lets_pass and not jumps  # of the jump alone that asks the manager
    return found


def _lets_pass(spot: Spot, entry: Any) -> bool:
    """Whether the context manager whose ``with`` a handler belongs to never takes an error."""
    code = _code(spot.code)
    start = min(other.start for other in code.handlers if other.target == entry.target)
    made, enter = code.instructions[code.positions[start] - 2 : code.positions[start]]
    if enter.opname != "BEFORE_WITH" or enter.is_jump_target:
        return False
    found, is_called = _named(spot, made), made.opname.startswith("CALL")
    if is_called and isinstance(found, types.FunctionType):
        is_manager = found.__code__.co_filename == contextlib.__file__  # contextmanager makes one of a generator
        return is_manager and _is_passed_through(getattr(found, "__wrapped__", None))
    if found is None or (is_called and not isinstance(found, type)):
        return False
    kind = found if is_called else type(found)
    leave = next((vars(base)["__exit__"] for base in kind.__mro__ if "__exit__" in vars(base)), None)
    if isinstance(leave, types.FunctionType):
        return _returns_nothing(leave.__code__) or kind.__module__.partition(".")[0] == "torch"
    return kind.__module__ == "_thread"  # a lock


def _is_passed_through(generator: Any) -> bool:
    """Whether an error at the ``yield`` of a generator leaves it."""
    if not isinstance(generator, types.FunctionType):
        return False
    spot = Spot(generator.__code__, 0, generator.__globals__, {})
    yields = [step for step in _code(spot.code).instructions if step.opname == "YIELD_VALUE"]
    return not any(_is_handled_at(spot._replace(offset=step.offset)) for step in yields)


def _returns_nothing(code: CodeType) -> bool:
    """Whether code returns the constant ``None`` or ``False`` wherever it returns."""
    steps = _code(code).instructions
    for before, step in zip([None, *steps], steps, strict=False):
        if step.opname == "RETURN_CONST":
            before = step
        elif step.opname != "RETURN_VALUE":
            continue
        if before is None or not before.opname.endswith("_CONST") or before.argval not in (None, False):
            return False
        if step.is_jump_target:
            return False
    return True


def _named(spot: Spot, step: dis.Instruction) -> Any:
    """What an instruction calls, or enters: a name with its attributes, of which no code runs; ``None`` for anything else."""
    found: list[Any] = []
    for part in _code(spot.code).within(step):
        if part.opname == "PUSH_NULL":
            continue
        if part is not step and part.opname.startswith(("CALL", "BINARY")) and _span(part)[0] == _span(step)[0]:
            return None  # of what another call gives
        if not found:
            found = [space[part.argval] for space in _spaces(spot, part) if part.argval in space][:1]
        elif part.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            spaces = map(vars, _owners(found[0]))
            found = [next((space[part.argval] for space in spaces if part.argval in space), None)]
        else:
            break
    return found[0] if found else None


def _spaces(spot: Spot, load: dis.Instruction) -> tuple[Mapping[str, Any], ...]:
    """Where the name that an instruction loads is looked up."""
    if load.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return spot.globals, vars(builtins)
    return (spot.locals,) if load.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else ()


def _owners(value: Any) -> Iterator[Any]:
    if hasattr(value, "__dict__"):
        yield value
    yield from () if isinstance(value, types.ModuleType) else type(value).__mro__
