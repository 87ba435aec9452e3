"""A time limit for loading plugins: a plugin that hangs is named while onnxplug waits, and given up at the limit."""

from __future__ import annotations

import contextvars
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from onnxplug.errors import PluginError, UsageError

#: The environment variable for the seconds that a plugin may take to load; 0 waits for ever.
ENVIRONMENT = "ONNXPLUG_PLUGIN_TIMEOUT"
#: Seconds that a plugin may take where the variable is not set.
DEFAULT = 60.0
#: Seconds after which standard error names the plugin that onnxplug waits for.
NOTICE = 5.0


def timeout() -> float | None:
    """Seconds that a plugin may take to load; ``None`` is no limit.

    Raises:
        UsageError: ``ONNXPLUG_PLUGIN_TIMEOUT`` is not a number.
    """
    text = os.environ.get(ENVIRONMENT)
    if text is None or not text.strip():
        return DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise UsageError(f"{ENVIRONMENT}={text!r} is not a number of seconds", hint="0 waits for ever.")
    return seconds if 0 < seconds <= threading.TIMEOUT_MAX else None


class TimedThread:
    """A thread that calls functions one after the other, each within a time limit.

    Python cannot stop a thread: a thread that passes the limit is abandoned, and the next function runs in a new thread.

    Args:
        seconds: The limit for each function; ``None`` is no limit.
        notice: Seconds after which standard error names the function's owner.
    """

    def __init__(self, seconds: float | None, notice: float = NOTICE) -> None:
        self._seconds = seconds
        self._notice = notice
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], Any], owner: str) -> Any:
        """Calls a function in the thread and returns its result.

        Args:
            function: The function, which may hang.
            owner: The name of its owner, for the messages.

        Raises:
            PluginError: It takes longer than the limit.
            BaseException: Whatever the function raised.
        """
        done = threading.Event()
        outcome: list[tuple[bool, Any]] = []
        context = contextvars.copy_context()

        def task() -> None:
            try:
                outcome.append((True, context.run(function)))
            except BaseException as error:
                outcome.append((False, error))
            finally:
                done.set()

        thread = self._start()
        self._tasks.put(task)
        self._wait(done, thread, owner)
        succeeded, value = outcome[0]
        if not succeeded:
            raise value
        return value

    def close(self) -> None:
        """Lets the thread end."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread = None

    def _start(self) -> threading.Thread:
        if self._thread is None:
            self._tasks = queue.SimpleQueue()
            # A daemon: a hanging thread does not keep the process from ending.
            self._thread = threading.Thread(target=_work, args=(self._tasks,), name="onnxplug-plugins", daemon=True)
            self._thread.start()
        return self._thread

    def _wait(self, done: threading.Event, thread: threading.Thread, owner: str) -> None:
        first = self._notice if self._seconds is None else min(self._notice, self._seconds)
        if done.wait(first):
            return
        if self._seconds is None or self._seconds > self._notice:
            until = "" if self._seconds is None else f", until {self._seconds:g} s have passed ({ENVIRONMENT})"
            sys.stderr.write(f"onnxplug: waiting for {owner}{until}; it is at {_where(thread)}\n")
            sys.stderr.flush()
        if not done.wait(None if self._seconds is None else max(0.0, self._seconds - first)):
            where = _where(thread)
            self._thread = None
            raise PluginError(f"it did not end within {self._seconds:g} s; it was at {where}")


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()


def _where(thread: threading.Thread) -> str:
    """The line that a thread is executing."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame is not None else []
    own = [f for f in stack if not f.filename.startswith("<") and f"{os.sep}threading.py" not in f.filename]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else "an unknown place"
