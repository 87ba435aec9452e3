"""``type(x)``, ``isinstance(n, int)`` and attributes of tensors during capture, as they are when PyTorch runs the model.

A traced tensor is a ``FakeTensor`` and a dynamic size a ``SymInt``: code that asks for their classes would go another way than in
PyTorch, as would code that reads what somebody has set on a weight (``weight.scale = 2.0``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.mentions import Mentions, code_names
from onnxplug.capture.patching import patched
from onnxplug.patches.lengths import Globals
from onnxplug.torch_private import FakeTensor, FakeTensorMode

_python_isinstance, _python_type = (
    isinstance,
    type,
)  # by other names: in an export within an export, these are replaced here
_NUMBERS = ((torch.SymBool, bool), (torch.SymInt, int), (torch.SymFloat, float))
#: The attribute of a traced weight or input that has its class, where that is not one of torch's.
_CLASS = "_onnxplug_class"


def _kind(item: Any) -> Any:
    """The class that an item of the trace has in PyTorch; ``None`` for every other item."""
    if _python_isinstance(item, FakeTensor):
        own = vars(item).get(_CLASS)
        return own or (torch.nn.Parameter if getattr(item, "_is_param", False) else torch.Tensor)
    return next((kind for symbolic, kind in _NUMBERS if _python_isinstance(item, symbolic)), None)


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


_REPLACED: dict[str, Any] = {"isinstance": _isinstance, "type": _Type}


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
        return fake

    return from_tensor


@contextlib.contextmanager
def kinds_as_in_pytorch(mentions: Mentions) -> Iterator[None]:
    """While it holds, the Python modules of the model's own code see the classes and attributes that there are in PyTorch."""
    namespaces = {id(f.__globals__): f.__globals__ for f in mentions.functions}
    named = {n: set[str]() for n in namespaces}
    for function in mentions.functions:
        named[id(function.__globals__)].update(_REPLACED.keys() & set(code_names(function.__code__)))
    with contextlib.ExitStack() as stack:
        for place, names in named.items():
            for name in names - namespaces[place].keys():
                stack.enter_context(patched(Globals(namespaces[place]), name, _REPLACED[name]))
        stack.enter_context(patched(FakeTensorMode, "from_tensor", _from_tensor(FakeTensorMode.from_tensor)))
        yield
