"""Samples to verify on: from files of arrays, a function, or an iterable."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnxplug.errors import OnnxplugError, UsageError
from onnxplug.text import type_with_article


@dataclass(frozen=True)
class Sample:
    """The inputs of one call.

    Attributes:
        name: Its name in messages: its file, or ``sample 17``; the first sample is 0.
    """

    name: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def open_data(data: Any, samples: int | None = None, *, batches: bool = False) -> Iterator[Sample]:
    """The samples of data, always the same.

    Args:
        data: ``.npz`` files by a glob, with inputs by their names; ``file.py:function`` or ``module:function``, called without
            arguments; or an iterable, a ``DataLoader`` for example. An item is a tensor, a tuple of positional inputs, a dict
            of keyword inputs, or a :class:`Sample`.
        samples: The number of samples to read at most; ``None`` for all.
        batches: Items are ``(inputs, label)``, as data sets give them: the label is left out.

    Raises:
        UsageError: ``data`` is of no such kind, names no file, or has an item that is no sample.
    """
    import torch

    torch.manual_seed(0)  # a loader that shuffles
    if isinstance(data, str):
        data = load_function(data)() if not data.endswith(".npz") else _files(data)
    if not isinstance(data, Iterable):
        raise UsageError(
            f"data= takes a glob of .npz files, file.py:function or an iterable, got {type_with_article(data)}"
        )
    for index, item in enumerate(itertools.islice(data, samples)):
        yield _sample(item[0] if batches else item, f"sample {index}")


def _files(pattern: str) -> Iterator[Sample]:
    import numpy as np
    import torch

    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise UsageError(f"no file is called {pattern}", hint=f"It is looked for in {Path.cwd()}.")
    for path in paths:
        try:
            with np.load(path) as arrays:
                yield Sample(path, (), {name: torch.from_numpy(arrays[name]) for name in arrays.files})
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(f"{path} can't be read as a file of NumPy's arrays: {error}") from error


def _sample(item: Any, name: str) -> Sample:
    import torch

    if isinstance(item, Sample):
        return item
    if isinstance(item, torch.Tensor):
        return Sample(name, (item,))
    if isinstance(item, Mapping):
        return Sample(name, (), dict(item))
    if isinstance(item, tuple | list):
        return Sample(name, tuple(item))
    raise UsageError(
        f"{name} of the data is {type_with_article(item)}",
        hint="A sample is a tensor, a tuple of positional inputs, or a dict of keyword inputs.",
    )


def module_of(text: str) -> str:
    """The name of the Python module that ``file.py:function`` or ``module:function`` is loaded as."""
    place = text.rpartition(":")[0]
    return f"onnxplug_fleet_{Path(place).stem}" if place.endswith(".py") else place


def load_function(text: str) -> Callable[..., Any]:
    """The function that ``file.py:function`` or ``module:function`` names.

    Raises:
        UsageError: There is no such file or function.
        OnnxplugError: The file or module can't be imported.
    """
    import importlib
    import importlib.util
    import sys

    place, colon, name = text.rpartition(":")
    if not colon:
        raise UsageError(f"{text!r} is no glob of .npz files and no file.py:function")
    try:
        if place.endswith(".py"):
            if not Path(place).is_file():
                raise UsageError(f"there is no file {place}", hint=f"It is looked for in {Path.cwd()}.")
            spec = importlib.util.spec_from_file_location(module_of(text), place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[module.__name__] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except OnnxplugError:
        raise
    except Exception as error:
        raise OnnxplugError(f"{place} can't be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place} has no function {name!r}")
    loaded: Callable[..., Any] = function
    return loaded
