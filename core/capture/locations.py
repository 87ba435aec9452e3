"""The line of the user's code that an FX node comes from."""

from __future__ import annotations

import functools
import glob
import inspect
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import uninteresting_files

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_CORE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
#: Folders whose code runs models instead of Python: core, and packages that interpret models of other kinds.
_RUNNING: list[str] = [_CORE]
#: onnxplug's files through which torch calls operators while it traces the model's code.
TRACING = frozenset(
    os.path.join(_CORE, *name.split("/"))
    for name in (
        *("patches/operator_calls.py", "patches/operands.py", "patches/tracing.py", "patches/handled.py"),
        *("patches/norms.py", "patches/factories.py", "patches/fakes.py", "patches/seeds.py"),
        *("patches/indices.py", "patches/known_numbers.py", "patches/plain_numbers.py"),
        *("patches/lists.py", "patches/lengths.py"),
        *("capture/kernels.py", "capture/symbolic_numbers.py", "capture/sides.py"),
    )
)
#: onnxplug's files with kernels for the shapes of operators' results; their questions count as the operator's.
KERNELS = frozenset(
    os.path.join(_CORE, folder, name) for folder, name in (("patches", "shapes.py"), ("capture", "composites.py"))
)


@functools.lru_cache(maxsize=65536)
def _parse(trace: str) -> str | None:
    frames = _FRAME.findall(trace)
    if not frames:
        return None
    # The innermost frame that isn't torch's own: lines of torch's nn.Module don't help the user.
    for file, line in reversed(frames):
        if not is_torch_file(file):
            return f"{file}:{line}"
    file, line = frames[-1]
    return f"{file}:{line}"


def is_torch_file(path: str) -> bool:
    """Whether a source file is torch's own, or code that torch generated."""
    return path.startswith((_TORCH, "<eval_with_key>"))


def is_core_file(path: str) -> bool:
    """Whether a source file is core's, or of a package that interprets models (:func:`runs_models`)."""
    return path.startswith(tuple(_RUNNING))


def runs_models(file: str, *, interprets: bool = True) -> None:
    """Excludes the folder of a source file from the search for lines of the user's code, also in torch's stack traces.

    Args:
        file: ``__file__`` of a module whose package runs models.
        interprets: Whether its questions about sizes count as questions of the model's code that it runs; else as an operator's.
    """
    folder = os.path.dirname(os.path.abspath(file)) + os.sep
    if folder not in _RUNNING:
        _RUNNING.append(folder)
    if interprets:
        uninteresting_files().update(glob.glob(os.path.join(glob.escape(folder), "*.py")))


def source_location(fx: torch.fx.Node) -> str | None:
    """The user's ``file:line`` of an FX node, ``None`` when torch recorded none."""
    trace = fx.meta.get("stack_trace")
    return _parse(trace) if trace else None


def frames_of_model(error: BaseException) -> Iterator[traceback.FrameSummary]:
    """The frames that an error of capture came through, innermost first, then the frames of the errors that caused it.

    Frames of onnxplug's core, generated code and context managers are left out; torch's stay, as they may be parts of models.
    """
    current: BaseException | None = error
    while current is not None:
        for frame in reversed(traceback.extract_tb(current.__traceback__)):
            file = frame.filename
            if not is_core_file(file) and not file.startswith("<") and os.path.basename(file) != "contextlib.py":
                yield frame
        current = current.__cause__ or current.__context__


def raised_at(error: BaseException, function: Any = None) -> str:
    """Where an error was raised, as `` (file:line)``: the innermost frame in the code of ``function``'s own folder.

    Without a function, or where no frame lies there, the innermost frame that is neither torch's nor of onnxplug's core.
    """
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    home = os.path.dirname(code.co_filename) + os.sep if code is not None else None
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [f for f in frames if not is_torch_file(f.filename) and not is_core_file(f.filename)]
    own = [f for f in frames if home and f.filename.startswith(home) and not is_core_file(f.filename)]
    frame = own[-1] if own else foreign[-1] if foreign else None
    return f" ({frame.filename}:{frame.lineno})" if frame is not None else ""


def user_line(sloc: Any) -> str | None:
    """The user's line at which a guard was made; ``None`` where torch asks by itself."""
    frame = getattr(sloc, "framework_loc", None)
    if frame is not None and not is_torch_file(frame.filename) and frame.filename not in KERNELS:
        return f"{frame.filename}:{frame.lineno}"
    user = re.search(r"#\s*(\S+):(\d+) in ", str(getattr(sloc, "maybe_user_loc", None) or ""))
    path = _whole_path(user[1]) if user is not None else None
    return f"{path}:{user[2]}" if user is not None and path is not None and not is_torch_file(path) else None


@functools.lru_cache(maxsize=1024)
def _whole_path(path: str) -> str:
    """The path of a file; torch leaves out the beginning that it shares with torch's own folder."""
    if os.path.isabs(path):
        return path
    # Where only the root is shared, torch leaves out a letter of the next folder too.
    shared = [str(folder / path) for folder in (Path(_TORCH), *Path(_TORCH).parents)]
    candidates = [*shared, *glob.glob(f"{os.sep}?{glob.escape(path)}")]
    return next(filter(os.path.isfile, candidates), path)
