"""Objects of a model that advance, and that nothing can put back: iterators, files, queues, large tensors.

A mark of an object tells whether it advanced: the state that Python pickles of an iterator, the position and the referents of a
generator, the length of a queue, the version of a tensor.
"""

from __future__ import annotations

import gc
import random
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from onnxplug.capture.mentions import attributes_of
from onnxplug.torch_private import is_traceable_wrapper_subclass

#: How deep iterators of iterators are looked at.
_DEPTH = 8
_VALUES = (int, float, str, bytes, bool, type(None), range)
#: The dicts of a module whose entries are its attributes.
_OF_MODULE = ("_modules", "_buffers", "_parameters")


def advances(item: Any) -> bool:
    """Whether an object without a state to put back may change."""
    return isinstance(item, Iterator) or hasattr(type(item), "qsize")


def mark_of(item: Any, depth: int = _DEPTH) -> Any:
    """A value that differs once an object has advanced."""
    if isinstance(item, _VALUES):
        return item
    if isinstance(item, tuple | list) and depth:
        return [mark_of(x, depth - 1) for x in item]
    if isinstance(item, torch.Tensor):
        return id(item) if item.is_inference() else (id(item), item._version)
    if not advances(item) or not depth:
        return id(item)
    if isinstance(item, types.GeneratorType):
        where = item.gi_frame.f_lasti if item.gi_frame is not None else None
        return [where, *(mark_of(x, depth - 1) for x in gc.get_referents(item))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [type(item), mark_of(item.__reduce_ex__(4)[1:], depth - 1)]
    except Exception:
        return item.qsize() if hasattr(item, "qsize") else id(item)


def has_own_class(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that neither torch nor torch.export knows."""
    kind = type(tensor)
    return kind.__module__.partition(".")[0] != "torch" and not is_traceable_wrapper_subclass(tensor)


def path_to(wanted: Any, roots: Mapping[str, Any]) -> str:
    """How a model's code names an object that is reached from named objects, and its type: ``self.queues[0] (SimpleQueue)``."""
    pending, seen = deque(roots.items()), set[int]()
    while pending:
        path, item = pending.popleft()
        if item is wanted:
            return f"{path} ({type(wanted).__name__})"
        if id(item) in seen or isinstance(item, types.ModuleType | type):
            continue
        seen.add(id(item))
        pending.extend(_named(path, item))
    return f"an object of the type {type(wanted).__name__}"


def _named(path: str, item: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(item, dict):
        return [(f"{path}[{key!r}]", value) for key, value in item.items()]
    if isinstance(item, tuple | list | deque):
        return [(f"{path}[{n}]", value) for n, value in enumerate(item)]
    attributes = attributes_of(item) or {}
    names = [(f"{path}.{name}", value) for name, value in attributes.items() if name not in _OF_MODULE]
    inner = [attributes.get(name) or {} for name in _OF_MODULE] if isinstance(item, torch.nn.Module) else []
    return names + [(f"{path}.{name}", value) for held in inner for name, value in held.items()]


def drawn_text(changed: Iterable[Any]) -> str | None:
    """The warning about objects that changed, where random generators of Python and NumPy are among them."""
    if not any(isinstance(item, random.Random | np.random.Generator | np.random.RandomState) for item in changed):
        return None
    return (
        "the model's code draws random numbers of Python or NumPy: the numbers drawn during the capture are constants of the "
        "exported model. Draw them with torch.rand or torch.randint, which the exported model does anew at each run."
    )
