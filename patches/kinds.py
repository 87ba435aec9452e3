"""Classes (``type(x)``, ``x.__class__``, ``isinstance(n, int)``), ``id(weight)``, attributes of tensors, and modules in a capture.

They are as they are when PyTorch runs the model.

A traced tensor is a ``FakeTensor`` and a dynamic size a ``SymInt``: code that asks for their classes would go another way than in
PyTorch, as would code that reads what somebody has set on a weight (``weight.scale = 2.0``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.mentions import SKIPPED, Mentions
from onnxplug.capture.patching import patched
from onnxplug.patches.lengths import Globals
from onnxplug.patches.lists import DynamicList, DynamicRange
from onnxplug.torch_private import FakeTensor, FakeTensorMode, ModuleStackTracer

# By other names: in an export within an export, these are replaced here.
_python_isinstance, _python_type, _python_id = isinstance, type, id
_KINDS = (
    (torch.SymBool, bool),
    (torch.SymInt, int),
    (torch.SymFloat, float),
    (DynamicRange, range),
    (DynamicList, list),
)
#: The attribute of a traced weight or input that has its class, where that is not one of torch's.
_CLASS = "_onnxplug_class"
#: The attribute of a traced weight or input that has the ``id`` of the tensor itself.
_ID = "_onnxplug_id"


def _kind(item: Any) -> Any:
    """The class that an item of the trace has in PyTorch; ``None`` for every other item."""
    if _python_isinstance(item, FakeTensor):
        own = vars(item).get(_CLASS)
        return own or (torch.nn.Parameter if getattr(item, "_is_param", False) else torch.Tensor)
    return next((kind for own, kind in _KINDS if _python_isinstance(item, own)), None)


def _isinstance(item: Any, classes: Any) -> bool:
    """As Python's, and true for the class that an item has in PyTorch."""
    if _python_isinstance(item, classes):
        return True
    kind = _kind(item)
    try:
        return kind is not None and issubclass(kind, classes)
    except TypeError:  # a protocol whose members are no methods
        return False


class _MetaType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kind = _kind(args[0]) if len(args) == 1 else None
        made = kind or _python_type(*args, **kwargs)
        return _Type if made is _python_type else made

    def __instancecheck__(cls, item: Any) -> bool:
        return _python_isinstance(item, _python_type)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, _python_type)


class _Type(type, metaclass=_MetaType):
    """As Python's ``type``, but the class that an item has in PyTorch."""

    def __class_getitem__(cls, kind: Any) -> Any:
        return types.GenericAlias(cls, kind)


def id_of(item: Any) -> int:
    """As Python's, but of a traced weight or input the ``id`` of the tensor itself: code may have kept it."""
    return (vars(item).get(_ID) if _python_isinstance(item, FakeTensor) else None) or _python_id(item)


_REPLACED: dict[str, Any] = {"isinstance": _isinstance, "type": _Type, "id": id_of}


def _from_tensor(original: Callable[..., Any]) -> Callable[..., Any]:
    def from_tensor(mode: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """A traced tensor with the attributes of the tensor that it stands for."""
        fake = original(mode, tensor, *args, **kwargs)
        if not _python_isinstance(tensor, FakeTensor):
            for name, value in vars(tensor).items():
                if "_dynamo" not in name:  # marks of torch
                    vars(fake).setdefault(name, value)
            if _python_type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                vars(fake).setdefault(_CLASS, _python_type(tensor))
            vars(fake).setdefault(_ID, _python_id(tensor))
        return fake

    return from_tensor


def _module_itself(tracer: Any, name: str, value: Any, *rest: Any) -> Any:
    """A submodule itself. A model that holds a module twice would get a stand-in, each time another, for each of its submodules."""
    return super(ModuleStackTracer, tracer).getattr(name, value, *rest)


@contextlib.contextmanager
def kinds_as_in_pytorch(mentions: Mentions) -> Iterator[None]:
    """While it holds, the Python modules of the model's own code see the classes and attributes that there are in PyTorch."""
    with contextlib.ExitStack() as stack:
        namespaces = list(_namespaces(mentions))
        stack.enter_context(_class_attributes(namespaces))
        for namespace in namespaces:
            for name in _REPLACED.keys() - namespace.keys():
                stack.enter_context(patched(Globals(namespace), name, _REPLACED[name]))
        stack.enter_context(patched(FakeTensorMode, "from_tensor", _from_tensor(FakeTensorMode.from_tensor)))
        stack.enter_context(patched(ModuleStackTracer, "getattr", _module_itself))
        yield


@contextlib.contextmanager
def _class_attributes(namespaces: list[dict[str, Any]]) -> Iterator[None]:
    """While it holds, code in some namespaces reads the class that an item has in PyTorch from its attribute ``__class__``.

    Python reads that attribute to match classes as well. All other code, such as torch's, gets the real class.
    """
    getframe, identity, kind_of = (
        sys._getframe,
        _python_id,
        _python_type,
    )  # names of the function, as it is called very often
    known = {_python_id(namespace) for namespace in namespaces} | {_python_id(vars(functools))}  # singledispatch

    def read(item: Any) -> Any:
        frame: Any = getframe(1)
        if identity(frame.f_globals) not in known:
            while frame is not None and frame.f_code.co_name == "__instancecheck__":  # of the class that is matched
                frame = frame.f_back
            if frame is None or identity(frame.f_globals) not in known:
                return kind_of(item)
        return _kind(item) or kind_of(item)

    attribute = property(read, lambda item, kind: object.__setattr__(item, "__class__", kind))
    with contextlib.ExitStack() as stack:
        for kind in (FakeTensor, *(own for own, _ in _KINDS)):
            stack.enter_context(class_attribute(kind, "__class__", attribute))
        yield


@contextlib.contextmanager
def class_attribute(kind: Any, name: str, value: Any) -> Iterator[None]:
    """As :func:`patched`, for classes written in C, and for ``__class__``: an assignment to that would be to the class's class."""
    namespace = next(item for item in gc.get_referents(vars(kind)) if _python_type(item) is dict)
    before = {name: namespace[name] for name in (name,) if name in namespace}
    namespace[name] = value
    _forget_attributes(kind)
    try:
        yield
    finally:
        del namespace[name]
        namespace.update(before)
        _forget_attributes(kind)


#: Clears Python's cache of the attributes of a class, as every assignment does.
_forget_attributes = ctypes.pythonapi["PyType_Modified"]
_forget_attributes.argtypes, _forget_attributes.restype = [ctypes.py_object], None


def _namespaces(mentions: Mentions) -> Iterator[dict[str, Any]]:
    """The globals of the functions that were met, and of all modules of their packages: code may find others by a text."""
    met = {_python_id(f.__globals__): f.__globals__ for f in mentions.functions}
    names = {str(namespace.get("__name__")) for namespace in met.values()} | {
        kind.__module__ for kind in mentions.classes
    }
    packages = {name.partition(".")[0] for name in names} - SKIPPED - {"builtins"}
    of_packages = (m for name, m in list(sys.modules.items()) if name.partition(".")[0] in packages)
    met.update({_python_id(vars(m)): vars(m) for m in of_packages if _python_isinstance(m, types.ModuleType)})
    # onnxplug's own packages tell symbolic sizes from numbers.
    yield from (space for space in met.values() if not str(space.get("__name__")).startswith("onnxplug"))
