"""The functions and layers that a model's code may use, read off the code without running it."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any

import torch

#: The largest number of objects to visit; beyond it the answer is always yes.
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
#: Packages whose code uses no layer of the model: pytest's runs where an assertion of the model fails, and leads to every test.
#: Classes defined by `exec` in a bare dict have builtins as their module.
SKIPPED = frozenset({"torch", "_pytest", *sys.stdlib_module_names} - {"__main__", "builtins"})
#: CPython's flag of classes made by a class statement (Py_TPFLAGS_HEAPTYPE).
_HEAP_TYPE = 1 << 9


class Mentions:
    """The names of a model's layers, and of the functions and layers that its code names.

    The search starts at ``forward`` and follows the names in code: functions, objects and their attributes, methods of
    the classes of every object that it meets. It runs once, when an answer is first needed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    @functools.cached_property
    def _searched(self) -> tuple[_Search, Set[str] | None]:
        search = _Search()
        return search, search.run(self._model)

    @property
    def functions(self) -> list[types.FunctionType]:
        """The functions met that are not of torch, pytest or the standard library."""
        return self._searched[0].functions

    @property
    def classes(self) -> Set[type]:
        """The classes of the objects met, and their bases."""
        return self._searched[0].classes

    @functools.cached_property
    def compares_with_truth(self) -> bool:
        """Whether code may have ``… is True``, or the same with ``False`` or ``is not``; no only where none of the code has it."""
        return self(lambda name: False) or any(_compares_with_truth(f.__code__) for f in self.functions)

    def __call__(self, wanted: Callable[[str], bool]) -> bool:
        """Whether ``wanted(name)`` holds for a name.

        The answer may be yes because of code that never runs; it is no only where none of the code has such a name.
        """
        names = self._searched[1]
        return names is None or any(map(wanted, names))


class _Search:
    """One search: the objects met, the names in their code, and the methods that these names reach."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}
        self._pending: list[Any] = []
        self._named: set[str] = {"forward", "__call__"}
        self._mentioned: set[str] = set()
        self.classes: set[type] = set()
        self.functions: list[types.FunctionType] = []
        # Name to the attributes of the classes met: names in code are looked up here, as there may be thousands of classes.
        self._attributes: dict[str, list[Any]] = defaultdict(list)

    def run(self, model: torch.nn.Module) -> Set[str] | None:
        """The names met, or ``None`` where the search gave up."""
        self._pending.append(model)
        while self._pending:
            item = self._pending.pop()
            if isinstance(item, _PLAIN) or id(item) in self._seen:
                continue
            self._seen[id(item)] = item  # kept alive: an id may be used again
            if len(self._seen) > _MOST:
                return None
            self._mentioned.update(self._meet(item))
        return self._mentioned

    def _meet(self, item: Any) -> Iterable[str]:
        """Adds the objects that an object leads to; returns the names in its code."""
        if isinstance(item, types.FunctionType):
            return (item.__name__, *(() if _is_skipped(item.__module__) else self._meet_code(item)))
        if isinstance(item, types.MethodType):
            self._pending += (item.__func__, item.__self__)
        elif isinstance(item, functools.partial):
            self._pending += (item.func, *item.args, *item.keywords.values())
        elif isinstance(item, list | tuple | set | frozenset):
            self._pending.extend(item)  # += would ask the item first: a tuple of others may add itself to a list
        elif isinstance(item, dict):
            self._pending += dict.values(item)
        elif not isinstance(item, types.ModuleType) and not _is_skipped_class(type(item), but=item):
            self._pending += (attributes_of(item) or {}).values()
            return self._meet_class(type(item))
        return ()

    def _meet_class(self, kind: type) -> Iterable[str]:
        if kind in self.classes:
            return ()
        for base in kind.__mro__:
            if base not in self.classes and not _is_skipped_class(base):
                for name, attribute in vars(base).items():
                    self._attributes[name].append(attribute)
                self._pending += (_function(vars(base)[name]) for name in self._named & vars(base).keys())
            self.classes.add(base)
        return [base.__name__ for base in kind.__mro__] if issubclass(kind, torch.nn.Module) else ()

    def _meet_code(self, function: types.FunctionType) -> Iterable[str]:
        self.functions.append(function)
        names = set(code_names(function.__code__))
        for name in names & function.__globals__.keys():
            mentioned = function.__globals__[name]
            if isinstance(mentioned, types.ModuleType) and not _is_skipped(mentioned.__name__):
                # A module of helpers: only the members that the code names.
                self._pending += (vars(mentioned)[other] for other in names & vars(mentioned).keys())
            else:
                self._pending.append(mentioned)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable that isn't assigned yet
                self._pending.append(cell.cell_contents)
        self._pending += function.__defaults__ or ()
        self._pending += (function.__kwdefaults__ or {}).values()
        self._pending.append(getattr(function, "__wrapped__", None))
        for name in names - self._named:
            self._pending += map(_function, self._attributes.get(name, ()))
        self._named |= names
        return names


def attributes_of(item: Any) -> dict[str, Any] | None:
    """An object's own dict of attributes; ``None`` where it has none."""
    if isinstance(item, threading.local):
        return item.__dict__
    for base in type(item).__mro__:  # not by a property of that name, which may do anything
        own = vars(base).get("__dict__")
        if isinstance(own, types.GetSetDescriptorType | types.MemberDescriptorType):  # the latter of SimpleNamespace
            attributes = own.__get__(item)
            return attributes if isinstance(attributes, dict) else None
    return None


def _function(attribute: Any) -> Any:
    """The function behind a method, property, static or class method."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    return getattr(attribute, "__func__", attribute)


def _is_skipped(module: str | None) -> bool:
    """Whether a module is of torch, pytest or the standard library."""
    return (module or "").partition(".")[0] in SKIPPED


def _is_skipped_class(kind: type, but: Any = None) -> bool:
    """Whether a class is of torch or the standard library; torch's layers, as objects, are not skipped."""
    builtin = kind.__module__ == "builtins" and not kind.__flags__ & _HEAP_TYPE
    return (builtin or _is_skipped(kind.__module__)) and not isinstance(but, torch.nn.Module)


def code_names(code: types.CodeType) -> Iterator[str]:
    """The names of globals and attributes in a code object and in nested code objects."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


@functools.lru_cache(maxsize=65536)
def _compares_with_truth(code: types.CodeType) -> bool:
    """Whether code compares by ``is`` with anything but ``None``, and has ``True`` or ``False`` for a constant."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    if any(constant is True or constant is False for constant in code.co_consts):
        instructions = list(dis.get_instructions(code)) if dis.opmap["IS_OP"] in code.co_code[::2] else []
        others = (before for before, last in itertools.pairwise(instructions) if last.opname == "IS_OP")
        if any(before.opname != "LOAD_CONST" or before.argval is not None for before in others):
            return True
    return any(map(_compares_with_truth, nested))
