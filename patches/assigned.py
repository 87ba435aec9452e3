"""Buffers that the model's code assigns: ``self.mean = 0.9 * self.mean + x.mean(0)`` is a write to the buffer.

torch.export records it in the outermost module alone, as a copy at the end of the graph, behind other copies; in every other module
the new value would be lost. Here it is written at the end of the call::

    new = clone(add(mul(mean, 0.9), mean_of_x))
    copy_(mean, new)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from onnxplug.capture.patching import patched
from onnxplug.fake import is_fake
from onnxplug.plugin_api import CaptureRequest
from onnxplug.torch_private import export_trace, pytree

#: torch.export's function that records assignments to the outermost module's buffers.
_HOOK = "register_buffer_assignment_hook"


class _NoHook:
    """The handle of a hook that was not set."""

    def remove(self) -> None:
        """Removes nothing."""


@contextlib.contextmanager
def assigned_buffers_written(request: CaptureRequest) -> Iterator[None]:
    """While it holds, a tensor that the model's code assigns to a buffer is written into the buffer when the call ends."""
    root = request.module
    modules = root.named_modules() if isinstance(root, torch.nn.Module) else ()
    places = [
        (f"{path}.{name}".lstrip("."), module, name)
        for path, module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    if not places or type(root).__call__ is not torch.nn.Module.__call__:  # which calls the hooks
        yield
        return
    before: list[torch.Tensor] = []
    is_traced, write = (_always, torch.Tensor.copy_) if request.strict else (is_fake, _write)

    def begin(*_: Any) -> None:
        before.clear()
        before.extend([module._buffers[name] for _, module, name in places])

    def end(_: Any, __: Any, result: Any) -> Any:
        assigned = []
        for (path, module, name), buffer in zip(places, before, strict=True):
            new = module._buffers.get(name)
            if new is buffer or not is_traced(buffer):
                continue
            module._buffers[name] = buffer
            if isinstance(new, torch.Tensor) and new.dtype == buffer.dtype:
                assigned.append((buffer, new.clone()))  # before any write: it may be another buffer
            else:
                request.warnings.append(
                    f"the exported model leaves away what the model's code assigns to the buffer {path!r}: it has another dtype "
                    "than the buffer."
                )
        if not assigned:
            return result
        result = pytree.tree_map(_copied, result)
        for buffer, new in assigned:
            write(buffer, new)
        return result

    handles = root.register_forward_pre_hook(begin, prepend=True), root.register_forward_hook(end)
    has_own = hasattr(export_trace, _HOOK)
    try:
        with patched(export_trace, _HOOK, lambda *_: _NoHook()) if has_own else contextlib.nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _always(_: Any) -> bool:
    return True


def _copied(value: Any) -> Any:
    """A result that no write to a buffer changes."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _write(buffer: torch.Tensor, new: torch.Tensor) -> None:
    """Writes a new value of the same dtype; of another shape, it becomes the buffer's memory. No guard on sizes is made."""
    if list(map(str, buffer.shape)) == list(map(str, new.shape)):
        buffer.copy_(new)
    else:
        buffer.set_(new)  # type: ignore[call-overload]
