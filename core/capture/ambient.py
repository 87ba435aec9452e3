"""A model under the autocast of its caller: torch.export records the operators in such a region, and none of the casts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def autocast_inside(model: Any) -> Iterator[Any]:
    """The model with its caller's ``torch.autocast`` within its ``forward``, as if it had been written there.

    While the context lasts no autocast is on around the model. Scripts and captured programs stay as they are.

    Args:
        model: The model; the result has its parameters, buffers and submodules.
    """
    dtypes = {device: torch.get_autocast_dtype(device) for device in _DEVICES if torch.is_autocast_enabled(device)}
    if not dtypes or not isinstance(model, torch.nn.Module) or isinstance(model, torch.jit.ScriptModule):
        yield model
        return
    with contextlib.ExitStack() as stack:
        for device in dtypes:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield _with_autocast(model, dtypes)


def _with_autocast(model: torch.nn.Module, dtypes: dict[str, torch.dtype]) -> torch.nn.Module:
    """The model as an instance of a class derived from its own, whose ``forward`` is under autocast."""
    own, attributes = type(model), dict(vars(model))
    of_instance = attributes.pop("forward", None)

    @functools.wraps(own.forward)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for device, dtype in dtypes.items():
                stack.enter_context(torch.autocast(device, dtype=dtype))
            return own.forward(self, *args, **kwargs) if of_instance is None else of_instance(*args, **kwargs)

    namespace = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__}
    under: torch.nn.Module = object.__new__(type(own.__name__, (own,), namespace))
    vars(under).update(attributes)
    return under
