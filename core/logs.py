"""Logging: the loggers below ``onnxplug``. ``onnxplug_tools.logs`` reads ``ONNXPLUG_LOG``, which selects the shown messages."""

from __future__ import annotations

import logging
import os

from onnxplug.errors import MissingPackageError
from onnxplug.packages import load
from onnxplug.warn import warn

VARIABLE = "ONNXPLUG_LOG"
ROOT = "onnxplug"
#: The loggers, with the content of each; docs/profiling.md lists them.
LOGGERS = {
    "capture": "attempts at torch.export, and what each failed of; dynamic dimensions that came out static",
    "functionalize": "how in-place writes were made functional",
    "convert": "which rule translates each FX node, and why; decompositions",
    "rewrite": "which rewrite replaced which node",
    "finish": "calls of modules that became functions",
    "plugins": "which plugins were loaded, left out or refused",
    "run": "what runs a model: ONNX Runtime, or the evaluator and why",
    "verify": "the sizes and seeds that were compared, and the largest difference of each",
    "save": "files that are written",
}
_read = ""

# As usual for libraries: without a handler of the program's own nothing is printed.
logging.getLogger(ROOT).addHandler(logging.NullHandler())


class LogSettingWarning(UserWarning):
    """``ONNXPLUG_LOG`` can't be read; it is ignored."""


def logger(name: str) -> logging.Logger:
    """The logger of one of :data:`LOGGERS`."""
    assert name in LOGGERS
    return logging.getLogger(f"{ROOT}.{name}")


def configure() -> None:
    """Applies ``ONNXPLUG_LOG``, if it has changed since the last call."""
    global _read
    before, _read = _read, os.environ.get(VARIABLE) or ""
    if _read == before:
        return
    try:
        load(f"{VARIABLE}=", VARIABLE)(_read)
    except MissingPackageError as error:
        warn(f"{VARIABLE} is ignored: {error.message}", LogSettingWarning)
