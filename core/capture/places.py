"""A model's tensors by their places: attributes of modules, and lists and dicts there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch


class Place(NamedTuple):
    """Where a module of a model has a tensor, by names: Dynamo names a constant by the way on which it was first read.

    Attributes:
        module: The names of the modules on the way to the module.
        keys: The tensor's name in the module; of a tensor in a list, tuple or dict there also its key.
    """

    module: tuple[str, ...]
    keys: tuple[Any, ...]

    @classmethod
    def of(cls, path: str, *keys: Any) -> Place:
        """The place in the module of a path."""
        return cls(tuple(filter(None, path.split("."))), keys)

    def __str__(self) -> str:
        return ".".join((*self.module, self.keys[0])) + "".join(f"[{key!r}]" for key in self.keys[1:])

    def owner(self, model: Any) -> Any:
        """The module."""
        for name in self.module:
            model = getattr(model, name)
        return model

    def read(self, model: Any) -> Any:
        """The object at the place; ``None`` where there is none."""
        item = getattr(self.owner(model), self.keys[0], None)
        for key in self.keys[1:]:
            if isinstance(item, dict):
                item = item.get(key)
            else:
                item = (
                    item[key] if isinstance(item, list | tuple) and isinstance(key, int) and key < len(item) else None
                )
        return item


def plain_tensors(model: torch.nn.Module) -> Iterator[tuple[Place, torch.Tensor]]:
    """The tensors in attributes of a model's modules that are neither parameters nor buffers."""
    seen = set[int]()
    for path, module in model.named_modules():
        for keys, tensor in _tensors_in(vars(module), seen):
            yield Place.of(path, *keys), tensor


def _tensors_in(items: Any, seen: set[int]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """The tensors in a list, tuple or dict, with their keys; a list that was seen, which may contain itself, has none."""
    for key, value in items.items() if isinstance(items, dict) else enumerate(items):
        if type(value) is torch.Tensor:
            yield (key,), value
        elif type(value) in (list, tuple, dict) and id(value) not in seen:
            seen.add(id(value))
            for keys, tensor in _tensors_in(value, seen) if key not in ("_parameters", "_buffers", "_modules") else ():
                yield (key, *keys), tensor
