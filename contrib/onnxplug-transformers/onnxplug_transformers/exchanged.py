"""Functions and methods of transformers' modules exchanged for others while a model is captured."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from onnxplug.capture.patching import patched
from onnxplug_transformers.caches import renamed


@contextmanager
def exchanged(table: Mapping[str, tuple[Callable[..., Any], Callable[..., bool]]]) -> Iterator[None]:
    """Holds while a model is captured: functions and methods of the modules in use are exchanged for those of a table.

    A function with other parameters than its replacement, of another version of transformers, is left as it is.

    Args:
        table: Name of a function, or CLASS.METHOD, to its replacement, and to the predicate of the calls that are left
            to transformers' own.
    """
    with ExitStack() as stack:
        modules = _models()
        for place, (function, excepted) in table.items():
            for owner, name, before in in_use(place, modules):
                if parameters(before) == parameters(function):
                    chosen: Any = _unless(excepted, function, before)
                    chosen = staticmethod(chosen) if isinstance(before, staticmethod) else chosen
                    stack.enter_context(patched(owner, name, chosen))
        yield


def in_use(place: str, modules: Sequence[ModuleType] | None = None) -> Iterator[tuple[Any, str, Any]]:
    """Each function of a name, or method as CLASS.METHOD, of the modules of models in use: its owner, name, value."""
    owner_name, _, name = place.rpartition(".")
    for module in _models() if modules is None else modules:
        owner = vars(module).get(owner_name) if owner_name else module
        before = vars(owner).get(name) if owner is not None else None
        if before is not None:
            yield owner, name, before


def modeling_of(module: Any) -> Any:
    """The Python module of transformers that has the class of a model or layer, or the class that a user's class derives from."""
    names = [one.__module__ for one in type(module).__mro__]
    return sys.modules[next((name for name in names if name.startswith("transformers.models.")), names[0])]


def _models() -> list[ModuleType]:
    return [module for path, module in list(sys.modules.items()) if path.startswith("transformers.models.")]


def never(*_: Any, **__: Any) -> bool:
    """The predicate for a table of :func:`exchanged` by which no call is left to transformers."""
    return False


def parameters(function: Any) -> list[str]:
    """Names of the parameters, without ``*args`` and ``**kwargs``; the name of a cache is ``cache``."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [renamed(name) for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds]


def arguments_of(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a call of transformers' function as a function that stands for it takes them."""
    return {renamed(name): argument for name, argument in kwargs.items()}


def _unless(
    excepted: Callable[..., bool], function: Callable[..., Any], before: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(before)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = arguments_of(kwargs)
        return before(*args, **kwargs) if excepted(*args, **given) else function(*args, **given)

    return chosen
