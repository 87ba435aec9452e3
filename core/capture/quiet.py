"""torch's messages, suppressed during attempts: its errors are enough."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

from torch.fx import graph_module

from onnxplug.capture.patching import ONE_AT_A_TIME, patched
from onnxplug.torch_private import export_trace


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """While it holds, torch logs, warns of and prints nothing. Other loggers and standard error are as they are.

    Except the structured trace, which torch shows nobody and reads itself in ``torch.export.draft_export``.
    """
    with ONE_AT_A_TIME, warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        for logger in _loggers():
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True
            if logger.handlers:  # a logger below it, of a module that is imported meanwhile, uses them
                stack.enter_context(patched(logger, "handlers", [logging.NullHandler()]))
        for module in (graph_module, export_trace):  # they print graphs in addition to their errors
            stack.enter_context(patched(module, "print", _print_nothing))
        yield


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.items()
    return [
        logger
        for name, logger in named
        if isinstance(logger, logging.Logger) and name.split(".")[0] == "torch" and name != "torch.__trace"
    ]


def _print_nothing(*values: Any, **options: Any) -> None:
    """Replaces Python's ``print``."""
