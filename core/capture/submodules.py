"""Finds the submodule that can't be captured: by the error's traceback, or by capturing submodules with their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from onnxplug.capture.eager import copied, run_eagerly
from onnxplug.torch_private import pytree

#: How many submodules are captured before the search is given up.
LIMIT = 40


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
        """Equal for submodules of the same class, the same printed form and inputs of the same types and sizes."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        described = tuple(
            (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
        )
        return type(self.module), repr(self.module), described, str(spec)


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


def path_of(model: torch.nn.Module, submodule: torch.nn.Module) -> str | None:
    """The name of a submodule in a model; empty for the model itself, ``None`` for a stranger."""
    return next((name for name, module in model.named_modules() if module is submodule), None)


def module_of_error(model: torch.nn.Module, error: BaseException) -> torch.nn.Module | None:
    """The innermost submodule in whose code an error was raised; ``None`` where the traceback has none of the model's."""
    # torch's tracer calls stand-ins of modules, which share their attributes.
    own = {id(vars(module)): module for module in model.modules()}
    current: BaseException | None = error
    while current is not None:
        innermost = None
        step = current.__traceback__
        while step is not None:
            candidate = step.tb_frame.f_locals.get("self")
            if isinstance(candidate, torch.nn.Module):
                innermost = own.get(id(vars(candidate)), innermost)
            step = step.tb_next
        if innermost is not None:
            return innermost
        current = current.__cause__ or current.__context__
    return None


def first_calls(
    model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], submodules: Mapping[str, torch.nn.Module]
) -> dict[str, Call]:
    """Runs a model eagerly and returns the first calls of submodules. Its buffers stay as they were.

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

    with ExitStack() as stack:
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
