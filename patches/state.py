"""State of a model and its code between calls: recorded before a capture and restored after each attempt.

While torch.export traces, the model's own code runs on tensors of the trace. If it keeps any, the next call of the model and the
next attempt to capture it would find them. For a model that makes ``self.table`` and appends to ``self.calls`` in its first call::

    state = State(model, Mentions(model))    keeps the contents of vars(model) and of the list, among others
    model(x)                                 table is a tensor, calls is [2]
    state.restore()                          table is None, calls is []: both had changed, nothing else is written
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import itertools
import operator
import os
import pickle
import random
import threading
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from typing import Any, NamedTuple

import numpy as np
import torch

from onnxplug.capture.locations import raised_at
from onnxplug.capture.mentions import SKIPPED, Mentions, attributes_of, code_names
from onnxplug.errors import CaptureError
from onnxplug.fake import is_fake
from onnxplug.patches.marks import advances, drawn_text, has_own_class, mark_of, path_to
from onnxplug.plugin_api import CaptureRequest
from onnxplug.torch_private import FakeTensor, is_transformed

_ABSENT: Any = object()
#: Packages whose objects are left alone: other threads may use them.
_OTHERS = SKIPPED - {"collections", "weakref", "types"}
#: The largest NumPy array, in bytes, that is copied; larger arrays are read-only while the model is captured.
_LARGE = 1 << 26
_PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, range))
_PLAIN |= {torch.dtype, torch.device, torch.Size}


class Kept(NamedTuple):
    """The recorded content of a mutable object.

    Attributes:
        owner: The group that it belongs to; ``None`` is the model itself.
        before: Its content before the capture.
        kind: Reads and restores its content.
    """

    owner: str | None
    item: Any
    before: Any
    kind: _Kind


class _Kind(NamedTuple):
    """A kind of object that holds others: reads its content, restores a content, and returns the objects in a content."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    values: Callable[[Any], Iterable[Any]] = tuple


#: The content of every empty dict: a single object for the many dicts of hooks.
_NOTHING: dict[Any, Any] = {}


def _base(item: dict[Any, Any]) -> Any:
    """The builtin base class whose methods are called: methods of a user's class may do anything."""
    return OrderedDict if isinstance(item, OrderedDict) else dict


def _read_dict(item: dict[Any, Any]) -> dict[Any, Any]:
    return item.copy() if type(item) is dict else dict(_base(item).items(item))


def _write_dict(item: dict[Any, Any], before: dict[Any, Any]) -> None:
    base = _base(item)
    if not _are_same(base.keys(item), before):  # the order of keys counts
        base.clear(item)
    for key, value in before.items():
        if dict.get(item, key, _ABSENT) is not value:
            base.__setitem__(item, key, value)


def _write_list(item: list[Any], before: list[Any]) -> None:
    list.__setitem__(item, slice(None), before)


def _write_deque(item: deque[Any], before: list[Any]) -> None:
    deque.clear(item)
    deque.extend(item, before)


def _write_set(item: set[Any], before: set[Any]) -> None:
    set.clear(item)
    set.update(item, before)


def _write_bytes(item: bytearray | array[Any], before: Any) -> None:
    item[:] = before


def _write_array(item: np.ndarray[Any, Any], before: np.ndarray[Any, Any]) -> None:
    item[...] = before


def _read_cell(item: types.CellType) -> list[Any]:
    try:
        return [item.cell_contents]
    except ValueError:  # a variable that isn't assigned yet
        return []


def _write_cell(item: types.CellType, before: list[Any]) -> None:
    if before:
        item.cell_contents = before[0]
    else:
        del item.cell_contents


def _read_class(item: type) -> dict[str, Any]:
    return {name: value for name, value in vars(item).items() if not name.startswith("__")}


def _write_class(item: type, before: dict[str, Any]) -> None:
    for name in _read_class(item).keys() - before.keys():
        type.__delattr__(item, name)
    for name, value in before.items():
        if vars(item).get(name, _ABSENT) is not value:
            type.__setattr__(item, name, value)


def _write_globals(item: dict[str, Any], before: dict[str, Any]) -> None:
    """Like a dict, but names that were imported or defined in the meantime stay."""
    for name, value in dict(item).items():
        if name not in before and not isinstance(value, types.ModuleType | types.FunctionType | type):
            del item[name]
    for name, value in before.items():
        if item.get(name, _ABSENT) is not value:
            item[name] = value


def _read_slots(item: Any) -> dict[Any, Any]:
    values = {}
    for base in type(item).__mro__:
        if "__slots__" in vars(base) and not _is_others(base):
            for slot in vars(base).values():
                if isinstance(slot, types.MemberDescriptorType):
                    with contextlib.suppress(AttributeError):
                        values[slot] = slot.__get__(item)
    return values


def _write_slots(item: Any, before: dict[Any, Any]) -> None:
    for slot in _read_slots(item).keys() - before.keys():
        slot.__delete__(item)
    for slot, value in before.items():
        slot.__set__(item, value)


def _values(read: dict[Any, Any]) -> Iterable[Any]:
    return read.values()


def _elements(read: np.ndarray[Any, Any]) -> Iterable[Any]:
    return read.flat if read.dtype.hasobject else ()


def _read_generator(item: torch.Generator) -> bytes:
    return item.get_state().numpy().tobytes()


def _write_generator(item: torch.Generator, before: bytes) -> None:
    item.set_state(torch.frombuffer(bytearray(before), dtype=torch.uint8))


def _write_bits(item: np.random.Generator, before: bytes) -> None:
    item.bit_generator.state = pickle.loads(before)


def _write_random_state(item: np.random.RandomState, before: bytes) -> None:
    item.set_state(pickle.loads(before))


def _write_tensor(item: torch.Tensor, before: torch.Tensor) -> None:
    with torch.no_grad():
        item.copy_(before)


def _read_settings(_: Any) -> tuple[Any, ...]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), warns


def _write_settings(_: Any, before: tuple[Any, ...]) -> None:
    dtype, is_deterministic, warns = before
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=warns)


def _write_environ(item: Any, before: tuple[tuple[str, str], ...]) -> None:
    item.clear()
    item.update(before)


def _nothing(_: Any) -> Iterable[Any]:
    return ()


_DICT = _Kind(_read_dict, _write_dict, _values)
_LIST = _Kind(lambda item: list(list.__iter__(item)), _write_list)
_DEQUE = _Kind(lambda item: list(deque.__iter__(item)), _write_deque)
_SET = _Kind(lambda item: set(set.__iter__(item)), _write_set)
_BYTES = _Kind(bytes, _write_bytes, _nothing)
_NUMBERS = _Kind(lambda item: item[:], _write_bytes, _nothing)
_ARRAY = _Kind(np.array, _write_array, _elements)
_TENSOR = _Kind(lambda item: item.detach().clone(), _write_tensor, _nothing)
_SETTINGS = _Kind(_read_settings, _write_settings, _nothing)
_ENVIRON = _Kind(lambda item: tuple(item.items()), _write_environ, _nothing)
_CELL = _Kind(_read_cell, _write_cell)
_CLASS = _Kind(_read_class, _write_class, _values)
_GLOBALS = _Kind(dict, _write_globals, _values)
_SLOTS = _Kind(_read_slots, _write_slots, _values)
_CONTAINERS = ((dict, _DICT), (list, _LIST), (deque, _DEQUE), (set, _SET), (bytearray, _BYTES), (array, _NUMBERS))
_BITS = _Kind(lambda item: pickle.dumps(item.bit_generator.state), _write_bits, _nothing)
_RANDOM_STATE = _Kind(lambda item: pickle.dumps(item.get_state(legacy=False)), _write_random_state, _nothing)
#: Generators of random numbers.
_GENERATORS: tuple[tuple[type, _Kind], ...] = (
    (torch.Generator, _Kind(_read_generator, _write_generator, _nothing)),
    (random.Random, _Kind(random.Random.getstate, random.Random.setstate, _nothing)),
    (np.random.Generator, _BITS),
    (np.random.RandomState, _RANDOM_STATE),
)
#: Hooks that hold for all modules.
_HOOKS = [
    x for name, x in vars(torch.nn.modules.module).items() if name.startswith("_global_") and type(x) is OrderedDict
]
#: The generators that torch's, Python's and NumPy's functions use.
SHARED = (torch.default_generator, *(getattr(f, "__self__", None) for f in (random.getstate, np.random.get_state)))
_EMPTY = frozenset((dict, OrderedDict, list, set))


class State:
    """The state of a model and the code that it reaches, at the time of construction.

    Always restored are: objects that are reached from the model through modules, objects of users' classes, dicts, lists, tuples,
    sets and deques; tensors there that are neither parameters nor buffers; torch's default dtype and choice of algorithms; and the
    states of torch's, Python's and NumPy's random numbers. State of functions and classes (globals, closures, class attributes, and
    objects reached from them) is restored in the Python modules in which a trace left an object; a counter or a log there goes on,
    unless the capture fails. Objects of threads and of torch are left alone.

    Time and memory are linear in the number of objects: 6 ms for a decoder of 48 layers.
    """

    def __init__(self, model: torch.nn.Module, mentions: Mentions) -> None:
        self.kept: list[Kept] = []
        self._dicts: list[tuple[Any, dict[Any, Any]]] = []
        self._seen: dict[int, Any] = {}
        self._caches: list[tuple[Any, int]] = []
        self._counts: list[tuple[itertools.count[Any], str]] = []
        self._large: list[np.ndarray[Any, Any]] = []
        # torch.export replaces these by fake tensors, and computes with every other tensor itself.
        self._registered = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        self._model = model
        self._marks: list[tuple[Any, Any]] = []
        self._reported: set[int] = set()
        #: Warnings of objects that advanced, and that nothing puts back.
        self.texts: list[str] = []
        #: The tensors reached that are of a class of their own.
        self.of_own_class: list[torch.Tensor] = []
        self._keep(None, torch, _SETTINGS)
        self._keep(None, os.environ, _ENVIRON)
        self._walk([model, *SHARED], None)
        self._walk(_HOOKS, torch.nn.modules.module.__name__)
        for function in mentions.functions:
            self._note_function(function)
        for kind in mentions.classes:
            self._note_class(kind)

    def _note_function(self, function: types.FunctionType) -> None:
        names, namespace = set(code_names(function.__code__)), function.__globals__
        owner = self._note_namespace(namespace, names)
        for name in names & namespace.keys():
            if isinstance(module := namespace[name], types.ModuleType) and not _is_others_name(module.__name__):
                self._note_namespace(vars(module), names)
        cells = [value for cell in function.__closure__ or () for value in self._keep(owner, cell, _CELL)]
        self._walk([*cells, function.__defaults__, function.__kwdefaults__, vars(function)], owner)

    def _note_class(self, kind: type) -> None:
        if id(kind) not in self._seen and not _is_others(kind):
            self._seen[id(kind)] = kind
            self._walk(self._keep(kind.__module__, kind, _CLASS), kind.__module__)
            if isinstance(type(kind).__module__, str):  # a metaclass in C may have none
                self._note_class(type(kind))

    def _note_namespace(self, namespace: dict[str, Any], names: Set[str]) -> str:
        """Records a Python module's globals, and objects reached through some of them; returns the module's name."""
        owner = str(namespace.get("__name__"))
        if id(namespace) not in self._seen:
            self._seen[id(namespace)] = namespace
            self._keep(owner, namespace, _GLOBALS)
        named = [namespace[name] for name in names & namespace.keys()]
        for kind in named:
            if isinstance(kind, type):
                self._note_class(kind)
        self._walk(named, owner)
        return owner

    def _keep(self, owner: str | None, item: Any, kind: _Kind) -> Iterable[Any]:
        """Records an object's content, and returns the objects in it."""
        before = kind.read(item)
        self.kept.append(Kept(owner, item, before, kind))
        return kind.values(before)

    def _walk(self, items: Iterable[Any], owner: str | None) -> None:
        pending = list(items)
        seen, plain = self._seen, _PLAIN
        while pending:
            item = pending.pop()
            if type(item) in plain or id(item) in seen or isinstance(item, type):
                continue
            seen[id(item)] = item  # kept alive: an id may be used again
            if type(item) is OrderedDict and not item:
                self.kept.append(Kept(owner, item, _NOTHING, _DICT))
            else:
                pending += self._meet(item, owner)

    def _meet(self, item: Any, owner: str | None) -> Iterable[Any]:
        """Records an object's content; returns the objects in it."""
        for base, kind in _CONTAINERS:
            if isinstance(item, base):
                contents = self._keep(owner, item, kind)
                return contents if type(item) is base else [*contents, *self._meet_object(item, owner)]
        for generator, kind in _GENERATORS:
            if isinstance(item, generator) and not isinstance(item, random.SystemRandom):
                return [*self._keep(owner, item, kind), *(self._meet_object(item, owner) if _has_state(item) else ())]
        if isinstance(item, np.ndarray):
            if item.flags.writeable and item.nbytes <= _LARGE:
                return self._keep(owner, item, _ARRAY)
            self._large += [item] if item.flags.writeable else []
            return ()
        if issubclass(type(item), torch.Tensor) and has_own_class(item):
            self.of_own_class.append(item)
        elif type(item) is torch.Tensor and self._can_be_written(item):
            if item.nbytes <= _LARGE:
                self._keep(None, item, _TENSOR)
            else:
                self._marks.append((item, mark_of(item)))
        if type(item) is itertools.count and owner is None:
            self._counts.append((item, repr(item)))
        elif owner is None and advances(item) and not _has_state(item):
            self._marks.append((item, mark_of(item)))
        if isinstance(item, functools._lru_cache_wrapper):
            self._caches.append((item, item.cache_info().misses))
            return [*_results_of(item), vars(item)]
        return self._meet_object(item, owner) if _has_state(item) else _parts(item)

    def _can_be_written(self, item: torch.Tensor) -> bool:
        if id(item) in self._registered or is_fake(item) or is_transformed(item) or item.is_meta or item.is_inference():
            return False
        return item.layout is torch.strided and not item.is_quantized

    def _meet_object(self, item: Any, owner: str | None) -> Iterable[Any]:
        contents: list[Any] = []
        attributes = attributes_of(item)
        if attributes is not None:
            self._dicts.append((item, attributes))
            contents.append(attributes)
        if any("__slots__" in vars(base) for base in type(item).__mro__):
            contents += self._keep(owner, item, _SLOTS)
        return contents

    def restore(self, *, wholly: bool = False) -> None:
        """Restores everything; objects that did not change are not touched.

        Args:
            wholly: Also the state of functions and classes in Python modules without a trace, as after a failed capture: it may
                have ended between two changes that belong together.
        """
        for item, attributes in self._dicts:
            if attributes_of(item) is not attributes:
                object.__setattr__(item, "__dict__", attributes)
        changed = [(kept, kept.kind.read(kept.item)) for kept in self.kept if _is_changed(*kept)]
        left = {
            kept.owner
            for kept, now in changed
            if kept.owner is not None and _has_trace(_new(kept.kind.values(now), kept.kind.values(kept.before)))
        }
        for kept, _ in changed:
            if wholly or kept.owner is None or kept.owner in left:
                kept.kind.write(kept.item, kept.before)
        self._report(self._rewind(), drawn_text(kept.item for kept, _ in changed))
        for cache, misses in self._caches:
            if cache.cache_info().misses != misses and (wholly or _has_trace(_results_of(cache))):
                cache.cache_clear()

    def _rewind(self) -> set[int]:
        """Replaces the model's counts that advanced by new counts: a count can't be set back; returns the ids of the old ones."""
        begun = {id(count): _count(text) for count, text in self._counts if repr(count) != text}
        replaced: set[int] = set()
        for owner, item, before, kind in self.kept if any(begun.values()) else ():
            if owner is not None or not isinstance(before, dict | list | set):
                continue
            counts = {id(value) for value in kind.values(before) if begun.get(id(value))}
            if counts:
                items = before.items() if isinstance(before, dict) else enumerate(before)
                after = {key: begun.get(id(value)) or value for key, value in items}
                kind.write(item, after if isinstance(before, dict) else type(before)(after.values()))
                replaced |= counts
        return replaced

    def _report(self, rewound: set[int], drawn: str | None) -> None:
        """Warns once of drawn random numbers, and of each object that advanced for good."""
        self.texts += [drawn] if drawn and drawn not in self.texts else []
        advanced = [item for item, mark in self._marks if mark_of(item) != mark]
        advanced += [count for count, text in self._counts if repr(count) != text and id(count) not in rewound]
        for item in advanced:
            if id(item) not in self._reported:
                self._reported.add(id(item))
                path = path_to(item, {"self": self._model})
                self.texts.append(
                    f"the model's code advanced {path} during the capture, which can't be put back: the model's next call starts "
                    "from there. Keep the state in a buffer, a list or a number."
                )

    @contextlib.contextmanager
    def restored(self, warnings: list[str]) -> Iterator[None]:
        """Restores everything at the end; wholly after an error.

        Args:
            warnings: Receives a warning for each object that can't be put back.
        """
        try:
            with self.guarded():
                yield
        except BaseException:
            self.restore(wholly=True)
            raise
        self.restore()
        warnings.extend(self.texts)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """While it holds, the arrays without a copy can't be written to.

        Raises:
            CaptureError: The model's code writes to one.
        """
        for large in self._large:
            large.flags.writeable = False
        try:
            yield
        except ValueError as error:
            if not self._large or "read-only" not in str(error):
                raise
            raise CaptureError(
                f"the model's code{raised_at(error)} writes to a NumPy array of more than {_LARGE >> 20} MiB, "
                "which an export can't put back",
                hint="Make it a buffer of the model, or write to it outside of forward.",
            ) from error
        finally:
            for large in self._large:
                large.flags.writeable = True


def _results_of(cache: functools._lru_cache_wrapper[Any]) -> list[Any]:
    """The content of a function's cache: its keys and results."""
    referents = gc.get_referents(cache)
    function = next((n for n, item in reversed(list(enumerate(referents))) if item is cache.__wrapped__), 0)
    results = referents[function - 1] if function else None  # its own dict, which must not be written
    return [*referents[: function - 1], *results.values()] if type(results) is dict else []


def _count(text: str) -> itertools.count[Any] | None:
    """The count with this printed form; ``None`` where it counts by anything but plain numbers."""
    try:
        numbers = ast.literal_eval(f"({text[len('count(') : -1]},)")
    except (ValueError, SyntaxError):
        return None
    return itertools.count(*numbers)


def state_of(request: CaptureRequest) -> State:
    """The state of the captured module, as it was before the first attempt."""
    state: State | None = request.shared.get("state")
    if state is None:
        mentions: Any = request.mentions
        state = request.shared["state"] = State(request.module, mentions)
    return state


def _is_others(kind: type) -> bool:
    return kind.__module__ == "builtins" or _is_others_name(kind.__module__)


def _is_others_name(module: str) -> bool:
    return module.partition(".")[0] in _OTHERS


def _has_state(item: Any) -> bool:
    """Whether an object's attributes may be read and restored."""
    if isinstance(item, torch.nn.Module | threading.local):
        return True
    return not (isinstance(item, torch.Tensor | type | types.ModuleType) or _is_others(type(item)))


def _parts(item: Any) -> Iterable[Any]:
    """The objects in an immutable object."""
    if isinstance(item, tuple | frozenset):
        return item
    if isinstance(item, functools.partial):
        return (*item.args, item.keywords, vars(item))
    if isinstance(item, types.MethodType):
        return (item.__self__,)
    if isinstance(item, staticmethod | classmethod):
        return (item.__func__,)
    if isinstance(item, torch.Tensor):
        return (vars(item),) if vars(item) else ()
    return ()


def _is_changed(owner: str | None, item: Any, before: Any, kind: _Kind) -> bool:
    """Whether an object holds other objects than before, or in another order."""
    if type(item) in _EMPTY and not before:  # most containers are empty
        return bool(item)
    now = kind.read(item)
    if isinstance(now, dict):
        return not (_are_same(now, before) and _are_same(now.values(), before.values()))
    if isinstance(now, list):
        return not _are_same(now, before)
    if isinstance(now, np.ndarray):
        return bool(now.tobytes() != before.tobytes())
    if isinstance(now, torch.Tensor):
        return not bool(((now == before) | ((now != now) & (before != before))).all())
    return bool(now != before)


def _are_same(now: Collection[Any], before: Collection[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _new(now: Iterable[Any], before: Iterable[Any]) -> list[Any]:
    known = {id(value) for value in before}
    return [value for value in now if id(value) not in known]


def _has_trace(items: Iterable[Any]) -> bool:
    """Whether a trace's tensor or number is among objects, or in their contents."""
    pending, seen = list(items), set[int]()
    while pending:
        item = pending.pop()
        if type(item) in _PLAIN or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if isinstance(item, FakeTensor) or is_fake(item) or is_transformed(item):
                return True
        elif isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool | torch.fx.Proxy):
            return True
        pending += _contents(item)
    return False


def _contents(item: Any) -> Iterable[Any]:
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, list | tuple | set | frozenset | deque):
        return item
    if isinstance(item, types.FunctionType):
        cells = [value for cell in item.__closure__ or () for value in _read_cell(cell)]
        return (*cells, item.__defaults__, item.__kwdefaults__)
    if _has_state(item):
        return (attributes_of(item), *_read_slots(item).values())
    return _parts(item)
