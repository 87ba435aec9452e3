"""Weights and inputs of classes of their own, which torch.export takes for plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from onnxplug.text import shortened
from onnxplug.torch_private import is_traceable_wrapper_subclass

#: Methods that make, copy, store or print a tensor, and what every class has.
_APART = frozenset(
    "__new__ __init__ __repr__ __str__ __format__ __reduce__ __reduce_ex__ __setstate__ __getstate__ __copy__ __deepcopy__ "
    "__class_getitem__ __init_subclass__ __module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __parameters__ "
    "__orig_bases__ __static_attributes__ __firstlineno__ __slots__".split()
)


def has_own_class(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that neither torch nor torch.export knows."""
    kind = type(tensor)
    return kind.__module__.partition(".")[0] != "torch" and not is_traceable_wrapper_subclass(tensor)


def class_texts(tensors: Iterable[torch.Tensor], called: Callable[[torch.Tensor], str]) -> list[str]:
    """A warning for each class of some tensors that defines methods of its own.

    Args:
        tensors: The tensors of the model and its inputs.
        called: Gives a tensor's name and class in messages.
    """
    first: dict[type, torch.Tensor] = {}
    for tensor in filter(has_own_class, tensors):
        first.setdefault(type(tensor), tensor)
    return [_text(called(tensor), defined) for kind, tensor in first.items() if (defined := _defined(kind))]


def _defined(kind: type) -> list[str]:
    """The names of the methods and properties that a class adds to those of torch's classes, or replaces."""
    own = (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins"))
    members: dict[str, Any] = {name: value for base in own for name, value in vars(base).items()}
    is_code = {name: callable(value) or hasattr(value, "__get__") for name, value in members.items()}
    return sorted(name for name, value in is_code.items() if value and name not in _APART)


def _text(name: str, defined: list[str]) -> str:
    return (
        f"torch.export takes {name} for a plain tensor: the exported model may lack what that class does "
        f"({shortened(', '.join(defined), 60)}). Compare (verify=True), or give plain tensors: x.as_subclass(torch.Tensor)."
    )
