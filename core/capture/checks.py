"""Whether code asks something in order to raise an error: whether it goes on as it did, or raises, whatever the answer is.

That is read off the bytecode, by following all paths from a jump. An error may be handled by the code of the model that is
running; what handles it is read off there too, and ``with`` handles none whose manager is known to let errors pass.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import types
from collections.abc import Iterator, Mapping, Set
from types import CodeType, FrameType
from typing import Any, NamedTuple

#: Instructions that only look at values, by the beginning of their names, with the number of values they take off the stack.
_LOOKING = {
    **dict.fromkeys(("LOAD_FAST", "LOAD_CONST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_SMALL_INT", "NOP"), 0),
    **dict.fromkeys(("LOAD_ATTR", "LOAD_METHOD", "TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE", "POP_JUMP", "POP_TOP"), 1),
    **dict.fromkeys(("COMPARE_OP", "CONTAINS_OP", "IS_OP", "BINARY_OP", "BINARY_SUBSCR"), 2),
    "JUMP_FORWARD": 0,
    "JUMP_BACKWARD": 0,
}
_MISSING: Any = object()
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

    def target(self, step: dis.Instruction) -> int:
        """The position that an instruction jumps to."""
        return self.positions[step.argval]

    def handler(self, offset: int) -> Any:
        """The range with an instruction in which errors are handled; ``None`` where there is none."""
        return next((entry for entry in self.handlers if entry.start <= offset < entry.end), None)

    def within(self, whole: dis.Instruction) -> list[dis.Instruction]:
        """The instructions of the expression that ends in one of them."""
        first, last = _span(whole)
        return [step for step in self.instructions if first <= _span(step)[0] and _span(step)[1] <= last]


_code = functools.lru_cache(maxsize=256)(_Code)


def _span(step: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where an instruction begins and ends in the source."""
    at: Any = step.positions
    return (at.lineno or 0, at.col_offset or 0), (at.end_lineno or 0, at.end_col_offset or 0)


def is_jump(step: dis.Instruction) -> bool:
    """Whether an instruction may go on at another place."""
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def following(spot: Spot) -> list[dis.Instruction]:
    """The instructions after one, in the order of the code."""
    code = _code(spot.code)
    at = code.positions.get(spot.offset)
    return code.instructions[at + 1 :] if at is not None else []


def only_raises(spot: Spot, holds: bool, equal: bool) -> bool:
    """Whether code raises an error, or goes on as it did, when the answer to what it asks is the other one.

    Args:
        spot: Where it asks.
        holds: The answer that it got.
        equal: Whether it asked for equality, as comparing two shapes and looking for a member do, whatever is made of the answer.
    """
    code = _code(spot.code)
    at = code.positions.get(spot.offset)
    if at is None:
        return False
    first = code.instructions[at]
    if first.opname == "COMPARE_OP" and equal and "!=" in first.argrepr:
        holds = not holds
    elif first.opname == "CONTAINS_OP":
        holds = holds is not bool(first.arg)  # 1 for `not in`
    elif first.opname == "CALL":  # any() is true for one element that is, all() false for one that isn't
        if _named(spot, first) is not (all if holds else any):
            return False
        at += 1
    while code.instructions[at].opname in ("TO_BOOL", "COMPARE_OP", "CONTAINS_OP"):
        at += 1
    jump = code.instructions[at]
    if first.opname == "COMPARE_OP" and not jump.opname.startswith("POP_JUMP"):
        return _is_given_to_check(spot, first)
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return False
    ways = code.target(jump), at + 1
    taken, other = ways if jump.opname.endswith("IF_TRUE") is holds else ways[::-1]
    _, passed = _ways(spot, taken)
    ends, _ = _ways(spot, other, passed)
    return ends == set() or (ends is not None and len(ends) == 1 and _ways(spot, taken, ends)[0] == ends)


def _ways(spot: Spot, start: int, joins: Set[int] = frozenset()) -> tuple[set[int] | None, set[int]]:
    """Where code goes on from a position, through instructions that only look at values, unless it raises.

    Args:
        spot: The code.
        start: The position.
        joins: Positions at which to stop.

    Returns:
        Where it goes on, ``None`` where what it looked at is used; the positions that it passed with nothing in hand.
    """
    code = _code(spot.code)
    ends: set[int] | None = set()
    seen: set[tuple[int, int]] = set()
    waiting = [(start, 0)]
    while waiting:
        at, depth = waiting.pop()
        if (at, depth) in seen or _always_raises(spot, at):
            continue
        seen.add((at, depth))
        step = code.instructions[at]
        taken = next((n for name, n in _LOOKING.items() if step.opname.startswith(name)), None)
        if taken is None or taken > depth or (at in joins and not depth):
            ends = None if depth or ends is None else ends | {at}
            continue
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
        if not step.opname.startswith("JUMP_"):
            waiting.append((at + 1, depth))
        if is_jump(step):
            waiting.append((code.target(step), depth))
    return ends, {at for at, depth in seen if not depth}


def _always_raises(spot: Spot, start: int) -> bool:
    """Whether every way on from a position ends in an error that its code does not handle."""
    code = _code(spot.code)
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        step = code.instructions[at]
        if is_handled_at(spot._replace(offset=step.offset)):
            return False
        if step.opname == "RAISE_VARARGS":
            continue
        if step.opname.startswith(("RETURN", "YIELD", "SEND", "RERAISE", "FOR_ITER")):
            return False
        if not step.opname.startswith("JUMP_FORWARD") and not step.opname.startswith("JUMP_BACKWARD"):
            waiting.append(at + 1)
        if is_jump(step):
            waiting.append(code.target(step))
    return True


def _is_given_to_check(spot: Spot, compared: dis.Instruction) -> bool:
    """Whether a comparison is the condition of a ``torch._check``, which raises an error where it is not fulfilled."""
    code = _code(spot.code)
    for step in following(spot):
        if is_jump(step) or step.opname.startswith(("STORE", "RETURN", "YIELD")):
            return False
        if step.opname == "CALL" and compared in code.within(step):
            found = _named(spot, step)
            return getattr(found, "__module__", None) == "torch" and found.__name__.startswith(("_check", "_assert"))
    return False


# -- who handles an error ----------------------------------------------------------------------------------------------


def is_handled_at(spot: Spot) -> bool:
    """Whether an error at an instruction is, or may be, handled by its own code."""
    entry = _code(spot.code).handler(spot.offset)
    if entry is None:
        return False
    again = _raised_again(spot, entry)
    return again is None or any(is_handled_at(spot._replace(offset=offset)) for offset in again)


def is_called_by_python(code: CodeType, owner: Any) -> bool:
    """Whether Python calls code by itself, as that of a property, and may take its errors for an answer, as ``hasattr`` does.

    Args:
        code: The code.
        owner: Its first argument.
    """
    kinds = type(owner).__mro__
    found = next((vars(kind)[code.co_name] for kind in kinds if code.co_name in vars(kind)), None)
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
        if is_jump(step) and not lets_pass:
            waiting.append(code.target(step))
        if not step.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")):
            waiting.append(at + 1)
        lets_pass = lets_pass and not is_jump(step)  # of the jump alone that asks the manager
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
    return not any(is_handled_at(spot._replace(offset=step.offset)) for step in yields)


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
    found = _MISSING
    for part in _code(spot.code).within(step):
        if part.opname == "PUSH_NULL":
            continue
        if part is not step and part.opname.startswith(("CALL", "BINARY")) and _span(part)[0] == _span(step)[0]:
            return None  # of what another call gives
        if found is _MISSING:
            found = next(_values(spot, part), None)
        elif part.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found = next((vars(owner)[part.argval] for owner in _owners(found) if part.argval in vars(owner)), None)
        else:
            break
    return None if found is _MISSING else found


def _values(spot: Spot, load: dis.Instruction) -> Iterator[Any]:
    name = load.argval
    spaces: tuple[Mapping[str, Any], ...] = ()
    if load.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        spaces = spot.globals, vars(builtins)
    elif load.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
        spaces = (spot.locals,)
    yield from (space[name] for space in spaces if isinstance(name, str) and name in space)


def _owners(value: Any) -> Iterator[Any]:
    if hasattr(value, "__dict__"):
        yield value
    yield from () if isinstance(value, types.ModuleType) else type(value).__mro__
