"""Finds the submodule that can't be captured by capturing submodules with their inputs, and names it in the error."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from onnxplug.capture.capture import capture
from onnxplug.capture.eager import copied, run_eagerly
from onnxplug.errors import CaptureError
from onnxplug.observers import Observer, Span
from onnxplug.patches.unchanged import unchanged
from onnxplug.torch_private import pytree

#: How many submodules are captured before the search is given up.
LIMIT = 40
#: The beginning of the error of a capture without a place.
_NO_PLACE = "torch.export can't capture the model:"
#: How many are captured to find the submodule that an error is about.
_OF_ERROR = 12


class FaultySubmodule(Observer):
    """Adds to the error of a failed capture that names no place the smallest submodule that fails, and its line."""

    stays = False

    def end(self, span: Span) -> None:
        """Looks at a capture that failed."""
        error, plan = span.error, span.subject
        if span.name != "capture" or span.kind != "stage" or not isinstance(error, CaptureError):
            return
        if not error.message.startswith(_NO_PLACE) or not isinstance(plan.model, torch.nn.Module):
            return
        patches = plan.host.patches()

        def fails(call: Call) -> Exception | None:
            try:
                capture(call.module, call.args, call.kwargs, strict=False, patches=patches)
            except Exception as failure:
                return failure
            return None

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # In a context without observers: they see the user's export alone.
            search = contextvars.Context().run
            try:
                pieces = search(capture_pieces, plan.model, plan.args, plan.kwargs or {}, fails, _OF_ERROR)
            except Exception:  # the model doesn't run on its inputs; torch's error tells as much
                return
        for piece in pieces:
            if piece.is_cause:
                error.submodule, error.place = piece.path, getattr(piece.error, "place", None)
                where = f" in {piece.path} ({piece.class_name})" + (f" at {error.place}" if error.place else "")
                error.message = error.message.replace(_NO_PLACE, f"{_NO_PLACE[:-1]}{where}:", 1)
                return


class Call(NamedTuple):
    """The first call of a submodule.

    Attributes:
        module: The submodule.
        args, kwargs: Copies of its inputs.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def key(self) -> Any:
        """Equal for submodules of the same class, printed form and flags, and inputs of the same types and sizes.

        Flags are plain attributes but ints: layers have their place as one.
        """
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        described = tuple(
            (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
        )
        flags = tuple(
            (path, name, repr(value))
            for path, module in self.module.named_modules()
            for name, value in vars(module).items()
            if value is None or isinstance(value, bool | float | str)
        )
        return type(self.module), repr(self.module), flags, described, str(spec)


class Piece(NamedTuple):
    """The outcome of capturing a submodule by itself.

    Attributes:
        path: Its name in the model (``"encoder.layers.0"``), empty for the model itself.
        class_name: Its class.
        error: Why it can't be captured; ``None`` where it can.
        like: The path of an equal submodule with equal inputs, whose capture was used instead.
        is_cause: Whether it fails and no submodule within it does.
    """

    path: str
    class_name: str
    error: Exception | None
    like: str | None = None
    is_cause: bool = False


def first_calls(
    model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], submodules: Mapping[str, torch.nn.Module]
) -> dict[str, Call]:
    """Runs a model eagerly and returns the first calls of submodules. Its state stays as it was.

    Args:
        model: The model.
        args, kwargs: Its inputs; they stay as they were.
        submodules: The submodules by their paths.

    Raises:
        Exception: Whatever the model raises.
    """
    calls: dict[str, Call] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(module: torch.nn.Module, inputs: Any, keywords: Any) -> None:
            if path not in calls:
                positional, named = copied((tuple(inputs), dict(keywords)))
                calls[path] = Call(module, positional, named)

        return record

    with unchanged(model, alone=True), ExitStack() as stack:
        for path, module in submodules.items():
            handle = module.register_forward_pre_hook(recorder(path), with_kwargs=True)
            stack.callback(handle.remove)
        run_eagerly(model, *copied((tuple(args), dict(kwargs))))
    return calls


def capture_pieces(
    model: torch.nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    fails: Callable[[Call], Exception | None],
    limit: int = LIMIT,
) -> list[Piece]:
    """Captures the submodules of a model that can't be captured, and in turn the submodules of those that fail.

    Args:
        model: The model.
        args, kwargs: Its inputs.
        fails: Captures a submodule with its inputs, and returns the error if that fails.
        limit: How many submodules are captured at most.

    Returns:
        The submodules in the order of their captures, without the model itself.

    Raises:
        Exception: The model does not run on its inputs.
    """
    search = _Search(fails, limit)
    search.within(model, "", args, kwargs)
    return search.pieces


class _Search:
    def __init__(self, fails: Callable[[Call], Exception | None], limit: int) -> None:
        self.pieces: list[Piece] = []
        self._fails = fails
        self._left = limit
        self._known: dict[Any, tuple[str, Exception | None]] = {}

    def within(self, model: torch.nn.Module, path: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Captures the submodules of a module; returns whether any of them can't be captured."""
        has_failed = False
        for name, call in first_calls(model, args, kwargs, dict(_children(model))).items():
            has_failed = self._look(f"{path}.{name}" if path else name, call) or has_failed
        return has_failed

    def _look(self, path: str, call: Call) -> bool:
        key = call.key()
        class_name = type(call.module).__name__
        if key in self._known:
            like, error = self._known[key]
            self.pieces.append(Piece(path, class_name, error, like))
            return error is not None
        if not self._left:
            return False
        self._left -= 1
        error = self._fails(call)
        self._known[key] = path, error
        position = len(self.pieces)
        self.pieces.append(Piece(path, class_name, error))
        if error is not None:
            inner = self.within(call.module, path, call.args, call.kwargs)
            self.pieces[position] = Piece(path, class_name, error, is_cause=not inner)
        return error is not None


def _children(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The submodules that a module can call: its children, and the members of lists and dicts of modules."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
