"""Checks of data that only refuse: ``if (var < 0).any(): raise ValueError(…)`` in the model's code.

torch.export can't go on where Python branches on a tensor's values. Where a side of the branch is tried and the model raises,
eager PyTorch has no result for these inputs, and the other side is the whole model:

    asked: (var < 0).any()      answered True, the model raises ValueError; captured again with False
    asked: (x > 4).all()        answered True, the model goes on; answered False, too: torch's own error

A side refuses only if Python code of the model, or of a layer of torch's, itself raises there, before it asks anything else and
before any other error reaches its code: tracing raises errors that eager PyTorch does not. No handler of the model may take the
error, and from the side's first instruction on every way leads to a ``raise``: a condition in between may differ in eager
PyTorch, where a number is no symbol and ``torch.compiler.is_compiling()`` is false.

    if v < 0:                               asked
        if not isinstance(v, float):        v is a symbol: tracing goes this way, PyTorch never does
            raise TypeError(…)
        return x * 100                      a way that does not raise: an error that names the line (:class:`Doubt`)
"""

from __future__ import annotations

import dis
import functools
import logging
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import requires
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import sympy

from onnxplug.capture.data_dependent import is_of_models
from onnxplug.capture.early_returns import EarlyReturn, empty_size
from onnxplug.capture.handlers import handler_over, passes_errors, ways_from
from onnxplug.capture.locations import TRACING, is_core_file, is_torch_file

#: The largest number of checks to try in a model: each is a trace of the model from its beginning.
LIMIT = 32
#: Instructions that pass the answer on or jump by it. A load gives the answer only where it was stored before.
_CARRIES = frozenset(
    "NOP RESUME CACHE EXTENDED_ARG PRECALL NOT_TAKEN TO_BOOL UNARY_NOT COPY RETURN_VALUE JUMP_FORWARD JUMP_BACKWARD "
    "JUMP_BACKWARD_NO_INTERRUPT".split()
)


class Refusal(NamedTuple):
    """A refusal: an answer for which the model raises.

    Attributes:
        answer: The other answer, for which it goes on.
        place: ``file:line`` of the ``raise``.
        question: The question and its place.
    """

    answer: bool
    place: str
    text: str
    question: Any = None


class Zero(NamedTuple):
    """A size that the data decide, where it is 0.

    Attributes:
        answer: The answer to the question whether it is.
        question: The question and its place.
        size: torch's symbol of the size.
        may_refuse: Whether the asking code has a ``raise``, so that the other sizes may be refused, too.
    """

    answer: bool
    question: Any
    size: Any
    may_refuse: bool


class Doubt(NamedTuple):
    """An error of the model, in a side of a check that has ways which don't raise.

    Attributes:
        place: ``file:line`` of the ``raise``.
    """

    place: str
    text: str


@dataclass
class Answers:
    """The answers to Python code that reads values of tensors.

    Attributes:
        known: The refusals, sizes of 0 and early returns whose answers are given to the first questions.
        trial: The answer to the question after them; ``None``: torch's error.
        error: torch's error for that question; ``None`` before the question.
        finds: Whether each question whether a size is 0 gets the answer for other sizes.
        zero: The size of 0 for which the answer to that question differs from all other sizes; ``None`` for other questions.
        doubt: The model's error for the answer under trial, in a side that may continue in eager PyTorch.
    """

    known: Sequence[Refusal | Zero | EarlyReturn] = ()
    trial: bool | None = None
    error: Exception | None = None
    finds: bool = False
    zero: Zero | None = None
    doubt: Doubt | None = None
    _question: Any = None
    _answered: int = 0
    _recorded: Callable[[], Any] = field(default=lambda: None)
    _before: Any = None
    _raised: list[Any] = field(default_factory=list)
    _traced: list[FrameType] = field(default_factory=list)
    _debugger: Any = None
    _is_carried: bool = True
    _carriers: set[tuple[int, Any]] = field(default_factory=set)
    _starts: dict[int, tuple[FrameType, int]] = field(default_factory=dict)
    _is_handled: bool = False

    def give(self, env: Any, expr: Any, error: Exception, frame: FrameType | None, recorded: Callable[[], Any]) -> Any:
        """The answer to a question; ``None`` where it can't be tried, or where another question is on trial.

        Args:
            env: torch's environment of sizes.
            error: torch's error for it.
            frame: The innermost frame of the code that asks.
            recorded: Counts the questions so far.
        """
        if self.error is not None or frame is None or not _is_of_model(frame):
            return None
        size, other = empty_size(env, expr) or (None, None)
        if any(isinstance(known, EarlyReturn) and known.size == size for known in self.known[: self._answered]):
            return other
        if size is None and not _may_refuse(frame):
            return None
        question = frame.f_code, frame.f_lasti, str(expr)
        if self._answered < len(self.known):
            known = self.known[self._answered]
            if known.question != question:  # the model's code went another way than before
                return other if self.finds else None
            self._answered += 1
            answer = sympy.true if known.answer else sympy.false
            if not isinstance(known, EarlyReturn):  # torch knows from now on, as after torch._check
                fact = expr if known.answer else sympy.Not(expr)
                why = "this side is captured" if isinstance(known, Zero) else "the model raises otherwise"
                env.guard_or_defer_runtime_assert(fact, why)
            return answer
        if self.trial is None:
            return other if self.finds else None
        self.error, self._recorded, self._before, self._question = error, recorded, recorded(), question
        self.zero = Zero(other is sympy.false, question, size, _may_refuse(frame)) if size is not None else None
        if self.zero is not None and not self.zero.may_refuse:
            return None
        self._observe(frame)
        return sympy.true if self.trial else sympy.false

    def refused(self, error: BaseException) -> Refusal | None:
        """The model's refusal of the answer on trial, if an error of the capture is one."""
        if self.error is None or error.__cause__ is not None or error.__context__ is not None:
            return None
        if self._is_handled or any(raised is not error for raised in self._raised) or self._recorded() != self._before:
            return None
        entries = _entries(error.__traceback__)
        if not entries or not _is_of_model(entries[-1].tb_frame):
            return None
        innermost = entries[-1]
        if innermost.tb_lasti not in _raising(innermost.tb_frame.f_code):
            return None
        place = f"{innermost.tb_frame.f_code.co_filename}:{innermost.tb_lineno}"
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        if not self._has_to_raise(entries):
            self.doubt = Doubt(place, text)
            return None
        return Refusal(not self.trial, place, text, self._question)

    def _has_to_raise(self, entries: Sequence[TracebackType]) -> bool:
        """Whether each way from the answer leads to an error, in every frame that has continued since."""
        first = next((n for n, entry in enumerate(entries) if id(entry.tb_frame) in self._starts), None)
        if first is None:
            return False
        for entry in entries[first:]:
            file = entry.tb_frame.f_code.co_filename
            if is_torch_file(file) and not is_of_models(file):
                return False  # in eager PyTorch they may call other code of the model, like kernels for shapes
            if _is_of_model(entry.tb_frame):
                _, start = self._starts.get(id(entry.tb_frame), (None, None))
                if start is None or not _always_raises(entry.tb_frame, start, entry.tb_lasti):
                    return False
        return True

    def _observe(self, frame: FrameType | None) -> None:
        """Begins to record each error that reaches the model's code."""
        self._debugger = sys.gettrace()
        while frame is not None and not _is_of_capture(frame):
            if _is_of_model(frame) and frame.f_trace is None:
                frame.f_trace, frame.f_trace_lines, frame.f_trace_opcodes = self._trace, False, True
                self._traced.append(frame)
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return self._trace if _is_of_model(frame) else None
        if event == "opcode" and not self._raised:
            self._follow(frame)
        ends_loop = event == "exception" and issubclass(value[0], StopIteration | GeneratorExit)
        if event == "exception" and not ends_loop and not _is_logged(frame):
            if not self._raised and value[1] is not None:
                self._is_handled = handler_over(frame, (value[0],), _ends_model) is not None
            if not self._raised and frame.f_lasti not in _raising(frame.f_code):
                self._raised.append(self.error)  # raised by a callee of the code, and perhaps again by itself
            self._raised.append(value[1])
        return self._trace

    def _follow(self, frame: FrameType) -> None:
        """Records each frame's first instruction that may not run because of the answer."""
        step = _instructions(frame.f_code).get(frame.f_lasti)
        if self._is_carried and step is not None:
            variable = id(frame), step.argval
            if step.opname in ("STORE_FAST", "STORE_DEREF"):
                self._carriers.add(variable)
            self._is_carried = (
                step.opname in _CARRIES
                or step.opname.startswith(("POP_JUMP", "JUMP_IF", "STORE_FAST", "STORE_DEREF"))
                or (step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and variable in self._carriers)
            )
        if not self._is_carried and id(frame) not in self._starts:
            self._starts[id(frame)] = frame, frame.f_lasti  # kept alive: an id may be used again

    def close(self) -> None:
        """Ends the observation of errors."""
        if self.error is not None:
            sys.settrace(self._debugger)
        for frame in self._traced:
            frame.f_trace, frame.f_trace_opcodes = None, False
        self._traced, self._raised, self._starts = [], [], {}


def refusal_texts(refusals: Sequence[Refusal]) -> list[str]:
    """The warnings about checks that the exported model does not have, by their places."""
    return [
        f"the model raises at {place} for some values of its inputs ({refusal.text}): the exported model does not check that, and "
        "has some result for such inputs too"
        for place, refusal in {refusal.place: refusal for refusal in reversed(refusals)}.items()
    ][::-1]


def _is_of_model(frame: FrameType) -> bool:
    return _is_of_model_file(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_of_model_file(file: str) -> bool:
    """Whether a file is a model's: not Python's, not of the libraries that torch itself calls as it traces, and not onnxplug's."""
    return is_of_models(file) and not is_core_file(file) and not file.startswith(("<frozen", *_called_by_torch()))


@functools.cache
def _called_by_torch() -> tuple[str, ...]:
    names = (re.match(r"[\w-]+", requirement) for requirement in requires("torch") or ())
    installed = sysconfig.get_path("purelib") + os.sep
    library = sysconfig.get_path("stdlib")
    own = [os.path.join(library, name) for name in os.listdir(library) if name != "site-packages"]
    return (*own, *(installed + name[0].replace("-", "_") + os.sep for name in names if name))


def _is_of_capture(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return is_core_file(file) and file not in TRACING


def _is_logged(frame: FrameType | None) -> bool:
    """Whether a frame runs for a line of a log, and not for the model."""
    while frame is not None and not is_torch_file(frame.f_code.co_filename):
        if frame.f_code.co_filename == logging.__file__:
            return True
        frame = frame.f_back
    return False


def _may_refuse(frame: FrameType | None) -> bool:
    """Whether the asking code, or its caller, has a ``raise`` at all: only then a trial is worth a trace."""
    if frame is None or not _is_of_model(frame):
        return False
    caller = frame.f_back
    if caller is not None and not is_torch_file(caller.f_code.co_filename) and _raising(caller.f_code):
        return True
    return bool(_raising(frame.f_code))


def _ends_model(file: str) -> bool:
    return is_core_file(file) and file not in TRACING


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _always_raises(frame: FrameType, start: int, end: int) -> bool:
    """Whether each way from an instruction leads to a given instruction, or to an error that no handler of the frame takes."""
    steps = ways_from(frame.f_code, start, end)
    return steps is not None and all(passes_errors(frame, step.offset) for step in steps)


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> dict[int, dis.Instruction]:
    return {step.offset: step for step in dis.get_instructions(code)}


@functools.lru_cache(maxsize=1024)
def _raising(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions of ``raise`` and ``assert``."""
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opname == "RAISE_VARARGS")
