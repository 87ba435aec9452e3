"""``torch.autograd.Function`` with a ``symbolic`` static method: kept whole during capture, translated by ``symbolic``.

torch.export traces into ``forward``. While a class is kept, its ``forward`` calls an operator of its own instead, whose
kernel and fake kernel run the original ``forward``; the rule for that operator runs ``symbolic``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from onnxplug import torch_private
from onnxplug.capture.locations import runs_models
from onnxplug.errors import UsageError
from onnxplug.registry.rule import Rule
from onnxplug.torch_private import pytree
from onnxplug_torchscript.symbolic import run_symbolic

NAMESPACE = "onnxplug_autograd"
_SCHEMA = "(Tensor[] tensors, SymInt[] sizes, int call) -> Tensor[]"
_LOCK = threading.RLock()
_OPERATORS: dict[type, _Operator] = {}
_LIBRARY: list[torch.library.Library] = []
_KEPT = threading.local()


class AutogradRule(Rule):
    """A rule that also needs its ``autograd.Function`` kept whole during capture."""

    __slots__ = ("function",)

    def __init__(self, function: type, op: str, convert: Any) -> None:
        super().__init__(op, convert)
        self.function = function

    def patches(self) -> Sequence[Callable[[], contextlib.AbstractContextManager[None]]]:
        """The context manager that keeps the function as one operator."""
        return (functools.partial(keep_autograd_functions, self.function),)


def autograd_function(function: type, *, domains: Mapping[str, int] | None = None) -> Rule:
    """A rule that translates an ``autograd.Function`` by its ``symbolic(g, *args)``.

    Given to ``to_onnx(rules=[...])``, or returned by a plugin's ``onnxplug_rules``, it also keeps the function from being
    inlined.

    Args:
        function: The class.
        domains: Versions of the custom domains that its ``symbolic`` emits.

    Raises:
        UsageError: ``function`` is not an ``autograd.Function``, or has no ``symbolic``.
    """
    operator = _operator(function)
    versions = dict(domains or {})

    def convert(g: Any, node: Any) -> Any:
        tensors, sizes, call = node.args
        arguments = operator.calls[call].arguments(tensors, sizes)
        results = run_symbolic(g, function.symbolic, arguments, versions, python_scalars=True)  # type: ignore[attr-defined]
        several = results if isinstance(results, list | tuple) else [results]
        return [r for r in several if r is not None]

    convert.__module__ = function.__module__
    convert.__qualname__ = f"{function.__qualname__}.symbolic"
    return AutogradRule(function, f"{NAMESPACE}::{operator.name}", convert)


@contextlib.contextmanager
def keep_autograd_functions(*functions: type) -> Iterator[None]:
    """While it holds, ``apply`` of these functions is one operator, in this thread.

    Raises:
        UsageError: A function is not an ``autograd.Function``, or has no ``symbolic``.
    """
    runs_models(__file__)
    operators = {function: _operator(function) for function in functions}
    before: dict[type, _Operator] = getattr(_KEPT, "operators", {})
    for function in operators:
        _hold(function)
    _KEPT.operators = {**before, **operators}
    try:
        yield
    finally:
        _KEPT.operators = before
        for function in operators:
            _release(function)


class _Forward:
    """``forward`` of a kept function: its operator, in the threads that keep it; elsewhere the original ``forward``.

    A patch of ``apply`` is not enough: code may hold an earlier bound ``apply``, which still calls ``forward``.
    """

    def __init__(self, function: type) -> None:
        self.function = function
        self.inherited = "forward" not in vars(function)
        self.original = inspect.getattr_static(function, "forward")
        self.holders = 0

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        original: Callable[..., Any] = self.original.__get__(instance, owner)
        operator: _Operator | None = getattr(_KEPT, "operators", {}).get(owner)
        if operator is None or owner is not self.function:
            return original

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not operator.separate:
                args = args[1:]  # ctx
            elif kwargs:
                args = inspect.signature(original).bind(*args, **kwargs).args
            return operator(args)

        return forward


def _hold(function: type) -> None:
    with _LOCK:
        forward = vars(function).get("forward")
        if not isinstance(forward, _Forward):
            forward = _Forward(function)
            function.forward = forward  # type: ignore[attr-defined]
        forward.holders += 1


def _release(function: type) -> None:
    with _LOCK:
        forward: _Forward = vars(function)["forward"]
        forward.holders -= 1
        if not forward.holders and forward.inherited:
            del function.forward  # type: ignore[attr-defined]
        elif not forward.holders:
            function.forward = forward.original  # type: ignore[attr-defined]


def _original_forward(function: type) -> Callable[..., Any]:
    method = inspect.getattr_static(function, "forward")
    while isinstance(method, _Forward):
        method = method.original
    forward: Callable[..., Any] = method.__get__(None, function)
    return forward


def _operator(function: Any) -> _Operator:
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise UsageError(f"compat.autograd_function takes a subclass of torch.autograd.Function, got {function!r}")
    if not callable(getattr(function, "symbolic", None)):
        raise UsageError(f"{function.__qualname__} has no static method symbolic(g, *args)")
    with _LOCK:
        operator_ = _OPERATORS.get(function)
        if operator_ is None:
            operator_ = _OPERATORS[function] = _Operator(function)
        return operator_


class _Tensor:
    """The place of a tensor or a dynamic number among a call's arguments."""

    __slots__ = ("kind", "position")

    def __init__(self, kind: str, position: int) -> None:
        self.kind = kind
        self.position = position


class _Call:
    """One form of a function's call: all arguments but tensors and dynamic sizes.

    Attributes:
        results: The results of ``forward``, with tensors by position; known after ``forward`` ran.
    """

    def __init__(self, leaves: Sequence[Any], spec: Any) -> None:
        self._leaves = list(leaves)
        self._spec = spec
        self.results: tuple[list[Any], Any] | None = None

    def arguments(self, tensors: Sequence[Any], sizes: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments of the call, with given tensors and dynamic sizes."""
        places = {"tensor": tensors, "size": sizes}
        leaves = [places[x.kind][x.position] if isinstance(x, _Tensor) else x for x in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)

    def keep(self, results: Any) -> list[torch.Tensor]:
        """Remembers the structure of the results of ``forward``; returns their tensors."""
        leaves, spec = pytree.tree_flatten(results)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        order = iter(range(len(tensors)))
        self.results = ([_Tensor("result", next(order)) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
        return tensors

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The results of ``forward``, with given tensors."""
        assert self.results is not None
        leaves, spec = self.results
        return pytree.tree_unflatten([tensors[x.position] if isinstance(x, _Tensor) else x for x in leaves], spec)


class _Operator:
    """The operator that stands for a function.

    Attributes:
        name: Its name in the namespace ``onnxplug_autograd``.
        calls: The forms of its calls so far; the operator's last argument is an index into them.
    """

    def __init__(self, function: type) -> None:
        self.function = function
        self.calls: list[_Call] = []
        self._known: dict[Any, int] = {}
        stem = re.sub(r"\W+", "_", f"{function.__module__}_{function.__qualname__}").strip("_")
        taken = {operator.name for operator in _OPERATORS.values()}
        self.name: str = next(n for i in range(len(taken) + 1) if (n := f"{stem}_{i}" if i else stem) not in taken)
        if not _LIBRARY:
            _LIBRARY.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
        _LIBRARY[0].define(self.name + _SCHEMA)
        _LIBRARY[0].impl(self.name, self._run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._run, lib=_LIBRARY[0])

    def __call__(self, args: Sequence[Any]) -> Any:
        """The call of the operator for a call of the function."""
        leaves, spec = pytree.tree_flatten(tuple(args))
        tensors: list[torch.Tensor] = []
        sizes: list[Any] = []
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                places.append(_Tensor("tensor", len(tensors)))
                tensors.append(leaf)
            elif isinstance(leaf, torch.SymInt):
                places.append(_Tensor("size", len(sizes)))
                sizes.append(leaf)
            else:
                # The operator takes no other numbers of dynamic sizes: these are guarded to be the example's.
                fixed = {torch.SymFloat: float, torch.SymBool: bool}.get(type(leaf))
                places.append(leaf if fixed is None else fixed(leaf))
        call = self._index(places, spec)
        results = getattr(getattr(torch.ops, NAMESPACE), self.name)(tensors, sizes, call)
        return self.calls[call].rebuild(results)

    @property
    def separate(self) -> bool:
        """Whether ``forward`` takes no ``ctx``: the function has a ``setup_context``."""
        base = torch_private.SingleLevelFunction
        return self.function.setup_context is not base.setup_context  # type: ignore[attr-defined]

    def _index(self, places: Sequence[Any], spec: Any) -> int:
        """The number of a form of call; a known form keeps its number."""
        key: Any = (
            str(spec),
            *(x.kind if isinstance(x, _Tensor) else (type(x), repr(x) if _is_plain(x) else id(x)) for x in places),
        )
        with _LOCK:
            known = self._known.get(key)
            if known is None:
                # The call keeps its arguments alive, so that their ids are not reused.
                known = self._known[key] = len(self.calls)
                self.calls.append(_Call(places, spec))
            return known

    def _run(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any], call: int) -> list[torch.Tensor]:
        arguments = self.calls[call].arguments(tensors, sizes)
        forward = _original_forward(self.function)
        with torch.no_grad():
            results = forward(*arguments) if self.separate else forward(_Context(self.function), *arguments)
        kept = self.calls[call].keep(results)
        # An operator without alias annotations returns memory of its own.
        return [
            t.clone() if any(t is x or _shares_memory(t, x) for x in [*tensors, *kept[:i]]) else t
            for i, t in enumerate(kept)
        ]


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    alias = torch_private.is_alias_of
    return bool(alias(one, other))


def _is_plain(item: Any) -> bool:
    return item is None or isinstance(item, bool | int | float | str | torch.dtype | torch.device)


class _Context:
    """The ``ctx`` of a ``forward`` whose ``backward`` never runs."""

    saved_tensors: tuple[torch.Tensor, ...] = ()

    def __init__(self, function: type) -> None:
        self._function = function
        self.needs_input_grad = (False,) * 64

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Accepts and discards tensors: there is no backward."""

    save_for_forward = save_for_backward
    mark_non_differentiable = save_for_backward

    def set_materialize_grads(self, value: bool) -> None:
        """Has no effect: there are no gradients."""

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        """Refuses a function that writes its inputs, which can't be one functional operator.

        Raises:
            UsageError: Always.
        """
        raise UsageError(
            f"{self._function.__qualname__} writes its inputs (mark_dirty), so that it can't be translated as a whole",
            hint="Leave it out of rules=; torch.export then traces into it.",
        )
