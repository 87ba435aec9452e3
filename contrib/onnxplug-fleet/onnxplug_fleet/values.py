"""Texts of values: equal in every process where the values are equal, and different where the values are not."""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

#: The depth to which the contents of an attribute are read.
_DEEPEST = 6
#: The length from which a text is a digest.
_LONG = 200
#: Modules whose objects differ between processes; they change no result.
_OPAQUE = ("torch.fx", "torch._", "torch.utils", "logging", "threading", "weakref")


def hashed(*content: Any) -> str:
    """A digest of bytes."""
    made = hashlib.blake2b(digest_size=12)
    for piece in content:
        made.update(piece)
    return made.hexdigest()


def value_text(value: Any) -> str:
    """Dtype, shape and a digest of a tensor; a number or a text as Python writes it."""
    import torch

    if not isinstance(value, torch.Tensor):
        return (
            repr(value)
            if isinstance(value, str | int | float | complex | bool | type(None))
            else type(value).__qualname__
        )
    about = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if value.device.type == "meta" or type(value).__name__ == "FakeTensor":
        return about
    plain = value.detach().cpu()
    if type(plain) is torch.Tensor and plain.layout is torch.strided and not plain.is_quantized:
        plain = plain.resolve_conj().resolve_neg()
        content = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
        return f"{about} {hashed(repr(plain.stride()).encode(), content)}"
    file = io.BytesIO()
    torch.save(plain, file)  # sparse, quantised, a subclass with tensors within
    return f"{about} {hashed(file.getvalue())}"


class Contents:
    """Digests of the values that modules and files of code hold.

    An object counts by its attributes, a function by the values that it is bound to; the code of both is in files. An object
    that was met before counts by its number.

    Args:
        is_own: Whether a class is of an own file; private attributes of objects of other classes don't count.
        without: Objects that don't count.
    """

    def __init__(self, is_own: Callable[[type], bool], without: Iterable[Any] = ()) -> None:
        self._is_own = is_own
        #: By id, the objects themselves, so that no id is used again, and their numbers.
        self._met = {id(value): (value, f"object {number} of the model") for number, value in enumerate(without)}
        self._digests = self._objects = 0
        #: The number of the set whose items are read, which have no order: it is that of all objects met there.
        self._set: str | None = None

    def of_module(self, module: Any) -> str:
        """A digest of a module's attributes, without its weights and submodules."""
        return self._digest({name: value for name, value in vars(module).items() if name not in _fields_of_modules()})

    def of_value(self, value: Any) -> str:
        """A text of an input: a number or a text as Python writes it, of anything else a digest."""
        if isinstance(value, list | tuple | dict):
            return self._digest({"": value})
        text = str(self._text(value, 0))
        return text if len(text) < _LONG else hashed(text.encode())

    def of_function(self, function: Any) -> str:
        """A digest of the values that a function or another callable is bound to."""
        return hashed(str(self._text(function, 0)).encode())

    def of_globals(self, module: types.ModuleType) -> str:
        """A digest of the numbers, tensors, containers, modules and objects of own classes that a code file names."""
        import torch

        fields = {}
        for name, value in vars(module).items():
            if name.startswith("__") or isinstance(value, types.FunctionType | types.ModuleType):
                continue
            if isinstance(value, type):
                plain = {k: v for k, v in vars(value).items() if _is_plain(v) and not k.startswith("__")}
                if value.__module__ == module.__name__ and plain:
                    fields[name] = plain
            elif (
                _is_plain(value)
                or isinstance(value, list | tuple | dict | set | torch.nn.Module)
                or self._is_own(type(value))
            ):
                fields[name] = value
        return self._digest(fields)

    def _digest(self, fields: Mapping[str, Any]) -> str:
        self._digests, self._objects = self._digests + 1, 0
        texts = sorted((name, str(self._text(value, 0))) for name, value in fields.items())
        return hashed(repr(texts).encode())

    def _text(self, value: Any, depth: int) -> str | None:
        """A text of a value; ``None`` for Python modules, and where the value lies too deep."""
        import numpy as np
        import torch

        if isinstance(value, torch.Tensor):
            return self._number(value) or value_text(value)
        if isinstance(value, str | int | float | complex | bool | type(None)):
            return value_text(value)
        if isinstance(value, bytes | range | torch.dtype | torch.device | np.generic):
            return repr(value)
        if isinstance(value, types.ModuleType) or depth > _DEEPEST:
            return None
        if isinstance(value, type):
            return value.__qualname__
        return self._number(value) or self._text_of_parts(value, depth + 1)

    def _number(self, value: Any) -> str | None:
        """The number of an object that was met before; ``None`` for a new object, which gets its number."""
        if (known := self._met.get(id(value))) is not None:
            return known[1]
        self._objects += 1
        self._met[id(value)] = value, self._set or f"object {self._digests}.{self._objects}"
        return None

    def _text_of_parts(self, value: Any, depth: int) -> str:
        import numpy as np
        import torch

        if isinstance(value, torch.nn.Module):
            return self._text_of_module(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return f"{value.dtype}{list(value.shape)} {hashed(np.ascontiguousarray(value).tobytes())}"
        if isinstance(value, list | tuple):
            return repr([self._text(item, depth) for item in value])
        if isinstance(value, set | frozenset):
            outer, self._set = self._set, self._met[id(value)][1]
            texts = sorted(str(self._text(item, depth)) for item in value)
            self._set = outer
            return repr(texts)
        if isinstance(value, dict):
            return repr([(self._text(key, depth), self._text(item, depth)) for key, item in value.items()])
        if isinstance(value, functools.partial):
            bound: Any = [value.func, value.args, value.keywords]
        elif isinstance(value, types.MethodType):
            bound = [value.__func__, value.__self__]
        elif isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            bound = [value.__qualname__, cells, value.__defaults__, value.__kwdefaults__]
        else:
            return self._text_of_object(value, depth)
        return repr([self._text(item, depth) for item in bound])

    def _text_of_module(self, module: Any) -> str:
        weights = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
        texts = [(name, value_text(tensor)) for name, tensor in weights]
        return repr([*texts, *((type(part).__qualname__, self.of_module(part)) for part in module.modules())])

    def _text_of_object(self, value: Any, depth: int) -> str:
        kind = type(value)
        if isinstance(value, logging.Logger) or kind.__module__.startswith(_OPAQUE):
            return kind.__qualname__
        slots = {slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ()) if not slot.startswith("__")}
        fields = {slot: getattr(value, slot) for slot in sorted(slots) if hasattr(value, slot)}
        fields |= getattr(value, "__dict__", {})
        if not self._is_own(kind):
            fields = {name: item for name, item in fields.items() if not name.startswith("_")}
        return f"{kind.__qualname__} {[(name, self._text(item, depth)) for name, item in sorted(fields.items())]}"


@functools.cache
def _fields_of_modules() -> frozenset[str]:
    """The attributes that every module has, except its mode."""
    import torch

    return frozenset(vars(torch.nn.Module())) - {"training"}


def _is_plain(value: Any) -> bool:
    import numpy as np
    import torch

    return isinstance(value, str | int | float | complex | bytes | torch.Tensor | np.ndarray | np.generic)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a name that has no value yet
        return False
