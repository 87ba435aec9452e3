"""When two modules are the same but for their weights, so that one's trace is the other's too."""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from onnxplug.capture.patching import patched

#: What every module has; hooks among these are looked at by :class:`Structures`.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in sorted(_OF_EVERY_MODULE) if name.endswith(("_hooks", "_hooks_with_kwargs")))
#: Types of values that say all by themselves; float is compared apart.
PLAIN = (bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_FIXED = (type, enum.Enum, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Structures:
    """The modules of a model that may stand for each other, by classes and trees of children.

    Args:
        root: The model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._keys: dict[int, Any] = {}
        self._one: dict[Any, object] = {}
        self._trees: dict[int, list[tuple[str, nn.Module]]] = {}
        self._modules = list(root.modules())
        seen: dict[Any, int] = {}
        for module in self._modules:
            key = self._key(module)
            if key is not None:
                seen[key] = seen.get(key, 0) + 1
        self._repeated = {key for key, count in seen.items() if count > 1}

    def key(self, module: nn.Module) -> Any:
        """What is equal for modules that may stand for each other; ``None`` for one without children, or without its like."""
        found = self._keys.get(id(module))
        return found if found in self._repeated and module._modules else None

    def tree(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The module and all modules in it, each with its path from there."""
        found = self._trees.get(id(module))
        if found is None:
            found = self._trees[id(module)] = list(module.named_modules(remove_duplicate=False))
        return found

    def classes(self) -> set[type]:
        """The classes of all modules that may stand for each other, and of what is in them."""
        return {type(part) for m in self._modules if self.key(m) is not None for _, part in self.tree(m)}

    def _key(self, module: nn.Module) -> Any:
        if id(module) in self._keys:
            return self._keys[id(module)]
        children = {name: None if c is None else self._key(c) for name, c in module._modules.items()}
        unknown = any(c is not None and children[name] is None for name, c in module._modules.items())
        key = None if unknown or not _is_plain(module) else (type(module), tuple(children.items()))
        # Equal keys are one object, so that those of deep trees are compared in one step.
        self._keys[id(module)] = None if key is None else self._one.setdefault(key, object())
        return self._keys[id(module)]


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is run by its class's forward alone."""
    own = vars(module)
    if any(own.get(name) for name in _HOOKS) or isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule):
        return False
    cls: Any = type(module)
    return "forward" not in own and "__call__" not in own and not _goes_past_attributes(cls)


@functools.cache
def _goes_past_attributes(cls: Any) -> bool:
    """Whether a method of a class assigns a global, or reads what a module has by its dict of attributes."""
    methods = [m for c in cls.__mro__ if c is not nn.Module and c is not object for m in vars(c).values()]
    codes = [m.__code__ for m in methods if isinstance(m, types.FunctionType) and m.__name__ not in _BESIDE_FORWARD]
    if any({"__dict__", "vars"} & set(code.co_names) for code in codes):
        return True
    return any(i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for code in codes for i in dis.get_instructions(code))


#: Methods that do not run while a module is called.
_BESIDE_FORWARD = {
    "__init__",
    "extra_repr",
    "__setstate__",
    "__getstate__",
    "__deepcopy__",
    "__repr__",
    "__setattr__",
    "__getattr__",
}


# -- values --------------------------------------------------------------------------------------------------------------


def same_value(a: Any, b: Any) -> bool:
    """Whether two values that code reads make it do the same: equal plain values, or one object."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, (*PLAIN, enum.Enum)):
        return bool(a == b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_value(v, b[k]) for k, v in a.items())
    if isinstance(a, set | frozenset):
        return all(isinstance(v, PLAIN) for v in a) and bool(a == b)
    if isinstance(a, types.FunctionType):
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        return (
            a.__code__ is b.__code__
            and a.__globals__ is b.__globals__
            and same_value((cells[0], a.__defaults__, a.__kwdefaults__), (cells[1], b.__defaults__, b.__kwdefaults__))
        )
    if isinstance(a, functools.partial):
        return same_value((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    return False


def can_be_compared(value: Any) -> bool:
    """Whether a value read by code says all that it may say: no tensor, and no module that is not a child."""
    if isinstance(value, tuple | list | set | frozenset):
        return all(map(can_be_compared, value))
    if isinstance(value, dict):
        return all(map(can_be_compared, value.values()))
    return not isinstance(value, torch.Tensor | nn.Module | Iterator | types.MethodType)


def contents(value: Any) -> Any:
    """What an object that can change holds, to tell whether it has; ``None`` for one that can't."""
    if isinstance(value, (float, *PLAIN, *_FIXED)):
        return None
    if isinstance(value, list | tuple | set | frozenset):
        return [_item(v) for v in value]
    if isinstance(value, Mapping):
        return [(k, _item(v)) for k, v in value.items()]
    own = getattr(value, "__dict__", None)
    return [(k, _item(v)) for k, v in own.items()] if own is not None else None


def _item(value: Any) -> Any:
    # A list or dict in a configuration may change too.
    return (One(value), contents(value)) if isinstance(value, list | dict) else One(value)


class One:
    """An object, equal to itself alone."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, One) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


# -- what code reads -----------------------------------------------------------------------------------------------------


class Reads:
    """The attributes of modules that code has read, and what they were.

    Args:
        tree: The modules whose place counts, not their identity.
    """

    def __init__(self, tree: list[tuple[str, nn.Module]]) -> None:
        self._places = {id(vars(module)): i for i, (_, module) in enumerate(tree)}
        self._found: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}
        self._before = [attributes_of(module) for _, module in tree]
        self._tree = tree
        self._random = random.getstate()
        self.of_classes = class_attributes(tree)

    def note(self, attributes: dict[str, Any], name: str) -> None:
        """An attribute is read."""
        key = (id(attributes), name)
        if key not in self._found:
            value = attributes[name]
            self._found[key] = (attributes, value, contents(value))

    def settled(self) -> list[tuple[int | dict[str, Any], str, Any, Any]] | None:
        """What was read: place in the tree (or another module's attributes), name, value and contents.

        ``None`` where code wrote attributes, drew random numbers of Python, or read what can't be compared.
        """
        written = [attributes_of(module) for _, module in self._tree] != self._before
        if written or class_attributes(self._tree) != self.of_classes or random.getstate() != self._random:
            return None
        found: list[tuple[int | dict[str, Any], str, Any, Any]] = []
        for (_, name), (attributes, value, held) in self._found.items():
            if not can_be_compared(value) or contents(value) != held:
                return None
            place = self._places.get(id(attributes))
            found.append((attributes if place is None else place, name, value, held))
        return found


def read_otherwise(
    reads: Iterable[tuple[int | dict[str, Any], str, Any, Any]], tree: list[tuple[str, nn.Module]]
) -> set[int | None]:
    """The places in another tree at which code that reads these attributes finds something else.

    ``None`` among them is a module that is not in the tree.
    """
    found: set[int | None] = set()
    for place, name, value, held in reads:
        attributes = vars(tree[place][1]) if isinstance(place, int) else place
        other = attributes.get(name, _MISSING)
        if not same_value(value, other) or (held is not None and other is value and contents(other) != held):
            found.add(place if isinstance(place, int) else None)
    return found


_MISSING = object()


def attributes_of(module: nn.Module) -> dict[str, One]:
    """The attributes of a module, and its parameters, buffers and children."""
    own = {name: One(value) for name, value in vars(module).items()}
    for kind in ("_parameters", "_buffers", "_modules"):
        own.update({f"{kind}.{name}": One(value) for name, value in vars(module)[kind].items()})
    return own


def class_attributes(tree: list[tuple[str, nn.Module]]) -> list[Any]:
    """The data that the classes of modules have, which any of them may read and change."""
    classes = {c for _, module in tree for c in type(module).__mro__ if c is not nn.Module and c is not object}
    ordered = sorted(classes, key=lambda c: (c.__module__, c.__qualname__))
    return [
        (One(c), [(n, One(v), contents(v)) for n, v in vars(c).items() if not n.startswith("__") and not callable(v)])
        for c in ordered
    ]


@contextlib.contextmanager
def attributes_noted(classes: Iterable[type], note: Callable[[dict[str, Any], str], None]) -> Iterator[None]:
    """Calls ``note(attributes, name)`` for each attribute that code reads of instances of some classes of modules."""
    with contextlib.ExitStack() as stack:
        for cls in classes:
            stack.enter_context(patched(cls, "__getattribute__", _noting(cls.__getattribute__, note)))
        yield


def _noting(original: Any, note: Callable[[dict[str, Any], str], None]) -> Any:
    def __getattribute__(self: Any, name: str) -> Any:
        if name not in _OF_EVERY_MODULE and not name.startswith("__"):
            attributes = object.__getattribute__(self, "__dict__")
            if name in attributes:
                note(attributes, name)
        return original(self, name)

    return __getattribute__
