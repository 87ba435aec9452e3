"""Whether the model's code may handle an error: whether it may go on where an operator refuses its operands.

The answer is read off the table of handlers and their instructions: a handler lets an error pass only where each way through it
raises again, or where it names other classes of errors, and a ``with`` only where its manager is known to let errors pass. Every
other handler may take the error.

An example, where ``x + y`` would raise a RuntimeError, under ``try:`` in line 3 of ``m.py``::

    except RuntimeError: return x                       Handler("m.py:4", "m.py:5"): the model may go on
    except KeyError: return x                           None: it names another class
    except RuntimeError as error: raise ValueError()    None: each way through it raises
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import itertools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from onnxplug.capture.data_dependent import is_of_models
from onnxplug.capture.locations import is_core_file, is_torch_file

_DYNAMO = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "_dynamo", "")
#: The classes of errors that code may raise.
Errors = tuple[type[BaseException], ...]
#: Any error.
ANY: Errors = (BaseException,)
#: Methods that Python calls by itself, and the errors that it treats as an answer.
_PROTOCOLS: dict[str, Errors] = {
    f"__{name}__": errors
    for name, errors in {
        "getattr": (AttributeError,),
        "getattribute": (AttributeError,),
        "get": (AttributeError,),
        "getitem": (IndexError, StopIteration),
        "missing": (KeyError,),
        "next": (StopIteration,),
        "iter": (TypeError,),
        "len": (TypeError,),
        "length_hint": (TypeError,),
        "del": ANY,
    }.items()
}


class Spot(NamedTuple):
    """An instruction of code that is running.

    Attributes:
        globals, locals: The values of names.
        is_subscript: Whether it was called by ``x[…]``, which treats no error as an answer.
    """

    code: CodeType
    offset: int
    globals: Mapping[str, Any]
    locals: Mapping[str, Any]
    is_subscript: bool = False


class _Code:
    """The instructions of a code object, their positions by offset, and the ranges in which errors are handled."""

    def __init__(self, code: CodeType) -> None:
        left_out = ("CACHE", "EXTENDED_ARG", "NOT_TAKEN", "PRECALL")
        self.instructions = [step for step in dis.get_instructions(code) if step.opname not in left_out]
        self.positions = {step.offset: n for n, step in enumerate(self.instructions)}
        self.handlers: list[Any] = list(dis.Bytecode(code).exception_entries)  # type: ignore[attr-defined]

    def handler(self, offset: int) -> Any:
        """The entry of the exception table for an instruction; ``None`` where there is none."""
        return next((entry for entry in self.handlers if entry.start <= offset < entry.end), None)

    def line(self, offset: int) -> int | None:
        """The line of an instruction, or of the next instruction with a line."""
        lines = (step.positions.lineno for step in self.instructions if step.offset >= offset and step.positions)
        return next(filter(None, lines), None)

    def within(self, whole: dis.Instruction) -> list[dis.Instruction]:
        """The instructions of the expression that ends with an instruction."""
        first, last = _span(whole)
        return [step for step in self.instructions if first <= _span(step)[0] and _span(step)[1] <= last]


_code = functools.lru_cache(maxsize=256)(_Code)
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))


def _span(step: dis.Instruction) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where an instruction begins and ends in the source."""
    at: Any = step.positions
    return (at.lineno or 0, at.col_offset or 0), (at.end_lineno or 0, at.end_col_offset or 0)


class Handler(NamedTuple):
    """A handler in the model's code that may take an error.

    Attributes:
        place: ``file:line`` of the call under it.
        line: ``file:line`` of the handler.
    """

    place: str
    line: str


def handler_over(frame: FrameType | None, errors: Errors, ends: Callable[[str], bool]) -> Handler | None:
    """The handler of an error that is raised in a frame; ``None`` where the error leaves the model.

    Args:
        errors: The possible classes of the error.
        ends: Whether the frames of a file belong neither to the model nor to code that it calls.
    """
    as_attribute = _are_taken((AttributeError,), errors)
    base = _bases[-1] if _bases else _Base(None)
    names_of_callers: list[tuple[FrameType, dict[str, Any]]] | None = None
    while frame is not None:
        if frame is base.frame and not as_attribute:
            known = base.passed.get(errors)
            if known is not None and all(_are_still(caller, names) for caller, names in known):
                return None
            names_of_callers = []
        _, role, handled, passed = _roles.get(id(frame.f_code)) or _role(frame.f_code)
        if role == "core" and ends(frame.f_code.co_filename):
            if names_of_callers is not None:
                base.passed[errors] = names_of_callers
            return None
        at = frame.f_lasti
        if role == "interpreter" or (role == "model" and (as_attribute or at in handled)):
            names = None if as_attribute else passed.get((at, errors))
            if names is not None and _are_still(frame, names):
                if names_of_callers is not None:
                    names_of_callers.append((frame, names))
                frame = frame.f_back
                continue
            names_of_callers = None
            for spot in _interpreted(frame) if role == "interpreter" else [_running(frame)]:
                spaces = _Reads(spot.globals), _Reads(spot.locals)
                left = _leaving(spot._replace(globals=spaces[0], locals=spaces[1]), errors)
                if left == errors and role == "model" and not spaces[1].names:
                    kinds = {name: _global(frame, name) for name in spaces[0].names}
                    if all(_is_immutable_error(kind) for kind in kinds.values()):
                        passed[at, errors] = kinds
                if left is None:
                    file, line = spot.code.co_filename, _handler_line(spot) or spot.code.co_firstlineno
                    return Handler(f"{file}:{_code(spot.code).line(spot.offset)}", f"{file}:{line}")
                if left is not errors:
                    errors, as_attribute = left, _are_taken((AttributeError,), left)
        frame = frame.f_back
    return None


@dataclass
class _Base:
    """A running frame within which operators are called.

    Attributes:
        passed: Classes of errors that leave the frame and all its callers, to the callers under a handler, with the names of
            classes that this depends on.
    """

    frame: FrameType | None
    passed: dict[Errors, list[tuple[FrameType, dict[str, Any]]]] = field(default_factory=dict)


_bases: list[_Base] = []


@contextlib.contextmanager
def callers_known(frame: FrameType) -> Iterator[None]:
    """While it holds, a frame is running: its callers stand still, and are searched for handlers once."""
    _bases.append(_Base(frame))
    try:
        yield
    finally:
        _bases.pop()


def ways_from(code: CodeType, start: int, end: int) -> list[dis.Instruction] | None:
    """The instructions on all ways from one instruction to another, or to a ``raise``; ``None`` where a way leaves the code."""
    steps, positions = _code(code).instructions, _code(code).positions
    if start not in positions or end not in positions:
        return None
    passed: list[dis.Instruction] = []
    seen, waiting = {positions[end]}, [positions[start]]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        step = steps[at]
        if step.opname.startswith(("RETURN", "YIELD", "SEND")):
            return None
        passed.append(step)
        if step.opname in ("RERAISE", "RAISE_VARARGS"):
            continue
        if step.opcode in _JUMPS:
            waiting.append(positions[step.argval])
        if not step.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")):
            waiting.append(at + 1)
    return passed


def passes_errors(frame: FrameType, offset: int) -> bool:
    """Whether any error that is raised at an instruction leaves the frame."""
    return _leaving_handlers(_running(frame)._replace(offset=offset), ANY) is not None


class _Reads(Mapping[str, Any]):
    """A namespace that records the names that are looked up in it."""

    def __init__(self, space: Mapping[str, Any]) -> None:
        self._space = space
        self.names: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return name in self._space

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return self._space[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._space)

    def __len__(self) -> int:
        return len(self._space)


def _are_still(frame: FrameType, names: Mapping[str, Any]) -> bool:
    return all(_global(frame, name) is kind for name, kind in names.items())


def _global(frame: FrameType, name: str) -> Any:
    return frame.f_globals.get(name, vars(builtins).get(name))


def _is_immutable_error(kind: Any) -> bool:
    """Whether an object is a class of errors whose attributes can't be set, as Python's own are (``Py_TPFLAGS_IMMUTABLETYPE``)."""
    return isinstance(kind, type) and issubclass(kind, BaseException) and bool(kind.__flags__ & 1 << 8)


#: A code object; its role; the offsets at which it may handle errors; and the offsets that all errors of some classes leave, with
#: the names of classes that this depends on.
_Role = tuple[CodeType, str, frozenset[int], dict[tuple[int, Errors], dict[str, Any]]]
#: Facts about code objects, by identity: to hash a code object is slow. Each keeps its code object alive.
_roles: dict[int, _Role] = {}


def _role(code: CodeType) -> _Role:
    """A code object, whether it is the model's, core's or an interpreter of Dynamo, and where it may handle errors."""
    file, role = code.co_filename, "model"
    ranges: Sequence[range] = ()
    if is_core_file(file):
        role = "core"
    elif is_torch_file(file) and not is_of_models(file):
        role = "interpreter" if file.startswith(_DYNAMO) and code.co_varnames[:1] == ("self",) else ""
    elif code.co_name in _PROTOCOLS:
        ranges = [range(len(code.co_code))]
    elif code.co_exceptiontable:
        ranges = [range(entry.start, entry.end) for entry in _code(code).handlers]
    if len(_roles) > 16384:
        _roles.clear()
    _roles[id(code)] = code, role, frozenset(itertools.chain(*ranges)), {}
    return _roles[id(code)]


def is_interpreting() -> bool:
    """Whether Dynamo interprets code in this thread."""
    module = sys.modules.get("torch._dynamo.symbolic_convert")
    return getattr(getattr(module, "tls", None), "current_tx", None) is not None


def _running(frame: FrameType) -> Spot:
    """The spot of a frame."""
    return Spot(frame.f_code, frame.f_lasti, frame.f_globals, frame.f_locals, _is_subscripting(frame.f_back))


def _is_subscripting(frame: FrameType | None) -> bool:
    """Whether a frame is executing ``x[…]``."""
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] in ("BINARY_SUBSCR", "BINARY_OP")


def _interpreted(frame: FrameType) -> Iterator[Spot]:
    """The spot in the model's code that a frame of Dynamo interprets, as in the strict mode.

    Interpreters are recognised by their class: Dynamo's lazy variables make a tensor when an attribute is read.
    """
    interpreter: Any = frame.f_locals.get("self")
    if any(kind.__name__ == "InstructionTranslatorBase" for kind in type(interpreter).__mro__):
        code, offset = interpreter.f_code, getattr(interpreter.current_instruction, "offset", None)
        if isinstance(code, CodeType) and isinstance(offset, int) and _role(code)[1] == "model":
            objects = {name: _object(variable) for name, variable in interpreter.symbolic_locals.items()}
            yield Spot(code, offset, interpreter.f_globals, objects)


def _object(variable: Any) -> Any:
    """The object of a Dynamo variable; its attributes are not read, as that would make it a tensor."""
    cached = vars(variable).get("_cache")
    return vars(getattr(cached, "vt", None) or variable).get("value")


def _leaving(spot: Spot, errors: Errors) -> Errors | None:
    """The errors, of those raised at a spot, that leave its code; ``None`` where the code may handle them.

    Python treats errors of some methods that it calls by itself as an answer, as ``hasattr`` does with a property's.
    """
    left = _leaving_handlers(spot, errors)
    if left is None or not _are_taken(_PROTOCOLS.get(spot.code.co_name, (AttributeError,)), left):
        return left
    return None if _are_taken(_taken_by_python(spot), left) else left


def _handler_line(spot: Spot) -> int | None:
    """The line of the innermost handler at an instruction."""
    code = _code(spot.code)
    entry = code.handler(spot.offset)
    return code.line(entry.target) if entry is not None else None


def _are_taken(classes: Errors, errors: Errors) -> bool:
    """Whether a handler of given classes takes any of the errors."""
    return any(error is BaseException or issubclass(error, classes) for error in errors) if classes else False


def _leaving_handlers(spot: Spot, errors: Errors) -> Errors | None:
    """As :func:`_leaving`, by the handlers of the code itself."""
    entry = _code(spot.code).handler(spot.offset)
    if entry is None:
        return errors
    again = _raised_again(spot, entry, errors)
    if again is None:
        return None
    errors_left: Errors = ()
    for offset, is_same in again.items():
        left = _leaving_handlers(spot._replace(offset=offset), errors if is_same else ANY)
        if left is None:
            return None
        errors_left += left
    return tuple(dict.fromkeys(errors_left))


def _taken_by_python(spot: Spot) -> Errors:
    """The errors that Python treats as an answer, where the code is a property's or of another of Python's protocols."""
    if spot.is_subscript:
        return ()
    name, names = spot.code.co_name, spot.code.co_varnames[: spot.code.co_argcount]
    owner = spot.locals.get(names[0]) if names else None
    method = next((vars(kind)[name] for kind in type(owner).__mro__ if name in vars(kind)), None)
    # A method in C of the same name, like Tensor.unfold and F.unfold, runs no Python code.
    is_descriptor = hasattr(method, "__get__") and not isinstance(
        method,
        types.FunctionType | staticmethod | classmethod | types.MethodDescriptorType | types.WrapperDescriptorType,
    )
    return _PROTOCOLS.get(name, (AttributeError,) if is_descriptor else ())


def _raised_again(spot: Spot, entry: Any, errors: Errors) -> dict[int, bool] | None:
    """The places where a handler raises, and whether it raises the error itself; ``None`` where it may go on without raising."""
    code = _code(spot.code)
    raises: dict[int, bool] = {}
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
            raises[step.offset] = step.opname == "RERAISE" or not step.argval
            continue
        if step.opname == "CHECK_EXC_MATCH" and not _matches(spot, at, errors):
            waiting.append(code.positions[code.instructions[at + 1].argval])
            continue
        is_left = step.opname == "POP_EXCEPT" and code.instructions[at + 1].opname != "RERAISE"
        if is_left or step.opname.startswith(("RETURN", "YIELD", "SEND")):
            return None
        if step.opname == "WITH_EXCEPT_START":
            lets_pass = _lets_pass(spot, entry, errors)
        jumps = step.opcode in _JUMPS
        if jumps and not lets_pass:
            waiting.append(code.positions[step.argval])
        if not step.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD")):
            waiting.append(at + 1)
        lets_pass = lets_pass and not jumps  # only at the jump that evaluates the manager's answer
    return raises


def _matches(spot: Spot, at: int, errors: Errors) -> bool:
    """Whether an ``except`` may take any of the errors; yes where its classes are not plain names."""
    steps = _code(spot.code).instructions
    first = at
    while not steps[first].is_jump_target and steps[first - 1].opname != "PUSH_EXC_INFO":
        first -= 1
    classes = _classes(_evaluated(spot, steps[first:at]) or [None])
    return classes is None or _are_taken(classes, errors)


def _evaluated(spot: Spot, steps: Sequence[dis.Instruction]) -> list[Any] | None:
    """The objects that instructions leave on the stack, if they only load names and attributes; ``None`` otherwise."""
    stack: list[Any] = []
    for step in steps:
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and stack:
            spaces: list[Mapping[str, Any]] = list(map(vars, _owners(stack.pop())))
        elif step.opname == "BUILD_TUPLE":
            stack[len(stack) - step.argval :] = [tuple(stack[len(stack) - step.argval :])]
            continue
        elif step.opname in ("PUSH_NULL", "CALL"):  # the callee is no class of errors, or its result is an error
            continue
        else:
            spaces = list(_spaces(spot, step))
        space = next((space for space in spaces if step.argval in space), None)
        if space is None:
            return None
        stack.append(space[step.argval])
    return stack


def _classes(objects: Sequence[Any]) -> Errors | None:
    """Classes of errors, also from tuples; ``None`` where there is anything else."""
    classes: list[Any] = []
    waiting = list(objects)
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting.extend(item)
        elif isinstance(item, type) and issubclass(item, BaseException):
            classes.append(item)
        else:
            return None
    return tuple(classes)


def _lets_pass(spot: Spot, entry: Any, errors: Errors) -> bool:
    """Whether the context manager of a handler's ``with`` never takes any of the errors."""
    code = _code(spot.code)
    start = min(other.start for other in code.handlers if other.target == entry.target)
    step, enter = code.instructions[code.positions[start] - 2 : code.positions[start]]
    if enter.opname != "BEFORE_WITH" or enter.is_jump_target:
        return False
    manager, is_called = _named(spot, step), step.opname.startswith("CALL")
    if is_called and isinstance(manager, types.FunctionType):
        is_manager = (
            manager.__code__.co_filename == contextlib.__file__
        )  # contextmanager makes a manager of a generator
        return is_manager and _is_passed_through(getattr(manager, "__wrapped__", None), errors)
    if manager is None or (is_called and not isinstance(manager, type)):
        return False
    kind = manager if is_called else type(manager)
    if manager is contextlib.suppress:
        classes = _classes((_evaluated(spot, code.within(step)) or [None])[1:])
        return is_called and classes is not None and not _are_taken(classes, errors)
    leave = next((vars(base)["__exit__"] for base in kind.__mro__ if "__exit__" in vars(base)), None)
    if isinstance(leave, types.FunctionType):
        return _returns_nothing(leave.__code__) or kind.__module__.partition(".")[0] == "torch"
    return kind.__module__ == "_thread"  # a lock


def _is_passed_through(generator: Any, errors: Errors) -> bool:
    """Whether errors at the ``yield`` of a generator leave it."""
    if not isinstance(generator, types.FunctionType):
        return False
    spot = Spot(generator.__code__, 0, generator.__globals__, {})
    yields = [step for step in _code(spot.code).instructions if step.opname == "YIELD_VALUE"]
    return all(_leaving_handlers(spot._replace(offset=step.offset), errors) == errors for step in yields)


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
    """The object that an instruction calls or enters, if it is a name with attributes whose look-up runs no code; else ``None``."""
    named: list[Any] = []
    for part in _code(spot.code).within(step):
        if part.opname == "PUSH_NULL":
            continue
        if part is not step and part.opname.startswith(("CALL", "BINARY")) and _span(part)[0] == _span(step)[0]:
            return None  # an attribute of another call's result
        if not named:
            named = [space[part.argval] for space in _spaces(spot, part) if part.argval in space][:1]
        elif part.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            spaces = map(vars, _owners(named[0]))
            named = [next((space[part.argval] for space in spaces if part.argval in space), None)]
        else:
            break
    return named[0] if named else None


def _spaces(spot: Spot, load: dis.Instruction) -> tuple[Mapping[str, Any], ...]:
    """The namespaces in which the name of a load instruction is looked up."""
    if load.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
        return spot.globals, vars(builtins)
    return (spot.locals,) if load.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) else ()


def _owners(value: Any) -> Iterator[Any]:
    if hasattr(value, "__dict__"):
        yield value
    yield from () if isinstance(value, types.ModuleType) else type(value).__mro__
