"""``module.to(...)`` in a ``forward`` while torch.export traces it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from onnxplug.capture.patching import patched


@contextlib.contextmanager
def conversions_that_change_nothing() -> Iterator[None]:
    """While it holds, a conversion of a module that leaves all its tensors as they are does nothing.

    torch.export gives the parameters fake tensors. ``nn.Module.to`` swaps these even for themselves: it counts as a write to the
    parameter, and is an error where the tensor has other references.
    """
    apply = nn.Module._apply

    def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        tensors = itertools.chain(self.parameters(), self.buffers())
        return self if all(fn(tensor) is tensor for tensor in tensors) else apply(self, fn, *args, **kwargs)

    with patched(nn.Module, "_apply", _apply):
        yield
