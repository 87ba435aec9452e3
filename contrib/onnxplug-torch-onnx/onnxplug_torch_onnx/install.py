"""``as_torch_onnx``: while it lasts, ``torch.onnx.export`` is ``onnxplug.export``, for third-party programs.

Nothing here imports torch: a program may set environment variables that torch reads when it is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from onnxplug.errors import UsageError
from onnxplug.options import CommonOptions, with_options

if TYPE_CHECKING:
    from onnxplug_torch_onnx.request import Request

P = ParamSpec("P")
R = TypeVar("R")
_MODULE = "torch.onnx"


@dataclass(frozen=True)
class Exported:
    """One call of ``torch.onnx.export`` that onnxplug has served.

    Attributes:
        file: Where the model was written; ``None`` where the call named no path.
        opset: Version of ai.onnx; 0 for a failed export.
        nodes: The number of nodes of the model.
        seconds: The duration of the call.
        error: Class and first line of the error; ``None`` for an export that succeeded.
    """

    file: str | None
    opset: int
    nodes: int
    seconds: float
    error: str | None = None


def _takes(options: Callable[P, Any]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """A decorator for a function whose keyword arguments are :class:`CommonOptions`, with the type of ``options``."""
    return lambda function: with_options(CommonOptions, function)


@_takes(CommonOptions)
@contextlib.contextmanager
def as_torch_onnx(**options: Any) -> Iterator[list[Exported]]:
    """While it lasts, ``torch.onnx.export`` is :func:`onnxplug.export`, in the whole process; the options hold for every export.

    Torch's function is replaced in every module that has it, under any name, and so is the exporter of old in
    ``torch.onnx.utils``. An earlier reference elsewhere (a default argument, a ``functools.partial``) stays torch's.

    Args:
        {options}

    Returns:
        The exports so far, in order.

    Raises:
        UsageError: There is no such option.
    """
    known = [item.name for item in dataclasses.fields(CommonOptions)]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UsageError(
                f"as_torch_onnx has no option {name!r}",
                hint=f"Did you mean {near[0]!r}?"
                if near
                else "It takes what torch.onnx.export lacks; the rest is said in the program's own calls.",
            )
    with replaced(lambda: options) as exports:
        yield exports


@dataclass(eq=False)
class _Context:
    """An active use of :func:`replaced`.

    Attributes:
        options: A function that returns further arguments of every export.
        exports: The exports while it lasted.
    """

    options: Callable[[], Mapping[str, Any]]
    exports: list[Exported] = field(default_factory=list)


_lock = threading.RLock()
_active: list[_Context] = []
#: Each replacement, and the function that it replaces.
_replacements: list[tuple[Any, Any]] = []


@contextlib.contextmanager
def replaced(options: Callable[[], Mapping[str, Any]]) -> Iterator[list[Exported]]:
    """As :func:`as_torch_onnx`, with options that are asked for at each export.

    Args:
        options: A function that returns arguments of :func:`onnxplug.to_onnx`.
    """
    context = _Context(options)
    with _lock:
        _active.append(context)
        if len(_active) == 1:
            _install()
    try:
        yield context.exports
    finally:
        with _lock:
            _active.remove(context)
            if not _active:
                _uninstall()


def _install() -> None:
    if _MODULE in sys.modules:
        _replace()
    else:
        sys.meta_path.insert(0, _finder)


def _uninstall() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for ours, theirs in _replacements:
        _exchange(ours, theirs)
    _replacements.clear()


def _replace() -> None:
    module: Any = sys.modules[_MODULE]
    for original, old in ((module.export, False), (module.utils.export, True)):
        ours = _in_place_of(original, old)
        _replacements.append((ours, original))
        _exchange(original, ours)


def _exchange(present: Any, new: Any) -> None:
    """Replaces a function by a new one in every module that has it."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is present:
                    vars(module)[name] = new


def _in_place_of(original: Callable[..., Any], old: bool) -> Callable[..., Any]:
    """A function that exports by onnxplug while a context lasts, with the signature of torch's.

    Args:
        original: torch's function.
        old: Whether it is the function of the exporter that was the default before torch 2.9.
    """

    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:
        if not _active:  # the program has kept the function
            return original(*args, **kwargs)
        return _export(original, old, args, kwargs)

    return export


def _export(original: Callable[..., Any], old: bool, args: Any, kwargs: Any) -> Any:
    import inspect

    from onnxplug.plugins.call import UnusedRuleWarning
    from onnxplug_torch_onnx.export import export, run
    from onnxplug_torch_onnx.request import Request

    # An argument that torch lacks is a TypeError, as Python raises it.
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    bound = inspect.signature(export).bind(**arguments, **({"dynamo": False} if old else {}))
    bound.apply_defaults()
    request = Request(**bound.arguments)
    started = time.perf_counter()
    with warnings.catch_warnings():
        # Programs pass tables of all translations that they may need.
        warnings.simplefilter("ignore", UnusedRuleWarning)
        try:
            # As torch does: drawn inputs may mean nothing to a third-party program's model.
            program = run(request, _active[-1].options(), verify_drawn=False)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            _record(Exported(_path(request), 0, 0, time.perf_counter() - started, reason))
            raise
    nodes, opset = program.model.graph.num_nodes(), program.model.opset_imports[""]
    _record(Exported(_path(request), opset, nodes, time.perf_counter() - started))
    return program if request.dynamo else None


def _path(request: Request) -> str | None:
    return os.fspath(request.f) if isinstance(request.f, str | os.PathLike) else None


def _record(exported: Exported) -> None:
    with _lock:
        for context in _active:
            context.exports.append(exported)


class _Finder(importlib.abc.MetaPathFinder):
    """Replaces torch's functions as soon as ``torch.onnx`` is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of the other finders, with a loader that replaces torch's functions."""
        if fullname != _MODULE:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None) if finder is not self else None
            spec: importlib.machinery.ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Wraps a loader, and replaces torch's functions after it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the wrapped loader."""
        module: ModuleType | None = self._inner.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the wrapped loader; then replaces torch's functions, if a context still lasts."""
        self._inner.exec_module(module)
        with _lock:
            if _active:
                _replace()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_finder = _Finder()
