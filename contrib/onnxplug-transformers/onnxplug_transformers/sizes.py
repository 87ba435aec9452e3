"""transformers' own conversions of sizes to plain numbers while a model is captured: a dynamic size stays one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from onnxplug_transformers.exchanged import exchanged


def torch_int(x: Any) -> Any:
    """The size itself; a quotient or product of sizes is cut as int() does it. transformers' own makes a constant of it."""
    return x if isinstance(x, torch.SymInt) else torch.sym_int(x)


def torch_float(x: Any) -> Any:
    """The size as a float, which transformers' own makes a constant of."""
    return torch.sym_float(x)


def _is_plain(x: Any) -> bool:
    return not isinstance(x, torch.SymInt | torch.SymFloat)


@contextlib.contextmanager
def dynamic_sizes() -> Iterator[None]:
    """Holds while a model is captured."""
    with exchanged({"torch_int": (torch_int, _is_plain), "torch_float": (torch_float, _is_plain)}):
        yield
