"""``onnxplug.fake_weights()``: modules whose weights come later."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from onnxplug.fake import is_fake


@contextlib.contextmanager
def fake_weights() -> Iterator[None]:
    """While the context lasts, new modules get parameters on the device ``meta``, and real buffers.

    A parameter is moved as soon as a module has it, so that at most one is in memory, and initialising it costs
    nothing. Buffers that a module computes have their numbers, unlike under ``torch.device("meta")``: no checkpoint
    has the numbers of buffers that are not persistent. Modules of other threads are left alone.

        with onnxplug.fake_weights():
            model = Model(config)
    """
    register, thread = torch.nn.Module.register_parameter, threading.get_ident()
    moved: dict[int, tuple[weakref.ref[Any], torch.nn.Parameter]] = {}

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or threading.get_ident() != thread:
            return
        if is_fake(param) or torch.nn.parameter.is_lazy(param):
            return
        known = moved.get(id(param))
        if known is None or known[0]() is not param:  # a parameter of two modules stays one parameter
            on_meta = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(on_meta).update(vars(param))
            known = moved[id(param)] = (weakref.ref(param), on_meta)
        self._parameters[name] = known[1]

    torch.nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
