"""Checks of data that only refuse: ``if (var < 0).any(): raise ValueError(…)`` in the model's code.

torch.export can't go on where Python branches on a tensor's values. Where one side of the branch is tried and the model raises,
eager PyTorch has no result for these inputs, and the other side alone is the model:

    asked: (var < 0).any()      answered True, the model raises ValueError; captured again with False
    asked: (x > 4).all()        answered True, the model goes on; answered False, too: torch's own error

A side refuses only if Python code of the model, or of a layer of torch's, itself raises there, before it asks anything else and
before any other error reaches its code: tracing raises errors that eager PyTorch does not. The error has left the model then, past
all handlers that it has.
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
from onnxplug.capture.locations import TRACING, is_core_file, is_torch_file

#: As many checks are tried in one model: each of them is a trace of the model from its beginning.
LIMIT = 32


class Refusal(NamedTuple):
    """An answer that the model raises for.

    Attributes:
        answer: The other one, for which it goes on.
        place: ``file:line`` of the ``raise``.
        text: The error.
    """

    answer: bool
    place: str
    text: str


@dataclass
class Answers:
    """What Python code is answered that asks for values of tensors.

    Attributes:
        known: The answers to the first questions.
        trial: The answer to the question after them; ``None``: torch's error.
        error: torch's error for that question; ``None`` while it has not been asked.
    """

    known: Sequence[bool] = ()
    trial: bool | None = None
    error: Exception | None = None
    _asked: int = 0
    _recorded: Callable[[], Any] = field(default=lambda: None)
    _before: Any = None
    _raised: list[Any] = field(default_factory=list)
    _traced: list[FrameType] = field(default_factory=list)
    _debugger: Any = None

    def give(self, env: Any, expr: Any, error: Exception, frame: FrameType | None, recorded: Callable[[], Any]) -> Any:
        """The answer to a question; ``None`` where it can't be tried, or another one is.

        Args:
            env: torch's environment of sizes.
            expr: The question.
            error: What torch raises for it.
            frame: The innermost frame of the code that asks.
            recorded: Counts what has been asked so far.
        """
        if self.error is not None or not _may_refuse(frame):
            return None
        if self._asked < len(self.known):
            answer = self.known[self._asked]
            self._asked += 1
            # torch knows from now on, as after torch._check
            env.guard_or_defer_runtime_assert(expr if answer else sympy.Not(expr), "the model raises otherwise")
            return sympy.true if answer else sympy.false
        if self.trial is None:
            return None
        self.error, self._recorded, self._before = error, recorded, recorded()
        self._observe(frame)
        return sympy.true if self.trial else sympy.false

    def refused(self, error: Exception) -> Refusal | None:
        """The model's refusal of the answer that was tried, if an error of the capture is that."""
        if self.error is None or error.__cause__ is not None or error.__context__ is not None:
            return None
        if any(raised is not error for raised in self._raised):
            return None
        innermost = _innermost(error.__traceback__)
        if innermost is None or innermost.tb_lasti not in _raising(innermost.tb_frame.f_code):
            return None
        if not _is_of_model(innermost.tb_frame) or self._recorded() != self._before:
            return None
        place = f"{innermost.tb_frame.f_code.co_filename}:{innermost.tb_lineno}"
        return Refusal(not self.trial, place, f"{type(error).__name__}: {error}".removesuffix(": "))

    def _observe(self, frame: FrameType | None) -> None:
        """From now on, keeps each error that reaches the model's code."""
        self._debugger = sys.gettrace()
        while frame is not None and not _is_of_capture(frame):
            if _is_of_model(frame) and frame.f_trace is None:
                frame.f_trace, frame.f_trace_lines = self._trace, False
                self._traced.append(frame)
            frame = frame.f_back
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, value: Any) -> Any:
        if event == "call":
            frame.f_trace_lines = False
            return self._trace if _is_of_model(frame) else None
        ends_loop = event == "exception" and issubclass(value[0], StopIteration | GeneratorExit)
        if event == "exception" and not ends_loop and not _is_logged(frame):
            self._raised.append(value[1])
        return self._trace

    def close(self) -> None:
        """Ends the observation of errors."""
        if self.error is not None:
            sys.settrace(self._debugger)
        for frame in self._traced:
            frame.f_trace = None
        self._traced, self._raised = [], []


def refusal_texts(refusals: Sequence[Refusal]) -> list[str]:
    """What a user is told of checks that the exported model does not have, by their places."""
    return [
        f"the model raises at {place} for some values of its inputs ({refusal.text}): the exported model does not check that, and "
        "has some result for such inputs too"
        for place, refusal in {refusal.place: refusal for refusal in reversed(refusals)}.items()
    ][::-1]


def _is_of_model(frame: FrameType) -> bool:
    return _is_of_model_file(frame.f_code.co_filename)


@functools.lru_cache(maxsize=4096)
def _is_of_model_file(file: str) -> bool:
    """Whether a file is a model's: none of Python's and of the libraries that torch itself calls as it traces, nor onnxplug's."""
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
    """Whether code that asks, or its caller, has a ``raise`` at all: only then it is worth a trace."""
    if frame is None or not _is_of_model(frame):
        return False
    caller = frame.f_back
    if caller is not None and not is_torch_file(caller.f_code.co_filename) and _raising(caller.f_code):
        return True
    return bool(_raising(frame.f_code))


def _innermost(traceback: TracebackType | None) -> TracebackType | None:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback


@functools.lru_cache(maxsize=1024)
def _raising(code: CodeType) -> frozenset[int]:
    """The offsets of the instructions of ``raise`` and ``assert``."""
    return frozenset(step.offset for step in dis.get_instructions(code) if step.opname == "RAISE_VARARGS")
