"""Tensors that the model's code assigns: ``self.mean = 0.9 * self.mean + x.mean(0)``.

If ``mean`` is a buffer, this is a write to it. torch.export records it in the outermost module alone, as a copy at the end of the
graph, behind other copies; in every other module the new value would be lost. Here it is written at the end of the call::

    new = clone(add(mul(mean, 0.9), mean_of_x))
    copy_(mean, new)

If it is no buffer, its new value is lost, which a warning says where results depend on the old one
(:mod:`onnxplug.capture.replaced`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from onnxplug.capture.patching import patched
from onnxplug.capture.places import Place, plain_tensors
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
def assigned_tensors_noted(request: CaptureRequest) -> Iterator[None]:
    """While it holds, a tensor that the model's code assigns to a buffer is written into the buffer when the call ends.

    ``request.shared["replaced"]`` receives other tensors of modules that were replaced, with their names.
    """
    root = request.module
    is_module = isinstance(root, torch.nn.Module)
    buffers, others = (list(_buffers(root)), list(_others(root, request.strict))) if is_module else ([], [])
    replaced = request.shared["replaced"] = dict[str, torch.Tensor]()
    if not (buffers or others) or type(root).__call__ is not torch.nn.Module.__call__:  # which calls the hooks
        yield
        return
    places, count = [*buffers, *(place for place, _ in others)], len(buffers)
    before: list[Any] = []
    calls: list[None] = []  # of the outermost module, which may call itself
    strict = request.strict

    @torch._dynamo.assume_constant_result
    def leave_away(number: int) -> None:
        """Notes a tensor whose new value is lost. Dynamo runs it while it traces."""
        if number >= count:
            replaced[str(places[number])] = others[number - count][1]
            return
        request.warnings.append(
            f"the exported model leaves away what the model's code assigns to the buffer {str(places[number])!r}: it is no tensor "
            "of the buffer's dtype" + (" and shape." if strict else ".")
        )

    def begin(module: Any, _: Any) -> None:
        calls.append(None)
        if len(calls) == 1:
            before.clear()
            before.extend([place.read(module) for place in places])

    def end(module: Any, _: Any, result: Any) -> Any:
        calls.pop()
        if calls:
            return result
        assigned = []
        for number, place in enumerate(places):
            old, new = before[number], place.read(module)
            if new is old or (number < count and not strict and not is_fake(old)):
                continue
            if number >= count:
                leave_away(number)
                continue
            place.owner(module)._buffers[place.keys[0]] = old
            if _can_be_written(old, new, strict):
                assigned.append((old, new.clone()))  # before any write: it may be another buffer
            else:
                leave_away(number)
        if not assigned:
            return result
        result = pytree.tree_map(_copied, result)
        for old, new in assigned:
            _write(old, new, strict)
        return result

    handles = root.register_forward_pre_hook(begin, prepend=True), root.register_forward_hook(end)
    has_own = hasattr(export_trace, _HOOK)
    try:
        with patched(export_trace, _HOOK, lambda *_: _NoHook()) if has_own else contextlib.nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _buffers(root: torch.nn.Module) -> Iterator[Place]:
    for path, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield Place.of(path, name)


def _others(root: torch.nn.Module, strict: bool) -> Iterator[tuple[Place, torch.Tensor]]:
    yield from plain_tensors(root)
    for path, parameter in root.named_parameters() if not strict else ():  # Dynamo replaces none
        module, _, name = path.rpartition(".")
        yield Place.of(module, name), parameter


def _can_be_written(buffer: torch.Tensor, new: Any, strict: bool) -> bool:
    """Whether a buffer can have a new value; Dynamo gives it no other shape."""
    if not isinstance(new, torch.Tensor) or new.dtype != buffer.dtype:
        return False
    if not strict:
        return True
    sizes = zip(new.shape, buffer.shape, strict=False)
    return new.dim() == buffer.dim() and all(statically_known_true(size == wanted) for size, wanted in sizes)


def _copied(value: Any) -> Any:
    """A result that no write to a buffer changes."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _write(buffer: torch.Tensor, new: torch.Tensor, strict: bool) -> None:
    """Writes a new value of the same dtype; of another shape, it becomes the buffer's memory. No guard on sizes is made."""
    if strict or list(map(str, buffer.shape)) == list(map(str, new.shape)):
        buffer.copy_(new)
    else:
        buffer.set_(new)  # type: ignore[call-overload]
