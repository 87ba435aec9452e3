"""Dynamic dimensions whose example size is 0 or 1, and what in the model depends on that size.

torch.export takes a size of 0 or 1 for a constant. onnxplug asks it not to (``backed_size_oblivious``), so that an example
with a batch of 1 gives a model for any batch. Two things then go unnoticed by torch, and are looked for here: a Python
branch that holds for the size 0 or 1 alone (``if x.shape[0] == 1``), and ``squeeze``, which keeps the axis.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from onnxplug.capture.guards import holds_for_all, is_of_python, may_hold, user_line
from onnxplug.capture.locations import source_location

_SQUEEZES = {"aten::squeeze", "aten::squeeze_", "aten::squeeze_copy"}
#: Sizes that are tried to find out whether a guard holds for any size but 0 and 1.
_TRIED = (*range(2, 18), 24, 32, 48, 64, 100, 128, 224, 256, 512, 1000, 1024, 5040)
_FEW = (2, 3, 4, 5, 6, 8, 16)


@dataclass(frozen=True)
class Dependence:
    """A place in the model that depends on a dynamic size's being 0 or 1.

    Attributes:
        symbols: torch's symbols of the size.
        kind: ``"guard"`` for a branch in Python, ``"squeeze"``.
        place: The user's ``file:line``, ``None`` when torch recorded none.
        text: What holds, as ``"size == 1"``; or the axis that is kept.
    """

    symbols: frozenset[Any]
    kind: str
    place: str | None
    text: str


class _Replaced:
    """A method of torch's ``ShapeEnv`` that is another one as long as any thread needs it.

    Args:
        name: The method.
        replacement: Called with the method itself, then its arguments.
    """

    def __init__(self, name: str, replacement: Callable[..., Any]) -> None:
        self._name = name
        self._original = original = getattr(ShapeEnv, name)
        self._lock = threading.Lock()
        self._depth = 0

        def method(env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
            return replacement(original, env, *args, **kwargs)

        self._method = method

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
            setattr(ShapeEnv, self._name, self._method)
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if not self._depth:
                    setattr(ShapeEnv, self._name, self._original)


def _produce_guards(original: Callable[..., Any], env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
    guards = env.guards
    env.guards = [guard for guard in guards if not _is_of_layout(env, guard)]
    try:
        return original(env, *args, **kwargs)
    finally:
        env.guards = guards


def _is_of_layout(env: Any, guard: Any) -> bool:
    if is_of_python(guard.sloc):
        return False
    hints = [env.backed_var_to_val.get(symbol) for symbol in guard.expr.free_symbols]
    return all(hint is not None and hint > 1 for hint in hints) and holds_for_all(guard.expr, {})


def _create_symbol(original: Callable[..., Any], env: ShapeEnv, val: Any, *args: Any, **kwargs: Any) -> Any:
    if type(val) is int and val == 0 and kwargs.get("do_not_specialize_zero_one"):
        kwargs["positive"] = None
    return original(env, val, *args, **kwargs)


#: While it holds, a dynamic dimension whose example size is 0 is not assumed to be positive: torch's symbols of sizes are, so that
#: ``size == 0`` is false before the example is looked at.
zero_is_a_size = _Replaced("create_symbol", _create_symbol)
#: While it holds, what operators ask of sizes of 2 or more in order to lay out memory is no constraint on a dimension: torch
#: refuses a named dimension of which ``reshape`` asks whether its size is 1, as ``matmul`` makes it do.
layout_may_depend_on_one = _Replaced("produce_guards", _produce_guards)


def dependences(program: torch.export.ExportedProgram, sizes: Sequence[Any]) -> list[Dependence]:
    """What depends on dynamic sizes' being 0 or 1.

    Args:
        program: The captured program.
        sizes: The sizes of its inputs that were asked to be dynamic, as torch recorded them.
    """
    symbolic = [s for s in sizes if isinstance(s, torch.SymInt) and s.node.expr.is_Symbol]
    if not symbolic:
        return []
    hints = {s.node.expr: s.node.hint for s in symbolic}
    small = {symbol for symbol, hint in hints.items() if hint in (0, 1)}
    found = _guards(symbolic[0].node.shape_env, small) if small else []
    return [*found, *_squeezes(program, set(hints))]


def _guards(env: Any, small: set[Any]) -> list[Dependence]:
    found = []
    for guard in env.guards:
        expr = env.replace(guard.expr)
        involved = frozenset(s for s in expr.free_symbols if s in small)
        if involved and not _holds_elsewhere(expr, involved):
            found.append(Dependence(involved, "guard", user_line(guard.sloc), _text(expr)))
    return found


def _text(expr: Any) -> str:
    """A guard in Python's notation, its symbol called ``size`` where there is one alone."""
    import sympy

    if len(expr.free_symbols) == 1:
        expr = expr.xreplace({next(iter(expr.free_symbols)): sympy.Symbol("size", integer=True)})
    return f"{expr.lhs} == {expr.rhs}" if isinstance(expr, sympy.Eq) else str(expr)


def _holds_elsewhere(expr: Any, small: frozenset[Any]) -> bool:
    """Whether a guard holds for some size of 2 or more; True where that is unknown."""
    import sympy

    others = expr.free_symbols - small
    symbols = [*sorted(small, key=str), *sorted(others, key=str)]
    if len(symbols) > 3:
        return True
    choices: list[Sequence[int]] = (
        [_TRIED] if len(symbols) == 1 else [_FEW] * len(small) + [(0, 1, *_FEW)] * len(others)
    )
    return any(
        may_hold(expr, {s: sympy.Integer(v) for s, v in zip(symbols, values, strict=True)})
        for values in itertools.product(*choices)
    )


def _squeezes(program: torch.export.ExportedProgram, asked: set[Any]) -> list[Dependence]:
    found = []
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if getattr(getattr(node.target, "_schema", None), "name", None) not in _SQUEEZES:
                continue
            source = node.args[0].meta.get("val")
            for axis in _squeezed_axes(node, source):
                size = source.shape[axis]
                if not isinstance(size, torch.SymInt) or size.node.hint != 1:
                    continue
                symbols = frozenset(size.node.expr.free_symbols & asked)
                if symbols:
                    found.append(Dependence(symbols, "squeeze", source_location(node), str(axis)))
    return found


def _squeezed_axes(node: torch.fx.Node, source: Any) -> list[int]:
    """The axes that a squeeze is asked to take away where their size is 1."""
    if not isinstance(source, torch.Tensor):
        return []
    wanted: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if wanted is None:
        return list(range(source.dim()))
    axes = [wanted] if isinstance(wanted, int) else list(wanted)
    return [axis % source.dim() for axis in axes] if source.dim() else []
