"""Weights and inputs of classes of their own, which torch.export takes for plain tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch

from onnxplug.patches.marks import has_own_class, path_to
from onnxplug.patches.state import state_of
from onnxplug.plugin_api import CaptureRequest
from onnxplug.text import shortened
from onnxplug.torch_private import pytree

#: Methods that make, copy, store or print a tensor, and what every class has.
_APART = frozenset(
    "__new__ __init__ __repr__ __str__ __format__ __reduce__ __reduce_ex__ __setstate__ __getstate__ __copy__ __deepcopy__ "
    "__class_getitem__ __init_subclass__ __module__ __qualname__ __doc__ __dict__ __weakref__ __annotations__ __parameters__ "
    "__orig_bases__ __static_attributes__ __firstlineno__ __slots__".split()
)


@contextlib.contextmanager
def classes_named(request: CaptureRequest) -> Iterator[None]:
    """Adds a warning to the request's for each class, with methods of its own, of a tensor of the model or among its inputs."""
    yield
    arguments = inspect.signature(request.module.forward).bind_partial(*request.args, **request.kwargs).arguments
    first: dict[type, torch.Tensor] = {}
    for tensor in (*state_of(request).of_own_class, *pytree.tree_leaves(arguments)):
        if isinstance(tensor, torch.Tensor) and has_own_class(tensor):
            first.setdefault(type(tensor), tensor)
    roots = {"self": request.module, **arguments}
    texts = (_text(path_to(tensor, roots), names) for kind, tensor in first.items() if (names := _defined(kind)))
    request.warnings.extend(texts)


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
