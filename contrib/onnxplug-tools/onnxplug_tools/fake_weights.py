"""``onnxplug.fake_weights()``: modules whose weights come later."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.fake import is_fake

_Moved = dict[int, tuple[weakref.ref[Any], torch.nn.Parameter]]


class _OfThread(threading.local):
    """What a thread has moved: the id of each parameter to that and the one on ``meta``; ``None`` outside of a context."""

    moved: _Moved | None = None


_own = _OfThread()
_lock = threading.Lock()
#: The contexts that are open, of all threads, and what undoes the change of ``torch.nn.Module`` as the last of them ends.
_open: list[object] = []
_changed = contextlib.ExitStack()


@contextlib.contextmanager
def fake_weights() -> Iterator[None]:
    """While the context lasts, new modules get parameters on the device ``meta``, and real buffers.

    A parameter is moved as soon as a module has it, so that at most one is in memory, and initialising it costs
    nothing. Buffers that a module computes have their numbers, unlike under ``torch.device("meta")``: no checkpoint
    has the numbers of buffers that are not persistent. Modules of other threads are left alone.

        with onnxplug.fake_weights():
            model = Model(config)
    """
    before, me = _own.moved, object()
    with _lock:
        if not _open:
            register = torch.nn.Module.register_parameter
            _changed.enter_context(patched(torch.nn.Module, "register_parameter", _moving(register)))
        _open.append(me)
    _own.moved = {} if before is None else before
    try:
        yield
    finally:
        _own.moved = before
        with _lock:
            _open.remove(me)
            if not _open:
                _changed.close()


def _moving(register: Callable[..., None]) -> Callable[..., None]:
    """``register_parameter``, which then moves the parameter in threads that are in a context."""

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        moved = _own.moved
        if param is None or moved is None:
            return
        if is_fake(param) or torch.nn.parameter.is_lazy(param):
            return
        known = moved.get(id(param))
        if known is None or known[0]() is not param:  # a parameter of two modules stays one parameter
            on_meta = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            vars(on_meta).update(vars(param))
            known = moved[id(param)] = (weakref.ref(param), on_meta)
        self._parameters[name] = known[1]

    return register_parameter
