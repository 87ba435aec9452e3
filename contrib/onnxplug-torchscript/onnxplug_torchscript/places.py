"""The lines of nodes in a script's source, and calls that Python and torch locate there."""

from __future__ import annotations

import builtins
import functools
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from onnxplug.capture.locations import is_torch_file

_IN_SCRIPT = re.compile(r'File "([^"]+)", line (\d+)')
_IN_TRACE = re.compile(r"^\s*(\S.*?)\((\d+)\): ", re.MULTILINE)
# torch keeps the lines of functions of this name for the nodes that they make.
_TEMPLATE = "def forward(function, args, kwargs): return function(*args, **kwargs)"


class Place(NamedTuple):
    """A line of a script's source: of the original file where it is known, else of the saved code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function from a frame of this line, so that errors, guards and FX nodes name it."""
        return _frame_at(self.file, self.line)(function, args, kwargs)


UNKNOWN = Place("<TorchScript>", 1)


def place_of(node: Any) -> Place:
    """The line of a node; for a traced node the innermost line that is not torch's."""
    text = node.sourceRange()
    match = _IN_SCRIPT.search(text)
    if match is not None:
        return Place(match.group(1), int(match.group(2)))
    frames = [Place(file, int(line)) for file, line in _IN_TRACE.findall(text)]
    return next((place for place in frames if not is_torch_file(place.file)), frames[0] if frames else UNKNOWN)


@functools.lru_cache(maxsize=65536)
def _frame_at(file: str, line: int) -> Callable[..., Any]:
    code = _template().replace(co_filename=file, co_firstlineno=line)
    return types.FunctionType(code, {"__builtins__": builtins})  # what C++ imports from a frame needs them


@functools.cache
def _template() -> types.CodeType:
    made: dict[str, Any] = {}
    exec(_TEMPLATE, made)
    code: types.CodeType = made["forward"].__code__
    return code
