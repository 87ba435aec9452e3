"""Errors that the model's code handles: they have to be the same in PyTorch.

``try: x.numpy() except RuntimeError: …`` takes another way while a model is captured than it takes in PyTorch, without a word. So
does ``try: torch.linalg.cholesky(x) except RuntimeError: …`` for the values that the operator refuses: torch.export traces without
values. So each call of an operator is examined: where code around it may handle an error that the operator may raise
(:mod:`onnxplug.capture.handlers`, :mod:`onnxplug.patches.refusing`), the export warns, and PyTorch must raise the same errors for
the example inputs.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode

from onnxplug.capture.eager import copied, run_eagerly
from onnxplug.capture.handlers import ANY, Errors, handler_over, is_interpreting
from onnxplug.capture.patching import patched
from onnxplug.capture.questions import ends_model, place_of
from onnxplug.errors import CaptureError
from onnxplug.fake import is_fake
from onnxplug.patches.refusing import OF_NUMBERS, errors_of, may_refuse, may_refuse_numbers
from onnxplug.patches.state import state_of
from onnxplug.plugin_api import CaptureRequest
from onnxplug.torch_private import FakeTensorMode, NonStrictFunctions, OpOverload, dynamo_utilities, proxies

#: The lines of the model where calls of torch's functions raised, and the errors.
Raised = list[tuple[str | None, Exception]]


@dataclass
class Handled:
    """A capture's record of errors that the model's code handles.

    Attributes:
        raised: The errors of torch's functions.
        refusing: The warnings about operators that may refuse values, by the lines of the call and of the handler.
        under_handler: Whether any operator is called where its error may be handled.
    """

    raised: Raised = field(default_factory=list)
    refusing: dict[tuple[str, str], str] = field(default_factory=dict)
    under_handler: bool = False

    def look(self, func: Any, errors: Errors, frame: FrameType | None, refuses: Callable[[], bool]) -> None:
        """Records whether the model may handle an operator's errors.

        Args:
            func: The operator.
            errors: The errors that it may raise.
            frame: The caller's frame.
            refuses: Whether it may refuse values of its operands.
        """
        handler = handler_over(frame, errors, ends_model)
        if handler is None:
            return
        self.under_handler = True
        place = place_of(frame) or handler.place
        if refuses() and (place, handler.line) not in self.refusing:
            name = func._schema.name.replace("::", ".") if isinstance(func, OpOverload) else func.__name__
            self.refusing[place, handler.line] = (
                f"the model handles errors of {name} at {place} (the handler: {handler.line}): where PyTorch refuses "
                "values, the model goes the handler's way; the exported model refuses none, and has other results for such inputs"
            )


@contextlib.contextmanager
def handled_errors(request: CaptureRequest) -> Iterator[None]:
    """Records errors that the model's code handles while it holds, and adds the warnings about them to the request's.

    Raises:
        CaptureError: PyTorch raises other errors for the example inputs.
    """
    handled = Handled()
    places: list[tuple[Any, str, Callable[[Handled, Any], Any]]] = [
        (FakeTensorMode, "dispatch", _look_at_dispatch),
        (symbolic_shapes, "expect_true", _look_at_check),
    ]
    if request.strict:  # Dynamo itself refuses to handle most errors
        places.append((dynamo_utilities, "run_node", _look_at_node))
    else:
        places += [
            (NonStrictFunctions, "__torch_function__", _keep_errors),
            (proxies, "proxy_call", _look_at_call),
            (getattr(proxies, "ProxyTorchDispatchMode", None), "__sym_dispatch__", _look_at_number),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, looking in places:
            original = getattr(owner, name, None)
            if original is not None:  # else another torch
                stack.enter_context(patched(owner, name, looking(handled, original)))
        yield
    _check(handled, request)
    request.warnings.extend(handled.refusing.values())


def _keep_errors(handled: Handled, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            handled.raised.append((place_of(sys._getframe(1)), error))
            raise

    return call


def _look_at_call(handled: Handled, original: Any) -> Any:
    def call(mode: Any, func: Any, pre_dispatch: bool, args: Any, kwargs: Any) -> Any:
        handled.look(func, errors_of(func), sys._getframe(1), lambda: may_refuse(func, args, kwargs))
        return original(mode, func, pre_dispatch, args, kwargs)

    return call


def _look_at_dispatch(handled: Handled, original: Any) -> Any:
    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_interpreting():  # the strict mode, or its part that torch.cond and its like use
            handled.look(func, errors_of(func), sys._getframe(1), lambda: may_refuse(func, args, kwargs))
        return original(mode, func, types, args, kwargs)

    return dispatch


def _look_at_number(handled: Handled, original: Any) -> Any:
    def call(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if may_refuse_numbers(func, args):
            handled.look(func, OF_NUMBERS, sys._getframe(1), lambda: True)
        return original(mode, func, types, args, kwargs)

    return call


def _look_at_node(handled: Handled, original: Any) -> Any:
    def run(tracer: Any, node: Any, args: Any, kwargs: Any, module: Any) -> Any:
        is_of_numbers = node.op == "call_function" and not isinstance(node.target, OpOverload)
        if is_of_numbers and may_refuse_numbers(node.target, args):
            handled.look(node.target, OF_NUMBERS, sys._getframe(1), lambda: True)
        return original(tracer, node, args, kwargs, module)

    return run


def _look_at_check(handled: Handled, original: Any) -> Any:
    def expect_true(condition: Any, *args: Any) -> bool:
        if isinstance(condition, torch.SymBool) and free_unbacked_symbols(condition):
            handled.look(torch._check, ANY, sys._getframe(1), lambda: True)
        return bool(original(condition, *args))

    return expect_true


class _Eager(TorchFunctionMode):
    """Records the errors of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: Raised = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **kwargs or {})
        except Exception as error:
            self.errors.append((place_of(sys._getframe(1)), error))
            raise


def _check(handled: Handled, request: CaptureRequest) -> None:
    """Refuses a capture in which the model handles other errors than in PyTorch; a model without numbers can't be run."""
    module = request.module
    if not (handled.raised or handled.under_handler) or any(map(is_fake, (*module.parameters(), *module.buffers()))):
        return
    eager = _Eager()
    state = state_of(request)
    state.restore()
    with state.restored(request.warnings), eager:
        run_eagerly(module, *copied((request.args, dict(request.kwargs or {}))))
    left = list(eager.errors)
    places = [place for place, _ in left]
    for place, error in handled.raised:
        if place not in places:
            raise CaptureError(
                f"the model handles an error at {place} that PyTorch does not raise there, but torch.export does: {error}",
                hint="Do without the call, or export the model without the `try`.",
            ) from error
        del left[places.index(place)]
        places.remove(place)
    if left and handled.under_handler:
        place, error = left[0]
        raise CaptureError(
            f"the model handles an error at {place} that PyTorch raises for the example inputs, and torch.export does not: {error}",
            hint="Give example inputs for which it is not raised, or export the model without the `try`.",
        ) from error
