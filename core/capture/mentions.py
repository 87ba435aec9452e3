"""Which functions and layers a model's code may use, read off the code without running it."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

#: Objects looked at before the search gives up and says yes.
_MOST = 50_000
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.Tensor,
    torch.dtype,
    torch.device,
    type,
    types.BuiltinMethodType,
)
#: Packages whose code uses no layer of the model.
_SKIPPED = frozenset({"torch", *sys.stdlib_module_names} - {"__main__"})


def mentions(model: torch.nn.Module, wanted: Callable[[str], bool]) -> bool:
    """Whether a model has a layer, or its code names a function or layer, for which ``wanted(name)`` holds.

    The search starts at ``forward`` and follows what the code names: functions, objects and their attributes, methods of
    the classes of every object that it meets. The answer may be yes for code that never runs; it is no only where none of
    the code has such a name.
    """
    return _Search(wanted).run(model)


class _Search:
    """One search: the objects met, the names that their code has, and the classes whose methods those names reach."""

    def __init__(self, wanted: Callable[[str], bool]) -> None:
        self._wanted = wanted
        self._seen: dict[int, Any] = {}
        self._pending: list[Any] = []
        self._names: set[str] = {"forward", "__call__"}
        self._classes: dict[type, None] = {}

    def run(self, model: torch.nn.Module) -> bool:
        """Whether a wanted name is met."""
        self._pending.append(model)
        while self._pending:
            item = self._pending.pop()
            if isinstance(item, _PLAIN) or id(item) in self._seen:
                continue
            self._seen[id(item)] = item  # kept alive: an id may be given again
            if len(self._seen) > _MOST or any(map(self._wanted, self._meet(item))):
                return True
        return False

    def _meet(self, item: Any) -> Iterable[str]:
        """Puts what an object reaches on the list; returns the names that it brings."""
        if isinstance(item, types.FunctionType):
            return (item.__name__, *(() if _is_skipped(item.__module__) else self._meet_code(item)))
        if isinstance(item, types.MethodType):
            self._pending += (item.__func__, item.__self__)
        elif isinstance(item, functools.partial):
            self._pending += (item.func, *item.args, *item.keywords.values())
        elif isinstance(item, list | tuple | set | frozenset):
            self._pending += item
        elif isinstance(item, dict):
            self._pending += item.values()
        elif not isinstance(item, types.ModuleType) and not _is_skipped(type(item).__module__, but=item):
            self._pending += getattr(item, "__dict__", {}).values()
            return self._meet_class(type(item))
        return ()

    def _meet_class(self, kind: type) -> Iterable[str]:
        if kind in self._classes:
            return ()
        self._classes[kind] = None
        for base in kind.__mro__:
            if not _is_skipped(base.__module__):
                self._pending += (_function(vars(base)[name]) for name in self._names & vars(base).keys())
        return [base.__name__ for base in kind.__mro__] if issubclass(kind, torch.nn.Module) else ()

    def _meet_code(self, function: types.FunctionType) -> Iterable[str]:
        names = set(_code_names(function.__code__))
        for name in names & function.__globals__.keys():
            found = function.__globals__[name]
            if isinstance(found, types.ModuleType) and not _is_skipped(found.__name__):
                # A module of helpers: what the code names of it.
                self._pending += (vars(found)[other] for other in names & vars(found).keys())
            else:
                self._pending.append(found)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that isn't assigned yet
                self._pending.append(cell.cell_contents)
        self._pending += function.__defaults__ or ()
        self._pending += (function.__kwdefaults__ or {}).values()
        self._pending.append(getattr(function, "__wrapped__", None))
        new = names - self._names
        self._names |= new
        for kind in self._classes:
            for base in kind.__mro__:
                if not _is_skipped(base.__module__):
                    self._pending += (_function(vars(base)[name]) for name in new & vars(base).keys())
        return names


def _function(attribute: Any) -> Any:
    """The function behind a method, property, static or class method."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    return getattr(attribute, "__func__", attribute)


def _is_skipped(module: str | None, but: Any = None) -> bool:
    """Whether a module is of torch or the standard library; torch's layers, as objects, are not skipped."""
    return (module or "").partition(".")[0] in _SKIPPED and not isinstance(but, torch.nn.Module)


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)
