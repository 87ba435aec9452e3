"""Records what code asks of dynamic sizes while torch.export traces a model.

torch keeps a guard for what it does not know already; what follows from earlier guards, and from its own assumption that no
size is 0, leaves none. So every question of Python code is recorded when it is asked, with the user's line, and whether the
code asks in order to raise an error: whether from the other answer on its bytecode leads to a ``raise`` without a further
branch, and nothing on the stack handles it.

The text of a size (``str(n)``) is recorded too: while a model is captured, it is torch's name of the size.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files

from onnxplug.capture.broadcasts import Broadcast, broadcast_of, broadcasts_last
from onnxplug.capture.locations import TRACING, is_core_file, is_torch_file, user_line
from onnxplug.torch_private import OpOverload, SymT, fx_config, pytree

#: Parts of torch that work out the shapes of operators' results, or run operators written in C++.
_OPERATORS = (
    *("_meta_registrations.py", "_ops.py", "_dynamo/utils.py"),
    *(f"{folder}{os.sep}" for folder in ("_subclasses", "_refs", "_prims", "_prims_common", "_decomp", "_library")),
    *(f"{folder}{os.sep}" for folder in ("_export", "export", "fx", "utils", "_inductor", "_functorch")),
    *("_higher_order_ops" + os.sep,),
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_DYNAMO = _TORCH + "_dynamo" + os.sep
_STRICT_OPERATORS = _DYNAMO + "utils.py"
_local = threading.local()


class Question(NamedTuple):
    """What Python code asked of sizes.

    Attributes:
        expr: sympy's condition on torch's symbols, which the example's sizes fulfil.
        place: The user's ``file:line``.
        raises: Whether the code raises an error for all sizes that don't fulfil it.
        of_torch: Whether one of torch's own layers and functions asked, that the line calls.
    """

    expr: Any
    place: str | None
    raises: bool
    of_torch: bool = False


class Fixing(NamedTuple):
    """An operator that accepts one size alone.

    Attributes:
        source: What torch calls the size: ``L['x'].size()[0]``.
        number: The size.
        place: The user's ``file:line``.
        operator: The operator's name, ``None`` where it isn't known.
        shape: That of the tensor with the size, among the operator's other arguments; ``None`` where there is none.
    """

    source: str
    number: int
    place: str | None
    operator: str | None
    shape: tuple[int, ...] | None


@dataclass
class Recorded:
    """What Python code asked of dynamic sizes.

    Attributes:
        oblivious: Whether torch keeps the sizes 0 and 1 symbolic.
        questions: In the order asked, each once.
        places: Condition that an operator asked for to the user's ``file:line``.
        texts: ``file:line`` where the text of a size was taken, and not only printed.
        fixings: What operators made constants of.
        broadcasts: Sizes that are 1 in the example, and that operators broadcast.
    """

    oblivious: bool
    questions: dict[Question, None] = field(default_factory=dict)
    places: dict[Any, str] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    fixings: list[Fixing] = field(default_factory=list)
    broadcasts: list[Broadcast] = field(default_factory=list)


class Replaced:
    """An attribute of torch that is another one as long as any thread needs it.

    Args:
        owner: What has the attribute.
        name: Its name.
        replacement: Called with the original, then with the arguments of a call.
    """

    def __init__(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        self._owner, self._name = owner, name
        self._original = original = getattr(owner, name)
        self._lock = threading.Lock()
        self._depth = 0

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        self._replaced = replaced

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            setattr(self._owner, self._name, self._replaced)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    setattr(self._owner, self._name, self._original)


@contextlib.contextmanager
def recorded() -> Iterator[Recorded]:
    """Records what Python code asks of dynamic sizes while it holds, in this thread."""
    # torch names the place of a guard by the innermost frame that is in none of these files.
    uninteresting_files().update((__file__, *TRACING))
    before = getattr(_local, "recorded", None)
    _local.recorded = result = Recorded(bool(fx_config.backed_size_oblivious))
    try:
        with contextlib.ExitStack() as stack:
            for replaced in (_evaluations, _defaults, _texts, *_comparisons):
                stack.enter_context(replaced())
            yield result
    finally:
        _local.recorded = before


def _evaluate_expr(original: Callable[..., Any], env: ShapeEnv, expr: Any, *args: Any, **kwargs: Any) -> Any:
    result = getattr(_local, "recorded", None)
    broadcast = broadcast_of(expr, sys._getframe(2)) if result is not None and result.oblivious else None
    if result is not None and broadcast is not None:
        import sympy

        result.broadcasts.append(broadcast)
        return sympy.false if isinstance(expr, sympy.Ne) else sympy.true
    if result is not None and result.oblivious and broadcasts_last(expr, sys._getframe(2)):
        import sympy

        return sympy.true
    known = len(env.guards)
    answer = original(env, expr, *args, **kwargs)
    if result is not None and len(env.guards) > known and (place := _place(sys._getframe(2))) is not None:
        result.places.setdefault(env.guards[-1].expr, place)
    if result is not None and not expr.is_Atom and kwargs.get("fallback_value") is None:
        frame = _asking(sys._getframe(2))
        if frame is not None:
            result.questions.setdefault(_question(env, expr, answer, frame))
        elif type(expr).__name__ == "Equality" and bool(answer) and len(expr.free_symbols) == 1:
            result.fixings += _fixings(env, next(iter(expr.free_symbols)), sys._getframe(2))
    if (
        result is not None and expr.is_Symbol and kwargs.get("fallback_value") is None
    ):  # int(size), or an argument that is an int
        result.fixings += _fixings(env, expr, sys._getframe(2))
    return answer


def _guard_or(original: Callable[..., bool], condition: Any, default: bool) -> bool:
    """Takes a size for 1 where it is broadcast, which torch answers without a guard."""
    result = getattr(_local, "recorded", None)
    if result is not None and result.oblivious and isinstance(condition, torch.SymBool):
        broadcast = broadcast_of(condition.node.expr, sys._getframe(2))
        if broadcast is not None:
            result.broadcasts.append(broadcast)
            return True
        if broadcasts_last(condition.node.expr, sys._getframe(2)):
            return True
    return original(condition, default)


def _fixings(env: Any, symbol: Any, frame: FrameType | None) -> Iterator[Fixing]:
    """What an operator fixes a size at, if it does."""
    number = env.replace(symbol)
    if not number.is_Integer or not env.var_to_sources.get(symbol):
        return
    place, operator, shape = _place(frame), None, None
    while frame is not None and not _ends_model(frame.f_code.co_filename):
        called = frame.f_locals.get("func")
        if isinstance(called, OpOverload):  # the outermost is the one that the model calls
            operator = called._schema.name
            arguments = pytree.tree_leaves((frame.f_locals.get("args"), frame.f_locals.get("kwargs")))
            shapes = [a.shape for a in arguments if isinstance(a, torch.Tensor)]
            shape = next((tuple(s) for s in shapes if all(type(n) is int for n in s) and int(number) in s), None)
        frame = frame.f_back
    yield Fixing(env.var_to_sources[symbol][0].name, int(number), place, operator, shape)


def _ends_model(file: str) -> bool:
    """Whether a frame of a file is none of the model's, nor of what the model calls."""
    return is_core_file(file) and file not in TRACING


def _repr(original: Callable[..., str], size: torch.SymInt) -> str:
    result, frame = getattr(_local, "recorded", None), sys._getframe(2)
    file = frame.f_code.co_filename
    if result is not None and not is_torch_file(file) and not is_core_file(file) and not _discards(frame):
        result.texts.append(f"{file}:{frame.f_lineno}")
    return original(size)


def _compare(relation: str, original: Callable[..., Any], first: Any, second: Any) -> Any:
    """Records a comparison that torch answers at once, as it takes sizes to be positive."""
    answer, result = original(first, second), getattr(_local, "recorded", None)
    decided = answer if isinstance(answer, bool) else _decided(answer)
    frame = _asking(sys._getframe(2), strict=True) if result is not None and decided is not None else None
    held = _undecided(relation if decided else _OPPOSITE[relation], first, second) if frame is not None else None
    if frame is not None and held is not None and result is not None:
        result.questions.setdefault(_asked(first.node.shape_env, held, bool(decided), relation == "Eq", frame))
    return answer


def _undecided(relation: str, *sides: Any) -> Any:
    """A comparison that holds, as sympy's; ``None`` where it holds at the size 0 too."""
    import sympy

    exprs = [getattr(getattr(side, "node", None), "expr", side) for side in sides]
    if not all(isinstance(expr, sympy.Basic | int | float) for expr in exprs):
        return None
    held = getattr(sympy, relation)(*map(sympy.sympify, exprs), evaluate=False)
    nonnegative = {s: sympy.Symbol(s.name, integer=True, nonnegative=True) for s in held.free_symbols if s.is_positive}
    return held if nonnegative and held.xreplace(nonnegative) is not sympy.true else None


def _decided(answer: Any) -> bool | None:
    import sympy

    expr = getattr(getattr(answer, "node", None), "expr", None)
    return {sympy.true: True, sympy.false: False}.get(expr)


_OPPOSITE = {"Eq": "Ne", "Ne": "Eq", "Lt": "Ge", "Ge": "Lt", "Gt": "Le", "Le": "Gt"}
_RELATIONS = {"__eq__": "Eq", "__ne__": "Ne", "__lt__": "Lt", "__le__": "Le", "__gt__": "Gt", "__ge__": "Ge"}
_comparisons = [
    Replaced(kind, name, functools.partial(_compare, relation))
    for kind in (torch.SymInt, torch.SymFloat)
    for name, relation in _RELATIONS.items()
]
_evaluations = Replaced(ShapeEnv, "evaluate_expr", _evaluate_expr)
_defaults = Replaced(symbolic_shapes, "_guard_or", _guard_or)
_texts = Replaced(torch.SymInt, "__repr__", _repr)


def _asking(frame: FrameType | None, *, strict: bool = False) -> FrameType | None:
    """The frame of the Python code that asks; ``None`` where an operator does, or onnxplug.

    Args:
        frame: Where the search begins.
        strict: Whether what torch's strict mode runs as an operator is Python code.
    """
    skipped, check = uninteresting_files(), None
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in skipped:
            if strict and file == _STRICT_OPERATORS:
                return frame
            return None if is_core_file(file) or _is_of_operators(file) else check or frame
        if file == torch.__file__ and frame.f_code.co_name.startswith(("_check", "_assert")):
            check = check or frame
        frame = frame.f_back
    return None


def _question(env: Any, expr: Any, answer: Any, frame: FrameType) -> Question:
    import sympy

    holds = answer is sympy.true
    if holds or answer is sympy.false:
        held = expr if holds else sympy.Not(expr)
    else:
        held = sympy.Eq(expr, answer)
    return _asked(env, held, holds, isinstance(expr, sympy.Eq), frame)


def _asked(env: Any, held: Any, holds: bool, equal: bool, frame: FrameType) -> Question:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file == torch.__file__ and name.startswith("_check"):
        return Question(held, _place(frame), True)
    if file.startswith(_DYNAMO):
        return Question(held, user_line(env._get_sloc()), _raises_in_dynamo(frame, holds, equal))
    raises = _raises(frame.f_code, frame.f_lasti, holds, equal) and not _is_handled(frame)
    return Question(held, _place(frame), raises, is_torch_file(file))


def _place(frame: FrameType | None) -> str | None:
    """The innermost line that is neither torch's nor onnxplug's, nor of the graph that the strict mode runs again."""
    while frame is not None:
        file = frame.f_code.co_filename
        if (is_core_file(file) and file not in TRACING) or file == "<string>":
            return None
        if not is_torch_file(file) and file not in TRACING:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def is_of_python(sloc: Any) -> bool:
    """Whether code in Python asked for a guard, of the model or of torch's layers and functions, and no operator."""
    file = getattr(getattr(sloc, "framework_loc", None), "filename", None)
    return file is None or not _is_of_operators(file)


@functools.lru_cache(maxsize=4096)
def _is_of_operators(file: str) -> bool:
    return is_torch_file(file) and file.removeprefix(_TORCH).startswith(_OPERATORS)


# -- what the code does with the answer --------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int], list[Any]]:
    """The instructions of a code, the position of each by its offset, and the ranges in which errors are handled."""
    found = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG", "NOT_TAKEN")]
    return found, {i.offset: n for n, i in enumerate(found)}, list(getattr(dis.Bytecode(code), "exception_entries", ()))


def _is_jump(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs


@functools.lru_cache(maxsize=1024)
def _raises(code: CodeType, offset: int, holds: bool, equal: bool) -> bool:
    """Whether code raises an error, or goes on as it did, whenever the answer to what it asks at some instruction is the other one.

    Args:
        code: The code.
        offset: Where the instruction is.
        holds: The answer that it got.
        equal: Whether it asked for equality, as comparing two shapes and looking for a member do, whatever is made of the answer.
    """
    instructions, positions, handlers = _instructions(code)
    at = positions.get(offset)
    if at is None:
        return False
    first = instructions[at]
    if first.opname == "COMPARE_OP" and equal and "!=" in first.argrepr:
        holds = not holds
    elif first.opname == "CONTAINS_OP":
        holds = holds is not bool(first.arg)  # 1 for `not in`
    while at + 1 < len(instructions) and instructions[at].opname in ("TO_BOOL", "COMPARE_OP", "CONTAINS_OP"):
        at += 1
    jump = instructions[at]
    if not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return False
    jumps_on_the_other = jump.opname.endswith("IF_TRUE") is not holds
    position: int | None = positions.get(jump.argval) if jumps_on_the_other else at + 1
    seen: set[int] = set()
    while position is not None and position < len(instructions) and position not in seen:
        seen.add(position)
        step = instructions[position]
        if any(entry.start <= step.offset < entry.end for entry in handlers):
            return False
        if step.opname == "RAISE_VARARGS":
            return True
        if step.opname.startswith(("RETURN", "YIELD", "SEND", "RERAISE")):
            return False
        if (_is_jump(step) and not step.opname.startswith("JUMP_")) or step.opname.endswith("OR_POP"):
            return False
        position = positions.get(step.argval) if _is_jump(step) else position + 1
    return False


def _is_handled(frame: FrameType) -> bool:
    """Whether an error that a frame raises is, or may be, handled in the code of the model that called it."""
    current: FrameType | None = frame.f_back
    while current is not None and not _ends_model(current.f_code.co_filename):
        if not is_torch_file(current.f_code.co_filename) and current.f_code.co_filename not in TRACING:
            handlers = _instructions(current.f_code)[2]
            if any(entry.start <= current.f_lasti < entry.end for entry in handlers):
                return True
        current = current.f_back
    return False


def _raises_in_dynamo(frame: FrameType | None, holds: bool, equal: bool) -> bool:
    """As :func:`_raises` and not :func:`_is_handled`, where torch's strict mode interprets the code."""
    while frame is not None:
        interpreter: Any = frame.f_locals.get("self")
        # By its class: Dynamo's lazy variables make a tensor when an attribute is read.
        if any(kind.__name__ == "InstructionTranslatorBase" for kind in type(interpreter).__mro__):
            code, offset = interpreter.f_code, getattr(interpreter.current_instruction, "offset", None)
            if isinstance(code, CodeType) and isinstance(offset, int):
                return _raises(code, offset, holds, equal) and not _is_handled_in_dynamo(interpreter)
        frame = frame.f_back
    return False


def _is_handled_in_dynamo(interpreter: Any) -> bool:
    while (interpreter := getattr(interpreter, "parent", None)) is not None:
        handler = getattr(interpreter.current_instruction, "exn_tab_entry", True)
        if handler is not None and not is_torch_file(interpreter.f_code.co_filename):
            return True
    return False


def _discards(frame: FrameType) -> bool:
    """Whether what an instruction gives is used up by calls alone whose result is dropped, as that of ``print`` is."""
    instructions, positions, _ = _instructions(frame.f_code)
    at = positions.get(frame.f_lasti)
    for step in instructions[at + 1 :] if at is not None else ():
        if step.opname == "POP_TOP":
            return True
        if step.opname.startswith(("STORE", "RETURN", "YIELD", "BINARY", "COMPARE", "CONTAINS")) or _is_jump(step):
            return False
    return False


# -- how torch takes sizes ---------------------------------------------------------------------------------------------


def _make_symbol(original: Callable[..., Any], prefix: Any, number: int, **assumptions: Any) -> Any:
    if prefix is SymT.SIZE and assumptions.get("positive"):
        assumptions = {**assumptions, "positive": None, "nonnegative": True}
    return original(prefix, number, **assumptions)


def _produce_guards(original: Callable[..., Any], env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
    guards, ranges = env.guards, env.var_to_range
    env.guards = []
    env.var_to_range = {s: env._default_value_range(True) if s.is_nonnegative else r for s, r in ranges.items()}
    try:
        return original(env, *args, **kwargs)
    finally:
        env.guards, env.var_to_range = guards, ranges


#: While it holds, no size is assumed to be positive: an example's size of 0 is none of torch's sizes otherwise.
zero_is_a_size = Replaced(symbolic_shapes, "make_symbol", _make_symbol)
#: While it holds, torch does not refuse a named dimension for what the model asks of it: that is decided afterwards.
any_size_is_accepted = Replaced(ShapeEnv, "produce_guards_verbose", _produce_guards)
